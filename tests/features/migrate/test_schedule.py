"""schedule.name transformers: the factors of transformers' own functions, step by step, to the last bit but one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.optimization import get_scheduler

from llmtrain.features.migrate.schedule import Transformers

STEPS, RATE = 23, 0.1


@pytest.mark.parametrize("warmup", [0, 1, 6])
@pytest.mark.parametrize(
    ("shape", "ours", "theirs"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine", {"cycles": 1.5}, {"num_cycles": 1.5}),
        ("cosine_with_restarts", {}, {}),
        ("cosine_with_restarts", {"cycles": 3}, {"num_cycles": 3}),
        ("cosine_with_min_lr", {"min_ratio": 0.2}, {"min_lr_rate": 0.2}),
        ("cosine_with_min_lr", {"min_ratio": 0.5}, {"min_lr": 0.05}),
        ("polynomial", {"power": 2.0, "min_ratio": 1e-7 / RATE}, {"power": 2.0}),
        ("inverse_sqrt", {}, {}),
        ("inverse_sqrt", {"timescale": 11}, {"timescale": 11}),
        ("warmup_stable_decay", {"decay_steps": 7}, {"num_decay_steps": 7}),
        (
            "warmup_stable_decay",
            {"decay_steps": 5, "min_ratio": 0.1, "decay_type": "1-sqrt"},
            {"num_decay_steps": 5, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"},
        ),
        ("constant", {}, {}),
        ("constant_with_warmup", {}, {}),
    ],
)
def test_each_step_has_the_rate_of_transformers(
    shape: Any, ours: dict[str, Any], theirs: dict[str, Any], warmup: int
) -> None:
    schedule = Transformers(shape=shape, warmup_steps=0 if shape == "constant" else warmup, **ours)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = get_scheduler(shape, optimizer, warmup, STEPS, scheduler_specific_kwargs=theirs)
    for step in range(STEPS):
        assert math.isclose(RATE * schedule.factor(step, STEPS), scheduler.get_last_lr()[0], rel_tol=1e-14), step
        optimizer.step()
        scheduler.step()


def test_a_share_of_the_steps_is_rounded_up_as_there() -> None:
    assert Transformers(warmup_ratio=0.1).filled(23) == Transformers(warmup_steps=math.ceil(0.1 * 23))
