"""The proof of an export that a server makes the training rows' tokens and stops where answers ended.

More than 20 CPU s: each export is compared with rows that are prepared for it.
"""

from __future__ import annotations

import datetime
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.folder_files import copy_beside
from llmtrain.checkpoint.hf.proofs import ProofError, Report
from llmtrain.checkpoint.hf.serving import chat_folders
from llmtrain.checkpoint.hf.serving_proof import prove_serving
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.commands.prepare import main
from llmtrain.data.chat import rendering
from llmtrain.data.chat.encoder import CONVERSATIONS, NAME
from llmtrain.data.shards import PreparedSet
from llmtrain.data.tokenizer_folder import fingerprint
from tests.helpers.chat import CHATML, GENERATION, KINDS, workers_here, write_tokenizer
from tests.helpers.chat_oracle import FAMILIES, conversations, write_family
from tests.helpers.hf_folders import checkpoint_of, new_model


@pytest.fixture
def prepare() -> Iterator[Any]:
    """`llmtrain prepare` of records with the tokenizer of a folder, in this process: returns the data folder."""

    def call(model: Path, records: list[dict[str, Any]], *words: str) -> Path:
        source, out = model.with_name(f"{model.name}.jsonl"), model.with_name(f"{model.name}-data")
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        fixed = ["--source", str(source), "--out", str(out), "--tokenizer", str(model), "--max-rejected", "999"]
        assert main([*fixed, "--validation-fraction", "0.1", "--shard-bytes", "9000", *words]) == 0
        return out

    with workers_here():
        yield call


def talks(count: int = 150) -> list[list[dict[str, str]]]:
    draw = random.Random(1)
    made = []
    for _ in range(count):
        texts = [" ".join(draw.choices(["yes", " no", "naïve Ω", "so\n"], k=3)) for _ in range(2 * draw.randint(1, 3))]
        made.append([{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)])
    return made


def told(folder: Path, data: Path) -> str:
    report = Report(folder)
    prove_serving(folder, chat_folders(TrainerState(tokenizer_dir=str(data / "tokenizer"))), report)
    return "\n".join(report.lines)


def exported(tmp_path: Path, data: Path, **model: Any) -> Path:
    beside = {"tokenizer_dir": str(data / "tokenizer"), "separator_id": 0}
    checkpoint = checkpoint_of(new_model("llama", vocab_size=270, **model), tmp_path / "run", **beside)
    export_hf(checkpoint, tmp_path / "out")
    return tmp_path / "out"


