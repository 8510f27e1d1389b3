"""Models, tokenizers and datasets by their names on the Hub, against a local server that speaks its routes."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from llmtrain.base.errors import ConfigError, ModelError
from llmtrain.checkpoint.format import FrozenSource
from llmtrain.checkpoint.hf.exporting import base_fields
from llmtrain.cli import main
from llmtrain.config import pinned as base
from llmtrain.config.load import parse
from llmtrain.config.run import DataConfig, ModelConfig, RunConfig, TrainConfig
from llmtrain.data.manifest import read_manifest
from llmtrain.data.tokenize import train_bpe
from llmtrain.models.skeleton import load_config
from llmtrain.models.source import INDEX, SafetensorsSource
from llmtrain.models.teacher import teacher_model
from llmtrain.objectives.objective import Objective
from llmtrain.storage import hub as fetching
from llmtrain.storage.addresses import is_name
from tests.helpers.hf_folders import model_folder, new_model
from tests.helpers.hub_server import TOKEN, Hub, serving
from tests.helpers.prepared import write_prepared

PAGE = Path(__file__).parents[3] / "docs/hub.md"
OTHER = "hf_" + "b" * 34


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in five weight files."""
    return model_folder(tmp_path_factory.mktemp("tiny") / "tiny", new_model("llama", tied=True), shard="30KB")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, an empty cache, an empty working folder, and no token."""
    from huggingface_hub import constants

    with serving() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        yield served


def first_weights(folder: Path | None) -> Path:
    assert folder is not None
    return min(folder.glob("*.safetensors"))


def run_of(name: str = "org/tiny", revision: str | None = None, **run: Any) -> RunConfig:
    model = ModelConfig(pretrained=name, revision=revision)
    return RunConfig(deepspeed="ds.json", model=model, train=TrainConfig(run_dir="runs/x"), **run)


def fetched(name: str = "org/tiny", revision: str | None = None, **run: Any) -> ModelConfig:
    return base.fetched(run_of(name, revision, **run), weights_too=True)[0].model


def refused(*about: Any) -> str:
    with pytest.raises(ModelError) as caught:
        fetched(*about)
    text = str(caught.value)
    assert text.startswith(f"model.pretrained: {about[0] if about else 'org/tiny'}: ")
    return text


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_what_is_fetched_and_that_a_second_start_asks_nothing_of_a_commit(hub: Hub, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    extra = {
        "pytorch_model.bin": b"no",
        "model.py": b"no",
        "onnx/config.json": b"{}",
        "consolidated.safetensors": b"no",
    }
    named = "additional_chat_templates/tool_use.jinja"
    commit = hub.add("models/org/tiny", {**files, **extra, named: b"{{ tools }}"})
    model = fetched()
    assert model.revision == commit and model.pretrained == "org/tiny"
    assert model.folder is not None and sorted(os.listdir(model.folder)) == sorted([*files, Path(named).parts[0]])
    assert (model.folder / named).read_bytes() == b"{{ tools }}"
    assert load_config(model).hidden_size == 32
    SafetensorsSource(model.folder).close()
    assert hub.asked.count("GET /api/models/org/tiny") == 1 and not hub.leaked
    before = len(hub.asked)
    assert fetched(revision=commit) == model
    assert len(hub.asked) == before
    note = model.folder.parents[1] / fetching._NOTES / f"{commit}.json"
    for damaged in ("", "[]", '{"files": []}', '{"files": {"a": 1}}', '{"files": {"a": ["b", 1]}}', '{"proved": [1]}'):
        note.write_text(damaged)
        assert fetched(revision=commit) == model, damaged


def test_only_the_settings_are_fetched_for_a_run_that_goes_on(hub: Hub, tiny: Path) -> None:
    hub.add("models/org/tiny", tiny)
    run, notes = base.fetched(run_of())
    assert not hub.count("safetensors HTTP") and not hub.count("/cdn/")
    assert run.model.folder is not None and (run.model.folder / "tokenizer.json").is_file()
    assert "org/tiny" in notes[0] and hub.url in notes[0]


def test_weights_are_not_fetched_of_a_model_of_another_tokenizer(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    for number, words in enumerate((["one two three"], ["four five six"])):
        train_bpe([f"{text} {times}" * 9 for text in words for times in range(99)], 262, tmp_path / str(number))
    mine, other = ((tmp_path / number / "tokenizer.json").read_text() for number in "01")
    hub.add("models/org/tiny", {**{p.name: p.read_bytes() for p in tiny.iterdir()}, "tokenizer.json": mine.encode()})
    data = write_prepared(tmp_path / "data", [[[1, 2]]], [[[1]]], vocab_size=262, tokenizer=other)
    with pytest.raises(ConfigError, match="--tokenizer org/tiny", check=lambda e: e.keys == {"model.pretrained"}):
        fetched(data=DataConfig(path=str(data)))
    assert hub.count("tokenizer.json") and not hub.count("safetensors HTTP") and not hub.count("/cdn/")


def test_the_other_ranks_of_a_launch_take_the_commit_of_the_first(
    hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("models/org/tiny", tiny)
    monkeypatch.setenv("LOCAL_RANK", "0")
    first = fetched()
    hub.add("models/org/tiny", {**{p.name: p.read_bytes() for p in tiny.iterdir()}, "new.txt": b"x"})  # main moves on
    before = len(hub.asked)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert fetched() == first and len(hub.asked) == before
    monkeypatch.setattr(fetching, "_launch", lambda: "another launch")
    assert fetched().revision != first.revision


def test_a_folder_that_is_here_wins(hub: Hub, tiny: Path) -> None:
    hub.add("models/org/tiny", tiny)
    assert is_name("org/tiny")
    shutil.copytree(tiny, "org/tiny")
    assert base.fetched(run_of()) == (run_of(), ()) and not hub.asked
    assert run_of().model.folder == Path("org/tiny")
    for path in ("tiny", "./org/tiny", "/org/tiny", "../tiny", "a/b/c", "org/", "org/na--me", "~/tiny"):
        assert not is_name(path), path


def test_troubles_are_told_apart(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("models/org/tiny", tiny)
    hub.add("models/org/secret", tiny, private=True)
    hub.add("models/org/gated", tiny, gated=True)
    texts = [refused("org/tyni"), refused("org/tiny", "v9"), refused("org/gated")]
    assert str(Path.cwd()) in texts[0] and "private" in texts[0] and "HF_TOKEN" in texts[0]
    assert "v9" in texts[1] and "HF_TOKEN" not in texts[1]
    assert f"{hub.url}/org/gated" in texts[2] and "HF_TOKEN" in texts[2]
    assert refused("org/secret") == texts[0].replace("tyni", "secret")
    monkeypatch.setenv("HF_TOKEN", OTHER)
    secret, gated = refused("org/secret"), refused("org/gated")
    assert "private" in secret and f"{hub.url}/org/gated" in gated and "HF_TOKEN" not in secret + gated
    monkeypatch.setenv("HF_TOKEN", "hf_" + "c" * 34)
    assert "HF_TOKEN" in refused("org/secret")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetched("org/secret").folder and fetched("org/gated").folder and not hub.leaked
    hub.down = True
    with pytest.raises(ModelError, match="status 500") as caught:
        fetched("org/other")
    assert caught.value.passing  # `launch` may start again


def test_no_network_and_offline(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from huggingface_hub import constants

    hub.add("models/org/tiny", tiny)
    model = fetched()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    assert fetched() == model
    assert str(model.revision) in capsys.readouterr().err
    text = refused("org/tyni")
    assert str(Path.cwd()) in text and nobody in text
    offline(monkeypatch)
    assert fetched() == model
    text = refused("org/tyni")
    assert str(Path.cwd()) in text and "cache" in text and "HF_HUB_OFFLINE" in text
    shutil.rmtree(Path(constants.HF_HUB_CACHE) / "models--org--tiny" / "llmtrain")  # as other programs leave it
    assert fetched() == model
    first_weights(model.folder).unlink()
    assert "HF_HUB_OFFLINE" in refused()


def test_checksums_are_those_of_the_hub(hub: Hub, tiny: Path) -> None:
    for name in (first_weights(tiny).name, "config.json"):
        commit = hub.add("models/org/tiny", tiny)
        hub.damaged = {name}
        text = refused()
        assert name in text and commit in text
        hub.damaged = set()
        model = fetched()
        assert model.folder is not None and (model.folder / name).read_bytes() == (tiny / name).read_bytes()
        shutil.rmtree(Path(model.folder).parents[1])
    model = fetched()
    file = (model.folder or Path()) / "config.json"
    data = file.read_bytes()
    file.resolve().write_bytes(data[:-2] + b" }")  # later, on the disk
    assert "config.json" in refused()
    assert fetched() == model and file.read_bytes() == data


def test_safetensors_alone(hub: Hub, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    settings = {name: data for name, data in files.items() if "safetensors" not in name}
    hub.add("models/org/pickle", {**settings, "pytorch_model.bin": b"gone"})
    assert "pytorch_model.bin" in refused("org/pickle")
    hub.add("models/org/none", settings)
    assert "no weights" in refused("org/none")
    hub.add("models/org/odd", {**files, INDEX: json.dumps({"weight_map": {"a": "../evil"}}).encode()})
    assert "'../evil'" in refused("org/odd")
    hub.add("models/org/both", {**files, "model.safetensors": b"x"})
    assert all(name in refused("org/both") for name in (INDEX, "model.safetensors"))
    assert not hub.count("pytorch_model.bin") and not hub.count("/cdn/")


def test_a_full_disk(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("models/org/tiny", tiny)
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
        text = refused()
    assert "100 B" in text and "HF_HOME" in text
    with monkeypatch.context() as full:

        def no_space(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        full.setattr("huggingface_hub.snapshot_download", no_space)
        assert "No space left on device" in refused()


@pytest.mark.parametrize(
    ("trouble", "said", "passing"),
    [("down", "answers with status 500", True), ("private", "or is private and a user without a token", False)],
)
def test_a_hub_that_refuses_after_the_settings(
    trouble: str, said: str, passing: bool, hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """snapshot_download may then return the folder with the files that are here."""
    commit = hub.add("models/org/tiny", tiny)
    base.fetched(run_of())
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: "")
    monkeypatch.setattr("time.sleep", lambda _: None)  # huggingface_hub asks five times
    hub.down, hub.repos["models/org/tiny"].private = trouble == "down", trouble == "private"
    with pytest.raises(ModelError, match=said) as caught:
        fetched(revision=commit)
    assert caught.value.passing == passing


def test_a_resume_takes_the_commit_with_which_the_run_began(hub: Hub, tiny: Path) -> None:
    first = hub.add("models/org/tiny", tiny)
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.yaml").write_text(yaml.safe_dump({"model": {"pretrained": "org/tiny", "revision": first}}))
    newer = hub.add("models/org/tiny", {**{p.name: p.read_bytes() for p in tiny.iterdir()}, "new.txt": b"x"})
    assert fetched().revision == first
    assert fetched(resume="none").revision == newer
    assert fetched(resume="runs/x/checkpoints/step-00000002").revision == first
    with pytest.raises(ConfigError, match=f"began with commit {first} of org/tiny"):
        fetched(revision=newer)
    elsewhere = replace(run_of(resume="runs/x/checkpoints/step-00000002"), train=TrainConfig(run_dir="runs/y"))
    assert base.fetched(elsewhere)[0].model.revision == first


def test_a_teacher_is_a_name_too(hub: Hub, tiny: Path) -> None:
    first = hub.add("models/org/teacher", tiny)
    run = replace(run_of(str(tiny)), objective=Objective.of("distill", teacher="org/teacher"))
    found, (note,) = base.fetched(run)
    assert found.objective.teacher_revision == first and "objective.teacher: org/teacher" in note
    model = teacher_model(found.objective, found.model)
    assert first_weights(model.folder).read_bytes() == first_weights(tiny).read_bytes()
    Path("runs/x").mkdir(parents=True)
    noted = {"objective": {"teacher": "org/teacher", "teacher_revision": first}}
    Path("runs/x/config.yaml").write_text(yaml.safe_dump(noted))
    hub.add("models/org/teacher", {**{p.name: p.read_bytes() for p in tiny.iterdir()}, "new.txt": b"x"})
    assert base.fetched(run)[0].objective.teacher_revision == first
    with pytest.raises(ModelError, match=r"^objective\.teacher: org/nobody"):
        base.fetched(replace(run, objective=replace(run.objective, teacher="org/nobody")))


def test_frozen_parameters_are_found_in_the_cache_of_another_host(hub: Hub, tiny: Path) -> None:
    hub.add("models/org/tiny", tiny)
    folder = fetched().folder
    assert folder is not None
    there = Path("/nowhere/hub") / folder.relative_to(folder.parents[2])
    raw = {"folder": str(there), "tensors": {"a": [1, [["model.safetensors", "a", 0, 4]]]}}
    assert FrozenSource.from_json(raw).folder == folder
    lost = FrozenSource.from_json({**raw, "folder": str(there.with_name("0" * 40))})
    assert f"hf download org/tiny --revision {'0' * 40}" in str(lost.error("it is gone"))


@pytest.mark.needs("peft")
def test_an_adapter_goes_with_its_base_at_its_commit(hub: Hub, tiny: Path, capsys: Any) -> None:
    """`generate` adds it to the commit that it was trained on, though the branch has moved; transformers takes main."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    Path("a.txt").write_text("\n".join(f"sentence number {i} {i * i} " * 20 for i in range(90)))
    assert prepare("--source", "a.txt", "--vocab-size", "300", "--out", "first") == 0
    settings = new_model("llama", vocab_size=300).config
    for seed, branch in ((0, "old"), (1, "main")):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(settings).save_pretrained(branch)
        commit = hub.add("models/org/base", Path(branch), branch)
        hub.repos["models/org/base"].branches.setdefault("main", commit)
    old = hub.repos["models/org/base"].branches["old"]
    fields = base_fields({"pretrained": "org/base", "revision": old})
    assert fields == {"base_model_name_or_path": "org/base", "revision": old}
    local = base_fields({"pretrained": "old", "revision": None})
    assert local["base_model_name_or_path"] == str(Path("old").absolute())
    lora = get_peft_model(AutoModelForCausalLM.from_pretrained("old"), LoraConfig(target_modules=["q_proj"]))
    lora.save_pretrained("adapter")
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps({**config, **fields}))
    for folder in ("old", "main", "adapter"):
        AutoTokenizer.from_pretrained("first/tokenizer").save_pretrained(folder)
    capsys.readouterr()
    said = {}
    for folder in ("old", "main", "adapter"):
        words = ["--prompt", "sentence", "--max-tokens", "12", "--temperature", "0"]
        assert main(["generate", str(Path(folder).absolute()), *words]) == 0
        said[folder] = capsys.readouterr().out
    assert said["adapter"] == said["old"] != said["main"]


