"""The proof of an export that a server makes the training rows' tokens and stops where answers ended."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmtrain.checkpoint.hf import exporting
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.proofs import ProofError, Report
from llmtrain.checkpoint.hf.serving import prove_serving
from llmtrain.data import prepare as preparing
from llmtrain.data.chat import ChatEncoder
from llmtrain.data.sample import CONVERSATIONS, NAME
from llmtrain.data.tokenize import fingerprint
from llmtrain.data.worker import process_unit
from llmtrain.errors import CheckpointError
from tests.helpers.chat import CHATML, KINDS, write_tokenizer
from tests.helpers.chat_families import FAMILIES
from tests.helpers.chat_oracle import conversations, write_family
from tests.helpers.hf_folders import checkpoint_of, new_model


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`llmtrain prepare` of records with the tokenizer of a folder, in this process: returns the data folder."""

    def run_units(todo: Any, settings: Any, processes: int, under_way: Any, keep: Any) -> None:
        encoder = ChatEncoder(Path(settings.out) / "tokenizer", settings.chat)
        for unit in todo:
            keep(unit, process_unit(unit, settings, encoder, lambda size: None))

    monkeypatch.setattr(preparing, "run_units", run_units)

    def call(model: Path, records: list[dict[str, Any]], *words: str) -> Path:
        source, out = model.with_name(f"{model.name}.jsonl"), model.with_name(f"{model.name}-data")
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        fixed = ["--source", str(source), "--out", str(out), "--tokenizer", str(model), "--max-rejected", "999"]
        assert preparing.main([*fixed, "--validation-fraction", "0.1", "--shard-bytes", "9000", *words]) == 0
        return out

    return call


def talks(count: int = 150) -> list[list[dict[str, str]]]:
    draw = random.Random(1)
    made = []
    for _ in range(count):
        texts = [" ".join(draw.choices(["yes", " no", "naïve Ω", "so\n"], k=3)) for _ in range(2 * draw.randint(1, 3))]
        made.append([{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)])
    return made


def told(folder: Path, data: Path) -> str:
    report = Report(folder)
    prove_serving(folder, {"tokenizer_dir": str(data / "tokenizer")}, report)
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


def test_a_scrambled_tokenizer_is_not_exported(tmp_path: Path, prepare: Any) -> None:
    """Two words that have changed their ids: each text of the model would read as another."""
    model = write_tokenizer(tmp_path / "m", KINDS["llama3"])
    data = prepare(model, [{"messages": talk} for talk in talks(20)], "--format", "chat")
    file = data / "tokenizer" / "tokenizer.json"
    right, told = fingerprint(data / "tokenizer"), json.loads(file.read_text())
    words = told["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(told))
    for trainer in ({"tokenizer": right}, {}):  # an older checkpoint does not tell: the data's manifest does
        beside = {"tokenizer_dir": str(data / "tokenizer"), "separator_id": 0, **trainer}
        checkpoint = checkpoint_of(new_model("llama", vocab_size=270), tmp_path / f"run{len(trainer)}", **beside)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is not the one that the run was trained with"):
            export_hf(checkpoint, tmp_path / "out", check="none")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("change", ["template", "ends", "rows"])
def test_a_folder_that_would_be_served_otherwise_is_refused(
    tmp_path: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    model = write_tokenizer(tmp_path / "m", KINDS["llama3"])
    data = prepare(model, [{"messages": talk} for talk in talks(20)], "--format", "chat")
    rule = "the prompt has other ids"
    if change == "template":
        path = data / "tokenizer" / "tokenizer_config.json"
        path.write_text(path.read_text().replace("| trim", ""))
    elif change == "rows":
        lines = [json.loads(line) for line in (data / NAME).read_text().splitlines()]
        lines[3]["record"] = lines[2]["record"]
        (data / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
        rule = "of line 4 of"
    else:
        monkeypatch.setattr("llmtrain.checkpoint.hf.beside.ends_of", lambda folders: [])
        rule = "does not name"
    with pytest.raises(ProofError, match=rule):
        exported(tmp_path, data)
    assert not list(tmp_path.glob("out*"))
    monkeypatch.setattr(exporting, "prove_serving", None)
    export_hf(tmp_path / "run" / "checkpoints" / "step-00000007", tmp_path / "out", check="none")


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
    data = prepare(model, [{"messages": talk} for talk in talks(20)], "--format", "chat")
    (data / NAME).unlink()
    assert "not compared" in told(model, data)
    assert told(model, tmp_path / "gone") == ""


def test_every_set_of_a_mixture_is_compared(tmp_path: Path, prepare: Any) -> None:
    """Their tokenizers are one, their templates need not be."""
    records = [{"messages": talk} for talk in talks(20)]
    models = [write_tokenizer(tmp_path / name, KINDS["chatml"]) for name in "ab"]
    first, other = (prepare(model, records, "--format", "chat") for model in models)
    trainer = {"tokenizer_dir": str(first / "tokenizer"), "run": {"data": {"mixture": {str(first): 1, str(other): 1}}}}
    report = Report(tmp_path / "a")
    prove_serving(tmp_path / "a", trainer, report)
    assert sum("transformers makes" in line for line in report.lines) == 2
    other_template = CHATML.replace("role }}\n", "role }}:\n").replace("assistant\n", "assistant:\n")
    model = write_tokenizer(tmp_path / "b2", replace(KINDS["chatml"], template=other_template))
    third = prepare(model, records, "--format", "chat")
    trainer["run"]["data"]["mixture"] = {str(first): 1, str(third): 1}
    with pytest.raises(ProofError, match=r"b2-data.*other ids"):
        prove_serving(tmp_path / "a", trainer, report)
