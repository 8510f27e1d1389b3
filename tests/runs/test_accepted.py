"""What `config check` accepts does train: configurations on the edge of what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from llmtrain.cli import main
from tests.helpers import forked
from tests.helpers.launching import losses, write_recipe

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


ZERO = {
    "zero_optimization": {
        "stage": 2,
        "round_robin_gradients": True,
        "contiguous_gradients": False,
        "overlap_comm": True,
    }
}
"""LLaMA-Factory's ZeRO 2 lays parameters out round robin; without contiguous gradients they are summed elsewhere."""


def test_zeros_layout_keys_train_save_and_export_what_one_process_does(small_data: str, tmp_path: Path) -> None:
    """A checkpoint had a parameter's values under another's name, and gradients of one micro-batch of two counted."""
    recipe = write_recipe(tmp_path, small_data)
    argv = ("--model.config.attention_dropout", "0", "--schedule.name", "constant")
    argv += ("--train.export", "true", "--train.eval", "false")
    run, alone = tmp_path / "run", tmp_path / "alone"
    for name, tree in {"zero": ZERO, "plain": {}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(tree))
    forked.train(recipe, *argv, "--deepspeed", str(tmp_path / "plain.json"), "--train.run_dir", str(alone),
                 "--train.max_steps", "4", world_size=1)  # fmt: skip
    for steps in ("2", "4"):  # the second goes on from what the first has saved
        forked.train(recipe, *argv, "--deepspeed", str(tmp_path / "zero.json"), "--train.max_steps", steps)
    want, got = losses(alone), losses(run)
    assert sorted(got) == [1, 2, 3, 4] == sorted(want)
    assert max(abs(got[step] - want[step]) for step in want) < 5e-6  # fp32, summed in another order
    tensors = [load_file(folder / "export" / "model.safetensors") for folder in (alone, run)]
    assert tensors[0].keys() == tensors[1].keys()
    assert max(float((tensors[0][name] - tensors[1][name]).abs().max()) for name in tensors[0]) < 1e-5
    # From a folder, too: its weights are proved before the first step.
    forked.train(recipe, *argv, "--deepspeed", str(tmp_path / "zero.json"), "--train.max_steps", "1",
                 "--train.run_dir", str(tmp_path / "tuned"), "--model.pretrained", str(alone / "export"),
                 "--model.config", "null")  # fmt: skip
