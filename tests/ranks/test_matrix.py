"""Saved under every ZeRO stage and number of ranks, loaded under every other: the next losses agree within rounding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.helpers.marks import slow
from tests.helpers.training import Case, Trace, assert_agrees
from tests.ranks.test_resume import END, HALF, load_and_go_on, save_in_the_middle

LAYOUTS = list(product((0, 1, 2, 3), (1, 2, 4)))
"""(ZeRO stage, ranks)."""
# In every run of the tests beside the cells of test_cells.py: one rank, and four.
SAMPLE = {(0, 8), (11, 3)}
PAIRS = [
    pytest.param(*pair, marks=[] if pair in SAMPLE else pytest.mark.slow, id="-".join(f"z{s}x{w}" for s, w in names))
    for pair in product(range(12), range(12))
    for names in [[LAYOUTS[i] for i in pair]]
]


ROUND_ROBIN = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
"""Parameters lie in another order in the partitions."""


def case_of(data: str, layout: tuple[int, int]) -> Case:
    """Accumulation differs as well: three micro-batches on one rank, one on more."""
    stage, world_size = layout
    return Case(data=data, stage=stage, steps=END, accumulation=3 if world_size == 1 else 1)


@pytest.fixture(scope="module")
def saved(pools, small_data, tmp_path_factory) -> Callable[[int], tuple[Trace, str]]:
    """saved(i): what LAYOUTS[i] did after its checkpoint, and the checkpoint; made once."""
    made: dict[int, tuple[Trace, str]] = {}

    def save(index: int) -> tuple[Trace, str]:
        if index not in made:
            layout = LAYOUTS[index]
            folder = tmp_path_factory.mktemp(f"saved{index}")
            made[index] = pools(layout[1]).run(save_in_the_middle, case_of(small_data, layout), str(folder))[0]
        return made[index]

    return save


@pytest.mark.parametrize(("saved_at", "loaded_at"), PAIRS)
def test_losses_go_on(pools, small_data, saved, saved_at, loaded_at):
    want, path = saved(saved_at)
    layout = LAYOUTS[loaded_at]
    got = pools(layout[1]).run(load_and_go_on, case_of(small_data, layout), path)[0]
    assert len(want.losses) == len(got.losses) == END - HALF
    assert_agrees(got, want, loss=2e-6, parameters=1e-5)


@pytest.mark.parametrize(
    ("world_size", "saving", "loading", "tolerance"),
    [
        (2, {"stage": 1, "precision": "bf16"}, {"stage": 3, "precision": "bf16"}, 2e-2),
        slow(2, {"stage": 3, "precision": "bf16"}, {"stage": 0, "precision": "fp32"}, 2e-2),
        slow(1, {"stage": 0, "precision": "fp32"}, {"stage": 2, "precision": "bf16"}, 2e-2),
        slow(1, {"stage": 2, "offload": "optimizer"}, {"stage": 3}, 2e-6),
        (2, {"stage": 2, "accumulation": 3, "extra": ROUND_ROBIN}, {"stage": 1, "accumulation": 2}, 2e-6),
        slow(2, {"stage": 2, "optimizer": "muon", "extra": ROUND_ROBIN}, {"stage": 3, "optimizer": "muon"}, 5e-6),
        slow(2, {"stage": 1}, {"stage": 3, "offload": "all"}, 2e-6),
    ],
    ids=str,
)
def test_precision_offload_and_layout_travel(pools, small_data, tmp_path, world_size, saving, loading, tolerance):
    """Between precisions the losses agree to bf16's rounding; fp16, which needs a GPU, is in tests/gpu."""
    case = Case(data=small_data, steps=END, **saving)
    want, path = pools(world_size).run(save_in_the_middle, case, str(tmp_path))[0]
    other = Case(data=small_data, steps=END, **loading)
    got = pools(3 - world_size).run(load_and_go_on, other, path)[0]
    assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < tolerance
