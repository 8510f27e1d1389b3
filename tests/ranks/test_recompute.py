"""Recomputation of some layers under the forms of training: the run without it, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.families import FAMILIES
from tests.helpers.training import Case, make_engine, run_case, train_steps

ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}
HALF = {"layers": 2}
KEPT = {"layers": "all", "keep": "attention"}


@pytest.mark.parametrize(
    ("world_size", "form", "recompute"),
    [
        (2, {"stage": 3, "accumulation": 2}, {**HALF, "keep": "attention"}),
        (2, {"stage": 1, "pipeline": 2, "partition": (3, 1), "accumulation": 3}, HALF),
        (2, {"stage": 3, "sequence": 2, "extra": ON_HOST}, KEPT),
        pytest.param(2, {"stage": 2, "adapter": {"r": 4}}, HALF, marks=[pytest.mark.slow, pytest.mark.needs("peft")]),
    ],
    ids=str,
)
def test_nothing_else_changes(pools, small_data, world_size: int, form: dict[str, Any], recompute: dict[str, Any]):
    case = Case(data=small_data, steps=3, **form)
    plain = replace(case, extra={key: value for key, value in case.extra.items() if key not in ON_HOST})
    want = pools(world_size).run(run_case, plain)[0]
    got = pools(world_size).run(run_case, replace(case, recompute=recompute))[0]
    assert (got.losses, got.norms) == (want.losses, want.norms)
    assert all(torch.equal(got.parameters[name], value) for name, value in want.parameters.items())


def routed(case: Case) -> list[list[int]]:
    """Tokens of each expert of each block, as a run logs them."""
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 2)
    figures = engine.module.routing.take(ranks.sum, counts=True)
    engine.close()
    return figures.tokens_LE


def test_what_routers_say_again_is_not_counted(pools, small_data):
    case = Case(data=small_data, stage=1, model=FAMILIES["mixtral"])
    assert pools(2).run(routed, replace(case, recompute=HALF)) == pools(2).run(routed, case)
