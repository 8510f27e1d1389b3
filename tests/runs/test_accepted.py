"""What `config check` accepts does train: configurations on the edge of what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.cli import main
from tests.helpers import forked
from tests.helpers.launching import write_recipe

_GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}


@dataclass
class Edge:
    """A model of its own, or changes to the recipe's; overrides of the run; what check notes."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    noted: str = ""


EDGES = [
    Edge("as long as learned positions", _GPT2),
    Edge(
        "heads that do not fill the width, and more than the rotary positions",
        {"head_dim": 20, "num_key_value_heads": 1, "max_position_embeddings": 16},
        noted="more than the 16 positions",
    ),
    Edge(
        "one layer on each of two stages, by short names",
        argv=("--deepspeed", "pipeline.json"),
    ),
]


@pytest.mark.parametrize("edge", EDGES, ids=lambda e: e.name)
def test_what_check_accepts_trains(
    edge: Edge, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, small_data)
    run = yaml.safe_load(recipe.read_text())
    run["model"]["config"] = edge.model if "model_type" in edge.model else {**run["model"]["config"], **edge.model}
    recipe.write_text(yaml.safe_dump(run))
    (tmp_path / "pipeline.json").write_text(
        json.dumps({"pipeline": {"stages": 2, "partition": [1, 1]}, "zero_optimization": {"max_live_parameters": 0}})
    )
    argv = ("--train.max_steps", "2", *edge.argv)
    assert main(["config", "check", str(recipe), "--world-size", "2", *argv]) == 0, capsys.readouterr().err
    assert edge.noted in capsys.readouterr().out
    output = forked.train(recipe, *argv)
    assert edge.noted in output