def test_an_export_proves_itself_and_names_the_trained_end(tmp_path: Path, prepare: Any) -> None:
    """Gemma's <end_of_turn> is in generation_config.json of the model that was given, and no eos_token."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    data = prepare(
        write_tokenizer(tmp_path / "m", KINDS["gemma"]), [{"messages": talk} for talk in talks()], "--format", "chat"
    )
    kept = (data / NAME).read_text().splitlines()
    assert 0.9 * CONVERSATIONS < len(kept) <= CONVERSATIONS
    out = exported(tmp_path, data)
    words = AutoTokenizer.from_pretrained(out)
    ends = words.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    assert GenerationConfig.from_pretrained(out).eos_token_id == AutoConfig.from_pretrained(out).eos_token_id == ends
    turns = sum(len(json.loads(json.loads(line)["record"])["messages"]) // 2 for line in kept)
    assert f"{turns} turns of {len(kept)} conversations" in (found := told(out, data))
    assert f"generation stops at the trained end: {ends[1]}" in found and "not compared" not in found
    copy = PreparedSet(f"file://{data}", str(tmp_path / "cache")).folder
    assert told(out, copy) == found.replace(str(data), str(copy))
    shutil.rmtree(copy)  # as when the cache made room
    run = {"data": {"path": f"file://{data}", "cache": str(tmp_path / "cache")}}
    trainer = TrainerState(tokenizer_dir=str(copy / "tokenizer"), tokenizer=fingerprint(data / "tokenizer"), run=run)
    (tmp_path / "again").mkdir()
    assert copy_beside(tmp_path / "again", trainer, out, Report(out)) == copy / "tokenizer"
    assert fingerprint(tmp_path / "again") == fingerprint(data / "tokenizer")


def test_a_scrambled_tokenizer_is_not_exported(tmp_path: Path, prepare: Any) -> None:
    """Two words that have changed their ids: each text of the model would read as another."""
    model = write_tokenizer(tmp_path / "m", KINDS["llama3"])
    data = prepare(model, [{"messages": talk} for talk in talks(30)], "--format", "chat")
    file = data / "tokenizer" / "tokenizer.json"
    right, told = fingerprint(data / "tokenizer"), json.loads(file.read_text())
    words = told["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(told))
    beside = {"tokenizer_dir": str(data / "tokenizer"), "separator_id": 0, "tokenizer": right}
    checkpoint = checkpoint_of(new_model("llama", vocab_size=270), tmp_path / "run", **beside)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        export_hf(checkpoint, tmp_path / "out", check="none")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("change", ["template", "ends", "rows"])
def test_a_folder_that_would_be_served_otherwise_is_refused(
    tmp_path: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    model = write_tokenizer(tmp_path / "m", KINDS["llama3"])
    data = prepare(model, [{"messages": talk} for talk in talks(30)], "--format", "chat")
    rule = "the prompt has other ids"
    if change == "template":
        path = data / "tokenizer" / "tokenizer_config.json"
        path.write_text(path.read_text().replace("| trim", ""))
    elif change == "rows":
        lines = [json.loads(line) for line in (data / NAME).read_text().splitlines()]
        lines[3]["record"] = lines[2]["record"]
        (data / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
        rule = "line 4 of"
    else:
        monkeypatch.setattr("llmtrain.checkpoint.hf.folder_files.ends_of", lambda folders: [])
        rule = "does not name"
    with pytest.raises(ProofError, match=rule):
        exported(tmp_path, data)
    assert not list(tmp_path.glob("out*"))
    monkeypatch.setattr("llmtrain.checkpoint.hf.serving_proof.prove_serving", None)
    export_hf(tmp_path / "run" / "checkpoints" / "step-00000007", tmp_path / "out", check="none")


@pytest.fixture
def days_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function after which it is two days later for whatever renders a template, here or in a process of its own."""
    from transformers.utils import chat_template_utils

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + datetime.timedelta(days=2)

    def shift() -> None:
        text = "import datetime\n\n\nclass Later(datetime.datetime):\n    @classmethod\n    def now(cls, tz=None):\n"
        text += "        return super().now(tz) + datetime.timedelta(days=2)\n\n\ndatetime.datetime = Later\n"
        (tmp_path / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(chat_template_utils, "datetime", Later)
        rendering.close()

    yield shift
    rendering.close()


def test_an_export_days_later_has_the_prompts_that_were_trained(tmp_path: Path, prepare: Any, days_later: Any) -> None:
    """A run that crossed midnight ended with rc 1 and no export, and to-hf refused for ever."""
    dated = "<|im_start|>system\nToday: {{ strftime_now('%d %b %Y') }}<|im_end|>\n" + CHATML
    model = write_tokenizer(tmp_path / "m", replace(KINDS["chatml"], template=dated))
    data = prepare(model, [{"messages": talk} for talk in talks(30)], "--format", "chat")
    days_later()
    told_of = told(exported(tmp_path, data), data)
    manifest = json.loads((data / "manifest.json").read_text())
    assert manifest["chat"].pop("moment")[:10] in told_of and str(data) in told_of
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ProofError, match="other ids"):
        told(tmp_path / "out", data)


