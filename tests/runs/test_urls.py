"""A run all of whose files lie in object stores: its model, its checkpoints, its export."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.helpers import forked
from tests.helpers.hf_folders import model_folder, new_model
from tests.helpers.launching import losses, write_recipe


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
    output = forked.train(_recipe(tmp_path / "a", small_data, f"file://{folder}"), *steps)
    assert f"model.pretrained: file://{folder} is in {tmp_path}/cache/stores/" in output
    assert output.count("fetching file://") == 2  # settings, then weights: by one of the two ranks
    forked.train(_recipe(tmp_path / "b", small_data, str(folder)), *steps)
    assert losses(tmp_path / "a/run") == losses(tmp_path / "b/run")
