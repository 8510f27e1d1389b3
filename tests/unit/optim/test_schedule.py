"""The learning rate is a pure function of the optimizer step."""

from __future__ import annotations

import itertools
import math

import pytest

from llmtrain.config.run import ScheduleConfig
from llmtrain.optim.schedules import learning_rate_factor


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_rises_to_the_peak(name):
    schedule = ScheduleConfig(name=name, warmup_steps=4)
    assert [learning_rate_factor(schedule, step, 50) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_last_step_is_at_the_floor(name):
    schedule = ScheduleConfig(name=name, warmup_steps=3, min_ratio=0.25, decay_steps=10 if name == "wsd" else None)
    values = [learning_rate_factor(schedule, step, 40) for step in range(40)]
    assert values[39] == pytest.approx(0.25)
    assert all(a >= b for a, b in itertools.pairwise(values[3:]))


def test_shapes():
    cosine, linear = ScheduleConfig(name="cosine", min_ratio=0.0), ScheduleConfig(name="linear", min_ratio=0.0)
    assert learning_rate_factor(cosine, 25, 101) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate_factor(linear, 25, 101) == pytest.approx(0.75)
    wsd = ScheduleConfig(name="wsd", decay_steps=10, min_ratio=0.0)
    assert [learning_rate_factor(wsd, step, 101) for step in (0, 50, 90, 91, 95, 100)] == pytest.approx(
        [1, 1, 1, 1, 5 / 9, 0]
    )
    assert learning_rate_factor(ScheduleConfig(name="constant"), 10**6, None) == 1.0