def test_what_templates_were_told_is_told_again(tmp_path: Path, prepare: Any) -> None:
    """chat_template_kwargs of a record and of all; a named template and its tools; arguments joined as texts."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}<|im_end|>"
    template = "{{ think | default('yes') }}" + GENERATION.replace(
        "{{ m.content }}<|im_end|>", "{{ m.content }}" + calls
    )
    model = write_tokenizer(tmp_path / "m", KINDS["chatml"])
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").write_text("{{ think | default('yes') }}" + CHATML)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}" + template)
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"on":"a"}'}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    records: list[dict[str, Any]] = [{"messages": talk} for talk in talks(30)]
    records += [{**record, "chat_template_kwargs": {"think": "maybe"}} for record in records]
    records += [{"messages": [*record["messages"][:1], called], "tools": tools} for record in records]
    data = prepare(model, records, "--format", "chat", "--chat-template-kwargs", '{"think": "no"}')
    assert not (data / "rejected.jsonl").exists(), (data / "rejected.jsonl").read_text()
    out = exported(tmp_path, data)
    assert 'chat_template_kwargs {"think": "no"}' in told(out, data)
    assert (out / "additional_chat_templates" / "tool_use.jinja").is_file()
    (out / "additional_chat_templates" / "tool_use.jinja").unlink()
    with pytest.raises(ProofError, match="other ids"):
        told(out, data)


@pytest.mark.parametrize("name", ["preference", "unpaired"])
def test_preferences_and_judged_answers(tmp_path: Path, prepare: Any, name: str) -> None:
    records = [
        {"prompt": f"q {at}", "chosen": "yes", "rejected": f"no {at}", "completion": "so", "label": at % 2 == 0}
        for at in range(60)
    ]
    data = prepare(write_tokenizer(tmp_path / "m", KINDS["chatml"]), records, "--format", name)
    kept = len((data / NAME).read_text().splitlines())
    turns = 2 * kept if name == "preference" else kept
    assert kept > 40 and f"{turns} turns of {kept} conversations" in told(exported(tmp_path, data), data)


@pytest.mark.parametrize("count", ["assistant", "last", "all"])
def test_what_is_counted_and_what_is_cut_change_nothing(tmp_path: Path, prepare: Any, count: str) -> None:
    model = write_tokenizer(tmp_path / "m", KINDS["qwen3"])
    more = ["--format", "chat", "--count", count, "--max-tokens", "150", "--too-long", "split"]
    data = prepare(model, [{"messages": talk} for talk in talks(60)], *more)
    kept = len((data / NAME).read_text().splitlines())
    assert 5 < kept < json.loads((data / "manifest.json").read_text())["documents"]["train"]
    assert f"of {kept} conversations" in told(model, data)


@pytest.mark.slow
def test_all_families(tmp_path: Path, prepare: Any) -> None:
    """With hostile contents, tools and thoughts: what spells control tokens is set aside by number."""
    compared = 0
    for name, family in FAMILIES.items():
        if not family.usable:
            continue
        model = write_family(tmp_path / name, family)
        data = prepare(model, [record for record, *_ in conversations(family, 100)], "--format", "chat")
        found = told(model, data)
        compared += int(found.split()[1])
        assert "generation stops at the trained end" in found, name
    assert compared > 700


def test_data_that_keeps_none_is_said(tmp_path: Path, prepare: Any) -> None:
    model = write_tokenizer(tmp_path / "m", KINDS["chatml"])
    data = prepare(model, [{"messages": talk} for talk in talks(30)], "--format", "chat")
    (data / NAME).unlink()
    assert "not compared" in told(model, data)
    assert told(model, tmp_path / "gone") == ""


def test_every_set_of_a_mixture_is_compared(tmp_path: Path, prepare: Any) -> None:
    """Their tokenizers are one, their templates need not be."""
    records = [{"messages": talk} for talk in talks(30)]
    models = [write_tokenizer(tmp_path / name, KINDS["chatml"]) for name in "ab"]
    first, other = (prepare(model, records, "--format", "chat") for model in models)
    run = {"data": {"mixture": {str(first): 1, str(other): 1}}}
    trainer = TrainerState(tokenizer_dir=str(first / "tokenizer"), run=run)
    report = Report(tmp_path / "a")
    prove_serving(tmp_path / "a", chat_folders(trainer), report)
    assert sum("transformers makes" in line for line in report.lines) == 2
    other_template = CHATML.replace("role }}\n", "role }}:\n").replace("assistant\n", "assistant:\n")
    model = write_tokenizer(tmp_path / "b2", replace(KINDS["chatml"], template=other_template))
    third = prepare(model, records, "--format", "chat")
    run["data"]["mixture"] = {str(first): 1, str(third): 1}
    with pytest.raises(ProofError, match=r"b2-data.*other ids"):
        prove_serving(tmp_path / "a", chat_folders(trainer), report)