@pytest.mark.parametrize(
    "line, rule",
    [
        ("{pretrained: a/b/c}", "no such file or folder"),
        ("{config: {model_type: llama}, revision: main}", "model.pretrained: ORG/NAME"),
        ("{pretrained: org/tiny, revision: ../x}", "is no name of a branch or tag, and no commit"),
        ("{pretrained: here/m, revision: main}", "here/m"),
    ],
)
def test_the_configuration_is_read_without_a_network(hub: Hub, tiny: Path, line: str, rule: str) -> None:
    shutil.copytree(tiny, "here/m")
    Path("run.yaml").write_text(f"deepspeed: x\nmodel: {line}\ndata: {{path: data}}\ntrain: {{max_steps: 1}}\n")
    with pytest.raises(ConfigError, match=rule):
        parse(["--config", "run.yaml"])
    assert not hub.asked


# --- prepare --------------------------------------------------------------------------------------


def parquet(texts: list[str]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), out)
    return out.getvalue()


def prepare(*words: str) -> int:
    return main(["prepare", "--processes", "1", *words])


def test_a_tokenizer_and_a_dataset(hub: Hub, capsys: Any) -> None:
    train, test = [f"sentence number {i} " * 30 for i in range(20)], ["held out " * 400] * 4
    files = {
        "README.md": b"x",
        "data/train-00000-of-00001.parquet": parquet(train),
        "data/test-00000-of-00001.parquet": parquet(test),
    }
    commit = hub.add("datasets/org/talk", files)
    Path("a.txt").write_text("\n".join(train))
    assert prepare("--source", "a.txt", "--vocab-size", "280", "--out", "first") == 0
    tokenizer = Path("first/tokenizer")
    hub.add("models/org/tok", {**{p.name: p.read_bytes() for p in tokenizer.iterdir()}, "weights.bin": b"x"})
    assert prepare("--source", "hf:org/talk", "--tokenizer", "org/tok", "--out", "no") == 2
    assert "'hf:org/talk/data/train-*'" in capsys.readouterr().err
    words = ["--source", "hf:org/talk/data/train-*", "--validation-source", "hf:org/talk@main/data/test-*"]
    assert prepare(*words, "--tokenizer", "org/tok@main", "--out", "data") == 0
    manifest = read_manifest(Path("data"))
    assert manifest.documents == {"train": 20, "validation": 4}
    assert manifest.settings["source"] == [f"hf:org/talk@{commit}/data/train-*"]
    assert (Path("data/tokenizer/tokenizer.json").read_bytes()) == (tokenizer / "tokenizer.json").read_bytes()
    assert not hub.count("weights.bin") and not hub.count("README")
    assert prepare(*words, "--tokenizer", "org/tok@main", "--out", "data") == 0  # complete: nothing is done
    hub.repos["datasets/org/talk"].gated = True
    shutil.rmtree(Path("../cache"))
    assert prepare("--source", "hf:org/talk/data/train-*", "--tokenizer", "org/tok", "--out", "no") == 2
    assert f"{hub.url}/datasets/org/talk" in capsys.readouterr().err
    assert prepare("--source", "hf:org/none", "--tokenizer", "org/tok", "--out", "no") == 2
    assert prepare("--source", "a.txt", "--tokenizer", "org/tyni", "--out", "no") == 2
    assert "org/tyni" in capsys.readouterr().err and not Path("no").exists()


