"""Files that others made, given to the commands that read them: exit code 2 and a message, never a traceback."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from llmtrain.base import log, untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.untrusted import MAX_DEPTH, loads, names_code
from llmtrain.cli import main
from llmtrain.data.shards import PreparedSet
from llmtrain.tracking.local import read_rows
from tests.helpers import config_workplace
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.hf_folders import model_folder, new_model
from tests.helpers.prepared import random_shards, write_prepared

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "1" + "0" * 10_000
HUGE = "1e999"
STRANGE = {"deep": DEEP, "long": LONG, "huge": HUGE}


@pytest.fixture(params=STRANGE.values(), ids=STRANGE.keys())
def strange(request) -> str:
    return request.param


def refused(capsys, *words: object) -> str:
    """The message of a command that ends with exit code 2."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and "Traceback" not in err, (code, out, err)
    return err + out


def test_a_model_configuration_that_no_program_can_hold(tmp_path, capsys, monkeypatch, strange):
    folder = model_folder(tmp_path / "model", new_model("llama"))
    text = (folder / "config.json").read_text().replace('"vocab_size": 96', f'"vocab_size": {strange}')
    (folder / "config.json").write_text(text)
    config_workplace.write(tmp_path, {"model": {"pretrained": str(folder), "config": ...}})
    monkeypatch.chdir(tmp_path)
    assert "config.json" in refused(capsys, "config", "check", "run.yaml")
    refused(capsys, "checkpoint", "from-hf", folder, tmp_path / "out")
    refused(capsys, "generate", folder)
    index = model_folder(tmp_path / "cut", new_model("llama"), shard="20KB") / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {{"a": {strange}}}}}')
    refused(capsys, "checkpoint", "from-hf", index.parent, tmp_path / "out")


def test_a_run_configuration_that_no_program_can_hold(tmp_path, capsys, monkeypatch, strange):
    monkeypatch.chdir(tmp_path)
    config_workplace.write(tmp_path, None, {"gradient_clipping": "@"})
    ds = tmp_path / "ds.json"
    ds.write_text(ds.read_text().replace('"@"', strange))
    refused(capsys, "config", "check", "run.yaml")
    config_workplace.write(tmp_path, {"optim": {"lr": "@"}})
    run = tmp_path / "run.yaml"
    run.write_text(run.read_text().replace("'@'", strange))
    refused(capsys, "config", "check", "run.yaml")
    config_workplace.write(tmp_path)
    for key in ("optim.lr", "train.max_steps"):
        refused(capsys, "config", "check", "run.yaml", f"--{key}", strange)


def test_a_checkpoint_that_no_program_can_hold(tmp_path, capsys, strange):
    run = tmp_path / "run"
    for name in ("manifest.json", "trainer.json"):
        shutil.rmtree(run, ignore_errors=True)
        checkpoint = write_checkpoint(run, 100, 1)
        (checkpoint / name).write_text(f'{{"step": {strange}, "manifest": {strange}, "tokens": 1}}')
        refused(capsys, "checkpoint", "to-hf", checkpoint, tmp_path / "out")
        assert main(["checkpoint", "ls", str(run)]) == 0 and "damaged" in capsys.readouterr().out


def test_a_prepared_folder_that_no_program_can_hold(tmp_path, capsys, monkeypatch, strange):
    monkeypatch.chdir(tmp_path)
    config_workplace.write(tmp_path)
    (tmp_path / "data/x/manifest.json").write_text(f'{{"vocab_size": {strange}}}')
    assert "manifest.json" in refused(capsys, "config", "check", "run.yaml")


