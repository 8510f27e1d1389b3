"""Saved under every form of parallelism, loaded under every other: the next losses agree within rounding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.helpers.training import Case, Trace, largest_difference
from tests.ranks.test_resume import END, load_and_go_on, save_in_the_middle

LAYOUTS = {
    "one process": (1, {}),
    "zero1 x 4": (4, {"stage": 1}),
    "zero3 x 4": (4, {"stage": 3}),
    "pp2 x dp2": (4, {"pipeline": 2, "stage": 1}),
    "tp2 x dp2": (4, {"tensor": 2, "stage": 2}),
    "tp2 zero3": (4, {"tensor": 2, "stage": 3}),
    "sp2 x dp2": (4, {"sequence": 2, "stage": 3}),
    "pp2 x tp2": (4, {"pipeline": 2, "tensor": 2, "stage": 1}),
}
NAMES = list(LAYOUTS)


def case_of(data: str, layout: str) -> Case:
    """The case that is trained under a layout."""
    return Case(data=data, steps=END, **LAYOUTS[layout][1])


@pytest.fixture(scope="module")
def saved(pools, small_data, tmp_path_factory) -> Callable[[str], tuple[Trace, str]]:
    """saved(layout): what it did after its checkpoint, and the checkpoint; made once."""
    made: dict[str, tuple[Trace, str]] = {}

    def save(layout: str) -> tuple[Trace, str]:
        if layout not in made:
            folder = tmp_path_factory.mktemp(f"saved{NAMES.index(layout)}")
            case = case_of(small_data, layout)
            made[layout] = pools(LAYOUTS[layout][0]).run(save_in_the_middle, case, str(folder))[0]
        return made[layout]

    return save


@pytest.mark.parametrize(("saved_under", "loaded_under"), list(product(NAMES, NAMES)))
def test_losses_go_on(pools, small_data, saved, saved_under, loaded_under):
    want, path = saved(saved_under)
    got = pools(LAYOUTS[loaded_under][0]).run(load_and_go_on, case_of(small_data, loaded_under), path)[0]
    assert len(want.losses) == len(got.losses) == 5
    assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 4e-6
    assert largest_difference(got.parameters, want.parameters) < 1e-5
