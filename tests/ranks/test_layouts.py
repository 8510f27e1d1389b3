"""Saved under every form of parallelism, loaded under every other: the next losses agree within rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pytest

from llmtrain.checkpoint.load import load_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from tests.helpers.families import FAMILIES, tied
from tests.helpers.processors import on_device
from tests.helpers.training import (
    Case,
    Trace,
    assembled,
    assert_agrees,
    largest_difference,
    make_engine,
    plain_pytorch,
    resolved_run,
    save_checkpoint,
    train_steps,
)
from tests.ranks.test_resume import END, HALF, load_and_go_on, save_in_the_middle

MODELS = {
    "dense": tied(FAMILIES["qwen2"]),  # biases, fewer key than query heads, embedding and head in one tensor
    "experts": FAMILIES["mixtral"],
}
LAYOUTS = {
    "one": (1, {}),
    "z1x4": (4, {"stage": 1}),
    "z3x4": (4, {"stage": 3}),
    "pp2dp2": (4, {"pipeline": 2, "stage": 1}),
    "tp2dp2": (4, {"tensor": 2, "stage": 2}),
    "tp2z0": (2, {"tensor": 2, "stage": 0}),
    "tp2dp2z3": (4, {"tensor": 2, "stage": 3}),
    "sp2dp2": (4, {"sequence": 2, "stage": 3}),
    "pp2tp2": (4, {"pipeline": 2, "tensor": 2, "stage": 1}),
}
EXPERTS = {
    **LAYOUTS,
    "ep2": (2, {"expert": 2, "stage": 1}),
    "ep2dp2": (4, {"expert": 2, "stage": 2}),
    "ep2dp2z3": (4, {"expert": 2, "stage": 3}),
    "sp2ep4": (4, {"sequence": 2, "expert": 4, "stage": 3}),
    "pp2ep2": (4, {"pipeline": 2, "expert": 2, "stage": 1}),
}
PAIRS = [("dense", *pair) for pair in product(LAYOUTS, LAYOUTS)]
PAIRS += [("experts", *pair) for pair in product(EXPERTS, EXPERTS)]
# In every run of the tests beside the cells of test_cells.py, each of which goes on in the layout of the next one.
SAMPLE = {("dense", "z3x4", "tp2dp2z3"), ("experts", "ep2dp2", "tp2dp2"), ("experts", "pp2ep2", "sp2ep4")}


def case_of(data: str, model: str, layout: str) -> Case:
    """The case that is trained under a layout."""
    return Case(data=data, steps=END, model=MODELS[model], **EXPERTS[layout][1])


@pytest.fixture(scope="module")
def saved(pools, small_data, tmp_path_factory) -> Callable[[str, str], tuple[Trace, str]]:
    """saved(model, layout): what it did after its checkpoint, and the checkpoint; made once."""
    made: dict[tuple[str, str], tuple[Trace, str]] = {}

    def save(model: str, layout: str) -> tuple[Trace, str]:
        if (model, layout) not in made:
            folder = tmp_path_factory.mktemp(f"{model}-{layout}")
            case = case_of(small_data, model, layout)
            made[model, layout] = pools(EXPERTS[layout][0]).run(save_in_the_middle, case, str(folder))[0]
        return made[model, layout]

    return save


@pytest.mark.parametrize(
    ("model", "saved_under", "loaded_under"),
    [pytest.param(*pair, marks=[] if pair in SAMPLE else pytest.mark.slow, id="-".join(pair)) for pair in PAIRS],
)
def test_losses_go_on(pools, small_data, saved, model, saved_under, loaded_under):
    want, path = saved(model, saved_under)
    got = pools(EXPERTS[loaded_under][0]).run(load_and_go_on, case_of(small_data, model, loaded_under), path)[0]
    assert len(want.losses) == len(got.losses) == END - HALF
    assert_agrees(got, want, loss=4e-6, parameters=1e-5)


def test_muon_goes_on_in_a_pipeline(pools, small_data, tmp_path):
    """Its momentum: under ZeRO 3 in pieces, in a pipeline's ZeRO 1 whole on each rank that has a part of the matrix."""
    cases = [Case(data=small_data, steps=END, optimizer="muon", **LAYOUTS[layout][1]) for layout in ("z3x4", "pp2dp2")]
    want, path = pools(4).run(on_device, False, save_in_the_middle, cases[0], str(tmp_path))[0]
    got = pools(4).run(on_device, True, load_and_go_on, cases[1], path)[0]
    assert_agrees(got, want, loss=5e-6, parameters=1e-5)


def segment(case: Case, path: str | None, first: int, last: int, folder: str) -> tuple[Trace, str]:
    """Steps [first, last) from a checkpoint, and the next one."""
    engine, ranks = make_engine(case)
    if path is not None:
        trainer = json.loads((Path(path) / "trainer.json").read_text())
        load_checkpoint(engine, CheckpointReader(Path(path)), trainer, ranks)
    trace = train_steps(case, engine, ranks, first, last)
    trace.parameters = assembled(engine, ranks)
    state = {"optimizer_step": engine.optimizer_step(), "loss_scale": engine.loss_scale()}
    saved = save_checkpoint(engine, Path(folder), last, state, resolved_run(case, ranks.world_size), ranks)
    engine.close()
    return trace, str(saved)


@pytest.mark.slow  # each change alone: test_losses_go_on
def test_a_run_that_changes_its_layout_at_every_resume(pools, small_data, tmp_path):
    """From a pipeline into ZeRO 3, tensor parallelism, one process and back, against plain PyTorch without a break."""
    chain = ["pp2dp2", "z3x4", "tp2dp2", "one", "sp2dp2", "pp2dp2"]
    bounds = [0, 3, 6, 9, 12, 15, 18]
    want = plain_pytorch(Case(data=small_data, steps=bounds[-1], model=MODELS["dense"]))
    losses: list[float] = []
    path: str | None = None
    for layout, (first, last) in zip(chain, pairwise(bounds), strict=True):
        world_size, form = LAYOUTS[layout]
        case = Case(data=small_data, steps=bounds[-1], model=MODELS["dense"], **form)
        trace, path = pools(world_size).run(segment, case, path, first, last, str(tmp_path))[0]
        losses += trace.losses
    assert max(abs(a - b) for a, b in zip(losses, want.losses, strict=True)) < 1e-5
    assert largest_difference(trace.parameters, want.parameters) < 5e-5
