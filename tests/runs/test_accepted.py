"""What `config check` accepts does train: models on the edge of what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.cli import main
from tests.helpers import forked
from tests.helpers.launching import TINY, write_recipe

EDGES: dict[str, tuple[dict[str, Any], str]] = {
    "as long as learned positions": (
        {"model_type": "gpt2", "vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32},
        "",
    ),
    "heads that do not fill the width, and more than the rotary positions": (
        {**TINY, "head_dim": 20, "num_key_value_heads": 1, "max_position_embeddings": 16},
        "more than the 16 positions",
    ),
}
"""Edge -> (model.config, what is noted)."""


@pytest.mark.parametrize(("model", "noted"), EDGES.values(), ids=EDGES)
def test_what_check_accepts_trains(
    small_data: str, tmp_path: Path, model: dict[str, Any], noted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, small_data)
    run = yaml.safe_load(recipe.read_text())
    run["model"]["config"], run["train"]["max_steps"] = model, 2
    recipe.write_text(yaml.safe_dump(run))
    assert main(["config", "check", str(recipe), "--world-size", "2"]) == 0, capsys.readouterr().err
    assert noted in capsys.readouterr().out
    assert noted in forked.train(recipe)
