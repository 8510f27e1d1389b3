"""Each form of parallelism is saved, and loaded under another one: the next losses agree within rounding."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.helpers.families import FAMILIES, tied
from tests.helpers.processors import on_device
from tests.helpers.training import (
    Case,
    assert_agrees,
)
from tests.ranks.test_resume import END, HALF, load_and_go_on, save_in_the_middle

MODELS = {
    "dense": tied(FAMILIES["qwen2"]),  # biases, fewer key than query heads, embedding and head in one tensor
    "experts": FAMILIES["mixtral"],
}
ROUND_ROBIN = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
"""Parameters have another order in the partitions."""
LAYOUTS = {
    "z2x2": (2, {"stage": 2, "extra": ROUND_ROBIN}),
    "z3x4": (4, {"stage": 3}),
    "pp2dp2": (4, {"pipeline": 2, "stage": 1}),
    "tp2dp2": (4, {"tensor": 2, "stage": 2}),
    "tp2dp2z3": (4, {"tensor": 2, "stage": 3}),
    "sp2dp2": (4, {"sequence": 2, "stage": 3}),
    "pp2tp2": (4, {"pipeline": 2, "tensor": 2, "stage": 1}),
}
EXPERTS = {
    **LAYOUTS,
    "ep2dp2": (4, {"expert": 2, "stage": 2}),
    "ep2dp2z3": (4, {"expert": 2, "stage": 3}),
    "sp2ep4": (4, {"sequence": 2, "expert": 4, "stage": 3}),
    "pp2ep2": (4, {"pipeline": 2, "expert": 2, "stage": 1}),
}
# test_cells.py has the pairs of neighbours in its table, and two ranks in each of these ways.
PAIRS = [("experts", *pair) for pair in pairwise([*EXPERTS, "z2x2"])] + [("dense", "z3x4", "tp2dp2z3")]
"""Each layout is saved and loaded once."""


def case_of(data: str, model: str, layout: str) -> Case:
    """The case that is trained under a layout."""
    return Case(data=data, steps=END, model=MODELS[model], **EXPERTS[layout][1])


@pytest.mark.parametrize(("model", "saved_under", "loaded_under"), PAIRS)
def test_losses_go_on(pools, small_data, tmp_path, model, saved_under, loaded_under):
    saving, loading = (case_of(small_data, model, layout) for layout in (saved_under, loaded_under))
    want, path = pools(EXPERTS[saved_under][0]).run(save_in_the_middle, saving, str(tmp_path))[0]
    got = pools(EXPERTS[loaded_under][0]).run(load_and_go_on, loading, path)[0]
    assert len(want.losses) == len(got.losses) == END - HALF
    assert_agrees(got, want, loss=2e-6, parameters=1e-5)


def test_muon_goes_on_in_a_pipeline(pools, small_data, tmp_path):
    """Its momentum: under ZeRO 3 in pieces, in a pipeline's ZeRO 1 whole on each rank that has a part of the matrix."""
    cases = [Case(data=small_data, steps=END, optimizer="muon", **LAYOUTS[layout][1]) for layout in ("z3x4", "pp2dp2")]
    want, path = pools(4).run(on_device, False, save_in_the_middle, cases[0], str(tmp_path))[0]
    got = pools(4).run(on_device, True, load_and_go_on, cases[1], path)[0]
    assert_agrees(got, want, loss=5e-6, parameters=1e-5)
