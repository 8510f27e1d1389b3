"""Finds spikes in the losses and gradient norms of a run's steps.

A step is an outlier if its loss, or the logarithm of its norm, is far above the median of the 20 steps before it. The
unit is the deviation: 1.4826 times the median distance of the last 200 steps from their own medians, at least 2 % of
the loss, or a factor of 1.28 on the norm. Outliers do not enter these figures. A median of 20 follows the fall of a
loss; one of 200 lags behind it, and misses three of five spikes of Mixtral 8x7B (docs/developers/benchmarks.md).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

_NEAR, _FAR = 20, 200
_LEAST = 20
"""Steps before the first verdict."""
_DEVIATIONS = 5.0
"""Limit after many steps; of 20 steps it is twice as much, as their deviation is less certain."""
_NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median distance."""
_APART = 5
"""Steps without an outlier that end a spike."""
_NEW_LEVEL = 100
"""Outliers in a row that are no spike any more: the figures begin again."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    step: int
    """Its first step."""
    figure: str
    """loss or gradient norm."""
    value: float
    median: float
    """Median of the figure in the 20 steps before."""
    deviations: float


class Level:
    """The usual values of a figure."""

    def __init__(self, floor: float, *, relative: bool) -> None:
        """`floor`: least deviation; `relative`: as a share of the median."""
        self._floor, self._relative = floor, relative
        self._values: deque[float] = deque(maxlen=_NEAR)
        self._distances: deque[float] = deque(maxlen=_FAR)
        self._taken, self._usual = 0, 0.0
        """Median of the distances; it is computed for every tenth step, 40 us of a step otherwise."""

    def measure(self, value: float) -> tuple[float, float]:
        """Return (median, deviations of `value` above it); (nan, 0) after too few steps."""
        if len(self._distances) < _LEAST:
            return math.nan, 0.0
        median = statistics.median(self._values)
        floor = self._floor * abs(median) if self._relative else self._floor
        deviation = max(_NORMAL * self._usual, floor)
        return median, (value - median) / deviation if math.isfinite(value) else math.inf

    @property
    def uncertainty(self) -> float:
        """Factor on limits: 2 after 20 steps, 1.1 after 200."""
        return 1 + _LEAST / max(1, len(self._distances))

    def to_json(self) -> list[Any]:
        return [list(self._values), list(self._distances), self._taken, self._usual]

    def restore(self, kept: Any) -> None:
        """Raises TypeError, ValueError."""
        values, distances, taken, usual = kept
        self._values.extend(map(float, values))
        self._distances.extend(map(float, distances))
        self._taken, self._usual = int(taken), float(usual)

    def take(self, value: float) -> None:
        if self._values:
            self._distances.append(abs(value - statistics.median(self._values)))
        self._values.append(value)
        self._taken += 1
        if self._distances and (self._taken % 10 == 0 or len(self._distances) == _LEAST):
            self._usual = statistics.median(self._distances)


class Detector:
    """Takes the steps of a run in their order."""

    def __init__(self) -> None:
        self._since_outlier, self._in_a_row = _APART, 0
        self.restart()

    def restart(self) -> None:
        """Forget the usual values: other data, or another schedule, begins."""
        self._loss, self._norm = Level(0.02, relative=True), Level(math.log(1.28), relative=False)

    def to_json(self) -> list[Any]:
        return [self._loss.to_json(), self._norm.to_json(), self._since_outlier, self._in_a_row]

    def restore(self, kept: Any) -> None:
        """Continue with the usual values of a checkpoint, or without any."""
        try:
            loss, norm, since, in_a_row = kept
            self._loss.restore(loss)
            self._norm.restore(norm)
            self._since_outlier, self._in_a_row = int(since), int(in_a_row)
        except (TypeError, ValueError):
            self.restart()

    def outlier(self, loss: float, norm: float, limit: float | None = None) -> tuple[str, float, float, float] | None:
        """Return (figure, value, median, deviations) if a figure is more than `limit` deviations above its median.

        `norm`: NaN if there is none. `limit`: by default the one of spikes.
        """
        median, deviations = self._loss.measure(loss)
        found = [("loss", loss, median, deviations, self._loss.uncertainty)]
        if not math.isnan(norm):
            median, deviations = self._norm.measure(_log(norm))
            found.append(("gradient norm", norm, math.exp(median), deviations, self._norm.uncertainty))
        above = [each[:4] for each in found if each[3] > (limit or _DEVIATIONS * each[4])]
        return max(above, key=lambda each: each[3], default=None)

    def take(self, step: int, loss: float, norm: float) -> Spike | None:
        """Return the spike that begins with this step."""
        found = self.outlier(loss, norm)
        if found is None:
            if math.isfinite(loss):
                self._loss.take(loss)
            if math.isfinite(norm):
                self._norm.take(_log(norm))
            self._since_outlier, self._in_a_row = self._since_outlier + 1, 0
            return None
        first, self._since_outlier = self._since_outlier >= _APART, 0
        self._in_a_row += 1
        if self._in_a_row > _NEW_LEVEL:
            self._in_a_row = 0
            self.restart()
        figure, value, median, deviations = found
        return Spike(step=step, figure=figure, value=value, median=median, deviations=deviations) if first else None


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30)) if math.isfinite(norm) else norm
