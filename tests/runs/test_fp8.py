"""A run in fp8 leaves what a run without leaves, and either goes on from the other's checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llmtrain.checkpoint.format import step_folder
from tests.helpers import forked
from tests.helpers.launching import losses, tiny_folder, write_run

pytestmark = pytest.mark.needs("torchao")


def test_checkpoints_and_exports_are_those_of_a_run_without(small_data: str, tmp_path: Path) -> None:
    """Two ranks at ZeRO 3 in bf16. Losses differ, by less than 1 %: e4m3 rounds each factor by up to 2^-4."""
    tree = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    train = {"global_batch": 4, "micro_batch": 2, "max_steps": 5, "export": True}
    base, recipes = tiny_folder(tmp_path / "base", 0), {}
    words = {"plain": (), "fp8": ("--model.fp8", "rowwise")}
    for kind, more in words.items():
        train["run_dir"] = str(tmp_path / kind)
        recipes[kind] = write_run(
            tmp_path / f"{kind} files",
            small_data,
            tree,
            train,
            model={"pretrained": str(base)},
            optim={"lr": 1e-3},
            checkpoint={"every_steps": 3},
        )
        said = forked.train(recipes[kind], *more)
        assert ("fp8, emulated" in said) == bool(more), said
    plain, fp8 = (load_file(tmp_path / kind / "export/model.safetensors") for kind in words)
    assert {name: (t.shape, t.dtype) for name, t in fp8.items()} == {n: (t.shape, t.dtype) for n, t in plain.items()}
    kinds = {
        str(t.dtype) for file in (tmp_path / "fp8/checkpoints").rglob("*.safetensors") for t in load_file(file).values()
    }
    assert kinds == {"torch.float32"}, kinds
    for kind, other in (("plain", "fp8"), ("fp8", "plain")):
        same = losses(tmp_path / kind)
        shutil.rmtree(step_folder(tmp_path / kind / "checkpoints", 5))
        (tmp_path / kind / "metrics.jsonl").unlink()
        forked.train(recipes[kind], *words[other])
        crossed = losses(tmp_path / kind)
        assert crossed.keys() == {4, 5}
        assert all(0 < abs(crossed[step] / same[step] - 1) < 0.01 for step in crossed), (same, crossed)