# --- docs/hub.md ----------------------------------------------------------------------------------


def test_the_commands_and_the_error_of_the_page(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text()
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.M | re.S)
    commands = [
        shlex.split(each)
        for block in re.findall(r"^```bash\n(.*?)^```", page, flags=re.M | re.S)
        for each in block.splitlines()
    ]
    Path("run.yaml").write_text(recipe)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    Path("a.txt").write_text("\n".join(f"sentence number {i} {i * i} " * 20 for i in range(90)))
    assert prepare("--source", "a.txt", "--vocab-size", "300", "--out", "first") == 0
    base_folder = model_folder(tmp_path / "base", new_model("llama", vocab_size=300))
    shutil.copytree("first/tokenizer", base_folder, dirs_exist_ok=True)
    hub.add("models/org/base", base_folder)
    texts = Path("a.txt").read_text().splitlines()
    hub.add("datasets/org/talks", {"data/train-0.parquet": parquet(texts), "data/test-0.parquet": parquet(["x"])})
    monkeypatch.setenv("WORLD_SIZE", "1")
    for command in commands:
        assert command[0] == "llmtrain" and main(command[1:]) == 0, command
    text = refused("org/bse").replace(str(Path.cwd()), "/work").replace(hub.url, "https://huggingface.co")
    assert f"error: {text}\n" in page


def test_a_base_on_the_hub_keeps_the_tokens_where_it_stops(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    """In the record of a run."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel

    from llmtrain.checkpoint.hf.serving import sampling_defaults

    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|turn|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    files["tokenizer.json"] = (tmp_path / "tokenizer.json").read_bytes()
    hub.add("models/org/tiny", {**files, "generation_config.json": b'{"eos_token_id": [1, 2], "top_k": 20}'})
    model = fetched()
    assert model.folder is not None and model.revision is not None
    assert sampling_defaults(model.folder, tmp_path) == {"eos_token_id": [1, 2], "top_k": 20}
