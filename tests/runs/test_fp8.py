"""A run in fp8 leaves what a run without leaves, and either goes on from the other's checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers import forked
from tests.helpers.launching import losses
from tests.runs.test_sites_forms import written

pytestmark = pytest.mark.needs("torchao")

RECIPE = """
deepspeed: {ds}
model: {{pretrained: {base}}}
data: {{path: {data}, sequence_length: 32}}
optim: {{lr: 1.0e-3}}
schedule: {{name: constant}}
train: {{run_dir: {run}, global_batch: 4, micro_batch: 2, max_steps: 3, log_every: 1, eval: false, export: true}}
tracking: {{wandb: disabled}}
"""


def test_checkpoints_and_exports_are_those_of_a_run_without(small_data: str, tmp_path: Path) -> None:
    """Two ranks at ZeRO 3 in bf16. Losses differ, by less than 1 %: e4m3 rounds each factor by up to 2^-4."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    base = written(tmp_path / "base", 0)
    recipes = {}
    for kind, argv in {"plain": [], "fp8": ["--model.fp8", "rowwise"]}.items():
        recipes[kind] = tmp_path / f"{kind}.yaml"
        recipes[kind].write_text(
            RECIPE.format(ds=tmp_path / "ds.json", base=base, data=small_data, run=tmp_path / kind)
        )
        said = forked.train(recipes[kind], *argv)
        assert ("multiply in fp8, emulated: a CPU has no such products" in said) == bool(argv), said
        shutil.copytree(tmp_path / kind, tmp_path / f"{kind} before")
    plain, fp8 = (load_file(tmp_path / kind / "export/model.safetensors") for kind in ("plain", "fp8"))
    assert {name: (t.shape, t.dtype) for name, t in fp8.items()} == {n: (t.shape, t.dtype) for n, t in plain.items()}
    kinds = {
        str(t.dtype) for file in (tmp_path / "fp8/checkpoints").rglob("*.safetensors") for t in load_file(file).values()
    }
    assert kinds == {"torch.float32"}, kinds
    forked.train(recipes["fp8"], "--train.max_steps", "5")
    forked.train(recipes["plain"], "--model.fp8", "rowwise", "--train.max_steps", "5")
    crossed = {kind: losses(tmp_path / kind) for kind in recipes}
    for kind, recipe in recipes.items():  # as if nothing had changed
        shutil.rmtree(tmp_path / kind)
        (tmp_path / f"{kind} before").rename(tmp_path / kind)
        forked.train(recipe, *(["--model.fp8", "rowwise"] if kind == "fp8" else []), "--train.max_steps", "5")
        same = losses(tmp_path / kind)
        assert [same[step] for step in (1, 2, 3)] == [crossed[kind][step] for step in (1, 2, 3)]
        assert all(0 < abs(same[step] / crossed[kind][step] - 1) < 0.01 for step in (4, 5)), (same, crossed)
