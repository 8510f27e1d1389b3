"""Decisions by the figures of evaluations: the best steps, and an end before the last one."""

from __future__ import annotations

import json
import math

import pytest

from llmtrain.checkpoint.retain import Best
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.run import StopEarly
from llmtrain.training.reporting import BestSteps, Patience

LOSS = "eval/loss"


@pytest.mark.parametrize(
    ("mode", "keep", "values", "kept"),
    [
        ("min", 1, [3.0, 2.0, 2.5, 2.0, 1.0], [True, True, False, False, True]),  # of equal ones the first
        ("min", 2, [3.0, 2.0, 2.5, 4.0, math.nan], [True, True, True, False, False]),
        ("max", 1, [0.1, 0.3, math.inf, 0.2, 0.4], [True, True, False, False, True]),
    ],
)
def test_the_best_steps(mode: str, keep: int, values: list[float], kept: list[bool]) -> None:
    best = BestSteps(Best(metric=LOSS, keep=keep, mode=mode), [])
    for step, (value, stays) in enumerate(zip(values, kept, strict=True)):
        best.take(step, {LOSS: value})
        assert (step in best) == stays, step


def test_a_step_whose_save_failed_leaves_its_place_to_the_next() -> None:
    best = BestSteps(Best(metric=LOSS, keep=1, mode="min"), [(10, 2.0), (20, 3.0)])
    assert 10 in best and 20 not in best
    best.take(30, {LOSS: 1.0})
    best.lost(30)
    best.take(40, {LOSS: 1.5})
    assert 40 in best and 30 not in best


def test_an_evaluation_without_the_figure_is_none_of_the_best() -> None:
    """A plugin's metric whose weights are all 0 gives none."""
    best = BestSteps(Best(metric="eval/rare", keep=2, mode="max"), [])
    for step, figures in enumerate([{LOSS: 9.0}, {"eval/rare": 0.1, LOSS: 8.0}, {LOSS: 7.0}, {}]):
        best.take(step, figures)
    assert [step in best for step in range(4)] == [False, True, False, False]
    there = TrainerState(step=4, entries={"evaluation": {"step": 4, "figures": {LOSS: 7.0}}})
    assert Best(metric="eval/rare", keep=2, mode="max").figure(there) is None


def _ends_at(settings: StopEarly, values: list[float]) -> int | None:
    """Evaluation after which the run ends. A resume from a checkpoint of each step tells the same."""
    patience = Patience(settings)
    for step, value in enumerate(values):
        resumed = Patience(settings)
        resumed.restore(patience.to_json())
        patience = resumed
        patience.take(step, {LOSS: value})
        if patience.reason:
            return step
    return None


@pytest.mark.parametrize(
    ("settings", "values", "end"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.0, 2.0, 1.0], 3),
        ({"patience": 2}, [3.0, 2.0, 2.1, 1.9, 2.0, 1.8], None),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.0, 1.6], 2),
        ({"patience": 2, "mode": "max"}, [0.1, 0.2, 0.15, 0.2], 3),
        ({"patience": 2}, [3.0, math.nan, math.nan, 1.0], 2),
    ],
)
def test_patience(settings: dict[str, float], values: list[float], end: int | None) -> None:
    assert _ends_at(StopEarly(metric=LOSS, **settings), values) == end  # type: ignore[arg-type]


def test_the_reason_names_metric_best_and_setting() -> None:
    """With a min_delta "the best is" was a figure that the last evaluation was below."""
    for margin, last, how in ((0.0, 2.5, ""), (0.5, 1.75, " by more than min_delta 0.5"), (0.0, math.nan, "")):
        patience = Patience(StopEarly(metric=LOSS, patience=1, min_delta=margin))
        for step, value in ((10, 2.0), (20, last)):
            patience.take(step, {LOSS: value})
        again = Patience(StopEarly(metric=LOSS, patience=1, min_delta=margin))
        again.restore(json.loads(json.dumps(patience.to_json(), allow_nan=False)))
        it = f"{last:.4f}" if last == last else "not finite"
        was = f"it is {it}, and was 2.0000 at step 10; train.stop_early"
        assert again.reason == f"eval/loss has not become better{how} in 1 evaluations ({was})"
