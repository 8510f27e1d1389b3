"""What auto decides for the recipes of large models, on tensors without memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.base.units import GIB
from llmtrain.config.load import parse
from llmtrain.config.resolve import resolve
from llmtrain.config.run import Run
from llmtrain.features.plan.decide import decide
from llmtrain.features.plan.device import Machines
from llmtrain.features.plan.rehearsal import Rehearsed, prepared, rehearse
from tests.helpers.launching import REPO
from tests.helpers.marks import slow
from tests.unit.models.test_fake_steps import RECIPES


@pytest.mark.parametrize(
    ("gib", "layers", "keep"), [(139, None, None), slow(79, 1, "attention"), slow(45, 24, "attention")]
)
def test_the_layers_that_sft_8b_recomputes(monkeypatch, gib, layers, keep):
    """On 8 GPUs with so much memory. test_plan.py has what is decided for a small model, which takes seconds."""
    monkeypatch.chdir(REPO)
    run = resolve(parse(["--config", "launch/recipes/sft_8b.yaml"], check_paths=False).config, 8)
    config = replace(run.config, model=replace(run.config.model, pretrained=None, config=RECIPES["sft_8b"][0]))

    def rehearsed(this: Run) -> dict[int, Rehearsed]:
        return {0: next(rehearse(prepared(this, on_gpu=True), [0], 8, on_gpu=True))}

    machines = Machines(hosts=1, slots=8, device="", on_gpu=True, memory=gib * GIB, host_memory=None)
    chosen, found = decide(replace(run, config=config), machines, rehearsed)
    again = chosen.config.model.recompute
    print(f"{gib} GiB: {again}, peak {(found[0].peak + found[0].ahead) / GIB:.1f} GiB")
    assert (again.layers, again.keep) == (layers, keep)
