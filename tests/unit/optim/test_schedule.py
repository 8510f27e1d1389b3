"""The learning rate is a pure function of the optimizer step."""

from __future__ import annotations

import itertools
import math

import pytest

from llmtrain.optim.schedules import Constant, Cosine, Linear, Schedule, Wsd


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])  # not those of features
def test_warm_up_rises_to_the_peak(name):
    schedule = Schedule.of(name, warmup_steps=4)
    assert [schedule.factor(step, 50) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_last_step_is_at_the_floor(name):
    schedule = Schedule.of(name, warmup_steps=3, min_ratio=0.25, **({"decay_steps": 10} if name == "wsd" else {}))
    values = [schedule.factor(step, 40) for step in range(40)]
    assert values[39] == pytest.approx(0.25)
    assert all(a >= b for a, b in itertools.pairwise(values[3:]))


def test_shapes():
    cosine, linear = Cosine(min_ratio=0.0), Linear(min_ratio=0.0)
    assert cosine.factor(25, 101) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert linear.factor(25, 101) == pytest.approx(0.75)
    wsd = Wsd(decay_steps=10, min_ratio=0.0)
    assert [wsd.factor(step, 101) for step in (0, 50, 90, 91, 95, 100)] == pytest.approx([1, 1, 1, 0.9, 0.5, 0])
    assert Constant().factor(10**6, None) == 1.0


def test_the_final_decay_of_wsd_is_a_tenth_of_the_run_by_default():
    default, given = Wsd(min_ratio=0.0), Wsd(min_ratio=0.0, decay_steps=10)
    assert default.filled(100) == given
    assert [default.factor(step, 100) for step in range(100)] == [given.factor(step, 100) for step in range(100)]
    assert Wsd().filled(3).decay() == 1
