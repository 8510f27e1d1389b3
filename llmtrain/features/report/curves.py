"""Curves of a run's metrics, and their moving average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from llmtrain.tracking.metrics import loss_unit


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Finite values of one metric over steps, in order."""

    steps: Sequence[float] = ()
    values: Sequence[float] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A run's curves by metric name, its resume points (steps) and its baselines (name -> nats/token)."""

    by_name: dict[str, Curve]
    resumes: Sequence[float] = ()
    borders: dict[int, float] = field(default_factory=dict)
    """Stage -> number of earlier steps, for stages after the first."""
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return loss_unit(self.by_name)

    def __getitem__(self, name: str) -> Curve:
        return self.by_name.get(name, Curve())


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over a centred window: a fiftieth of the curve, at least 5 points.

    Centred, because a running average lags a loss that falls fast. Within half a window of an end, the values are the
    straight line through the last complete window (as in Savitzky and Golay's filter).
    """
    reach = max(2, len(values) // 100)
    width = 2 * reach + 1
    if len(values) < width:
        return list(values)
    sums = [0.0, *accumulate(values)]
    means = [(sums[start + width] - sums[start]) / width for start in range(len(values) - width + 1)]
    squares = reach * (reach + 1) * width / 3  # of the distances from the middle

    def line(window: Sequence[float], mean: float, distances: range) -> list[float]:
        slope = sum((index - reach) * value for index, value in enumerate(window)) / squares
        return [mean + slope * distance for distance in distances]

    head = line(values[:width], means[0], range(-reach, 0))
    return [*head, *means, *line(values[-width:], means[-1], range(1, reach + 1))]