def test_a_data_manifest_that_points_at_other_files(tmp_path):
    data = write_prepared(tmp_path / "data", random_shards(0, 2, 3), random_shards(1, 1, 3))
    manifest = json.loads((data / "manifest.json").read_text())
    shard = manifest["shards"]["train"][0]
    shutil.copy(data / shard["file"], tmp_path)
    PreparedSet(data)
    for change in (f"../{shard['file']}", str(tmp_path / shard["file"]), "", "..", 3):
        manifest["shards"]["train"][0] = {**shard, "file": change}
        (data / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(DataError, match=f"{re.escape(repr(change))}.* name of a file"):
            PreparedSet(data)


def test_such_a_line_in_a_runs_records_is_an_unreadable_line(tmp_path, capsys, strange):
    good = {"step": 1, "loss": 2.0}
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_text(f'{json.dumps(good)}\n{{"step": {strange}}}\n{json.dumps({**good, "step": 2})}\n')
        assert read_rows(tmp_path / name) == ([good, {**good, "step": 2}], 1)
    assert main(["report", str(tmp_path)]) == 0
    assert "Unreadable lines" in (tmp_path / "report" / "index.html").read_text()


CODE = {
    "auto_map": {"auto_map": {"AutoConfig": "mine.Config"}},
    "kernel": {"_attn_implementation": "someone/kernel"},
    "version": {"attn_implementation": "someone/kernel@v1:fast"},
    "paged": {"_attn_implementation_internal": "paged|someone/kernel"},
    "each": {"_attn_implementation": {"": "sdpa", "decoder": "someone/kernel"}},
    "fallback": {"_attn_implementation": "flash_attention_2"},
    "experts": {"_experts_implementation": "someone/kernel"},
    "nested": {"text_config": {"layers": [{"auto_map": {"A": "b.C"}}]}},
}


@pytest.mark.parametrize("fields", CODE.values(), ids=CODE.keys())
def test_a_folder_whose_files_name_code_is_refused(tmp_path, capsys, fields):
    """transformers would import it, from the folder or from a hub."""
    folder = model_folder(tmp_path / "model", new_model("llama"))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps({**json.loads(config), **fields}))
    for words in (["checkpoint", "from-hf", folder, tmp_path / "out"], ["generate", folder]):
        assert "Python code" in refused(capsys, *words)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "x", **fields}))
    text = tmp_path / "text.txt"
    text.write_text("one two three")
    prepare = ["prepare", "--source", text, "--tokenizer", folder, "--out", tmp_path / "data"]
    for words in (["generate", folder], prepare):
        assert "Python code" in refused(capsys, *words)
    assert not (tmp_path / "data" / "manifest.json").exists() and not (tmp_path / "out").exists()


def test_what_transformers_has_itself_is_no_code():
    assert names_code({"_attn_implementation": "sdpa", "text_config": {"_experts_implementation": None}}) is None
    assert names_code({"auto_map": None, "architectures": ["LlamaForCausalLM"]}) is None


def test_what_others_write_is_read():
    assert loads('{"time_step_limit": [0.0, Infinity]}', infinite=True)["time_step_limit"][1] == float("inf")
    assert loads("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    with pytest.raises(ValueError, match=str(MAX_DEPTH)):
        loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


ESCAPES = {
    "colour": ("\x1b[31mred", "\\x1b[31mred"),
    "title": ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
    "eight bits": ("\x9b2J", "\\x9b2J"),
    "backwards": ("txt\u202egpj.exe", "txt\\u202egpj.exe"),
    "half": ("\ud800", "\\ud800"),
    "forged line": ("a\r\nwarning: all is well", "a\\r\\nwarning: all is well"),
    "words": ("Größe, 大きさ", "Größe, 大きさ"),
}


@pytest.mark.parametrize(("said", "seen"), ESCAPES.values(), ids=ESCAPES)
def test_text_from_outside_is_shown_escaped_and_so_is_every_line_of_the_log(capsys, said, seen) -> None:
    assert untrusted.shown(said) == seen
    for write in (log.info, log.put, log.warn, log.warn_once):
        write(f"it says {said}")
        told = capsys.readouterr()
        text = told.out + told.err
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text) and seen[-5:] in text


def test_text_from_outside_is_cut() -> None:
    assert untrusted.shown("x" * 300, 200) == "x" * 200 + "..."
    assert untrusted.shown("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"
