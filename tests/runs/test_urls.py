"""A run all of whose files lie in object stores: its model, its checkpoints, its export."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from llmtrain.cli import main
from tests.helpers import forked
from tests.helpers.hf_folders import model_folder, new_model
from tests.helpers.launching import losses, resumed, write_recipe
from tests.helpers.stores import contents


def _recipe(folder: Path, data: str, model: str) -> Path:
    folder.mkdir()
    path = write_recipe(folder, data)
    recipe = yaml.safe_load(path.read_text())
    recipe["model"] = {"pretrained": model, "compile_layers": False}
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_a_model_by_url(small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    folder = model_folder(tmp_path / "bucket/model", new_model("llama", vocab_size=512))
    (folder / "tokenizer.json").unlink()
    steps = ("--train.max_steps", "4", "--checkpoint.every_steps", "2", "--resume", "auto")
    export = ("--train.export_to", f"file://{tmp_path}/bucket/export", "--train.export", "true")
    output = forked.train(_recipe(tmp_path / "a", small_data, f"file://{folder}"), *steps, *export)
    assert f"uploaded {export[1]}: " in output
    assert contents(tmp_path / "bucket/export") == contents(tmp_path / "a/run/export")
    assert f"model.pretrained: file://{folder} is in {tmp_path}/cache/stores/" in output
    assert output.count("fetching file://") == 2  # settings, then weights: by one of the two ranks
    output = forked.train(_recipe(tmp_path / "b", small_data, str(folder)), *steps, *export)
    assert f"{export[1]}: its files are no earlier export of this run; nothing was written" in output
    assert f"Later: llmtrain checkpoint to-hf {tmp_path}/b/run" in output  # and the run has ended well
    assert losses(tmp_path / "a/run") == losses(tmp_path / "b/run")


def test_a_run_begins_from_a_checkpoint_by_url(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another run, in a store; started again, it goes on from its own, though that one has moved on."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/bucket/runs/first"
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    first = write_recipe(tmp_path / "first", small_data)
    often = ("--checkpoint.every_steps", "2", "--schedule.name", "constant")
    forked.train(first, *often, "--train.max_steps", "4")
    shutil.copytree(tmp_path / "first/run/checkpoints", there := tmp_path / "bucket/runs/first")
    second = write_recipe(tmp_path / "second", small_data)
    output = forked.train(second, *often, "--train.max_steps", "6", "--resume", url)
    assert f"{url}/step-00000004" in output
    forked.train(first, *often, "--train.max_steps", "8")
    shutil.rmtree(there)
    shutil.copytree(tmp_path / "first/run/checkpoints", there)
    theirs = losses(tmp_path / "first/run")
    assert losses(tmp_path / "second/run") == {step: theirs[step] for step in (5, 6)}
    forked.train(second, *often, "--train.max_steps", "8", "--resume", url)
    assert resumed(tmp_path / "second/run") == [4, 6]
    third = write_recipe(tmp_path / "third", small_data)
    forked.train(third, *often, "--train.max_steps", "9", "--resume", f"{url}/step-8")
    assert resumed(tmp_path / "third/run") == [8]
    code, output = forked.finish(third, *often, "--train.run_dir", str(tmp_path / "x"), "--resume", f"{url}/step-5")
    assert code == 2 and f"{url}/step-5: it holds no complete checkpoint" in output and "Traceback" not in output
    assert main(["generate", url, "--prompt", "def ", "--max-tokens", "2"]) == 0
    assert "step-00000008" in capsys.readouterr().err
