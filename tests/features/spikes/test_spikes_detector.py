"""Synthetic curves with the features of the public ones in docs/developers/benchmarks.md."""

from __future__ import annotations

import json
import math
import random

import pytest

from llmtrain.features.spikes.record import Detector, Spike


def curve(steps: int, seed: int = 0, noise: float = 0.01) -> list[tuple[float, float]]:
    """A loss that falls from 11 to 2.2, and a norm that rises during the warm-up, then falls, with a heavy tail."""
    draw = random.Random(seed)
    found = []
    for step in range(steps):
        loss = (2.2 + 8.8 * math.exp(-step / 150)) * (1 + draw.gauss(0, noise))
        norm = (0.4 + 2 * math.exp(-step / 300)) * math.exp(draw.gauss(0, 0.15)) * (1 + (draw.random() < 0.02))
        found.append((loss, norm))
    return found


def spikes(points: list[tuple[float, float]]) -> list[Spike]:
    detector = Detector()
    taken = (detector.take(step, *point) for step, point in enumerate(points, 1))
    return [spike for spike in taken if spike is not None]


@pytest.mark.parametrize("seed", range(5))
def test_a_normal_run_has_none_in_ten_thousand_steps(seed: int) -> None:
    assert spikes(curve(2000, seed)) == []


def test_a_step_that_stands_out_is_named_with_its_figure() -> None:
    points = curve(900)
    points[499] = (points[499][0] * 1.25, points[499][1])  # Mixtral 8x7B at step 4260
    points[699] = (points[699][0], points[699][1] * 12)  # the warning before BLOOM's loss went
    first, second = spikes(points)
    assert (first.step, first.figure, second.step, second.figure) == (500, "loss", 700, "gradient norm")
    assert first.median == pytest.approx(points[480][0], rel=0.05) and first.deviations > 5


def test_a_spike_while_the_loss_falls_is_found() -> None:
    points = curve(300)
    points[249] = (points[249][0] * 1.6, points[249][1])
    assert [spike.step for spike in spikes(points)] == [250]


def test_steps_in_a_row_are_one_spike_and_its_values_are_no_measure() -> None:
    points = curve(900)
    for index in range(600, 612):
        points[index] = (points[index][0] * 1.6, points[index][1])
    points[630] = (points[630][0] * 1.3, points[630][1])
    assert [spike.step for spike in spikes(points)] == [601, 631]


def test_a_new_level_is_one_spike_and_then_usual() -> None:
    points = curve(1500)
    higher = [*points[:700], *((loss + 2, norm) for loss, norm in points[700:])]
    assert [spike.step for spike in spikes(higher)] == [701]


@pytest.mark.parametrize("bad", [(math.nan, 0.4), (math.inf, 0.4), (2.2, math.inf)])
def test_values_that_are_not_finite_are_outliers(bad: tuple[float, float]) -> None:
    points = curve(400)
    points[300] = bad
    assert [spike.step for spike in spikes(points)] == [301]


def test_a_missing_norm_and_the_first_steps_give_no_verdict() -> None:
    assert spikes([(math.nan, 9.0), *((loss, math.nan) for loss, _ in curve(400))]) == []


def test_after_a_border_the_usual_values_begin_again() -> None:
    detector = Detector()
    for step, (loss, norm) in enumerate(curve(400), 1):
        detector.take(step, loss, norm)
    detector.restart()
    assert detector.take(401, 9.0, 5.0) is None


@pytest.mark.parametrize("stop", [1, 19, 207, 655])
def test_a_restored_detector_decides_as_the_one_that_went_on(stop: int) -> None:
    """To the last digit, whatever the step: verdicts of spikes.skip_outliers decide updates."""
    points = curve(700)
    points[650] = (points[650][0] * 1.25, points[650][1])
    gone_on, begun = Detector(), Detector()
    for step, point in enumerate(points[:stop], 1):
        gone_on.take(step, *point)
    begun.restore(json.loads(json.dumps(gone_on.to_json())))
    for step, point in enumerate(points[stop:], stop + 1):
        for limit in (0.5, 6.0):
            assert begun.outlier(*point, limit) == gone_on.outlier(*point, limit)
        assert begun.take(step, *point) == gone_on.take(step, *point)


def test_a_foreign_entry_of_a_checkpoint_is_ignored() -> None:
    detector = Detector()
    detector.restore([[["a"], [], 0, 0.0], [], 1, 2])
    assert detector.to_json() == Detector().to_json()


def test_the_limit_of_skipped_outliers_counts_deviations() -> None:
    detector = Detector()
    for step, (loss, norm) in enumerate(curve(900), 1):
        detector.take(step, loss, norm)
    assert detector.outlier(2.2 * 1.2, 0.4, 6.0) is not None
    assert detector.outlier(2.2 * 1.2, 0.4, 20.0) is None
