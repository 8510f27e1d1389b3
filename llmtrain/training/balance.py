"""How many sequences of a step each data-parallel group takes, so that ranks of unequal speed end it together.

The loss of a step is per token of the global batch, whoever computes it: other shares are the same training, as another
number of ranks is. All ranks hear the same measurements and decide the same from them, without another message.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.config.balance import MOST

SETTLE_STEPS = 2
"""After the start and after a change: kernels are chosen, memory is allocated, code is compiled for the new shapes."""
WINDOW_STEPS = 8
"""Whose medians are compared: a step that something else has held up does not count."""
LEAST_GAIN = 0.03
"""Share of a step's computing that a change has to save, so that noise changes nothing."""


def share_out(seconds: Sequence[float], total: int, *, least: int, most: int, unit: int) -> tuple[int, ...]:
    """The shares of `total` sequences with which the slowest group ends first.

    Args:
        seconds: that a sequence takes, by group.
        total: sequences of all groups: `least` for each, and a multiple of `unit` more.
        least: of a group.
        most: of a group.
        unit: what shares are counted in.
    """
    shares = [least] * len(seconds)
    ends = [(each * (least + unit), least, group) for group, each in enumerate(seconds) if least + unit <= most]
    heapq.heapify(ends)
    for _ in range((total - sum(shares)) // unit):
        *_, group = heapq.heappop(ends)  # of two that would end alike the one that has less
        shares[group] += unit
        if shares[group] + unit <= most:
            heapq.heappush(ends, (seconds[group] * (shares[group] + unit), shares[group], group))
    return tuple(shares)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Other shares from the next step on, and why."""

    before: tuple[int, ...]
    """Sequences of a step by group."""
    after: tuple[int, ...]
    before_s: float
    """Computing of a step: of the group that ends last."""
    after_s: float
    """The same as the measured speeds predict it."""
    equal_s: float
    """The same with equal shares."""
    ideal_s: float
    """If all speeds added up."""

    def __str__(self) -> str:
        given = ", ".join(map(str, self.after[:16])) + (", ..." if len(self.after) > 16 else "")
        return (
            f"ranks of unequal speed take {given} sequences of a step: computing one takes {self.after_s:.3g} s, "
            f"before {self.before_s:.3g} s, with equal shares {self.equal_s:.3g} s; {self.ideal_s / self.after_s:.0%} "
            f"of the sum of their speeds, with equal shares {self.ideal_s / self.equal_s:.0%}"
        )


class Balance:
    """The shares of a launch, from what the ranks say of their speeds."""

    def __init__(
        self, groups: Sequence[int], *, global_batch: int, accumulation: int, at_once: bool, kept: Any = None
    ) -> None:
        """
        Args:
            groups: the data-parallel group of each rank. The ranks of one compute the same sequences.
            global_batch: sequences of a step.
            accumulation: micro-batches of a step.
            at_once: the ranks wait for each other in every micro-batch (ZeRO 2 and 3), not only at a step's end; then
                all micro-batches of a group are equal.
            kept: what another launch's `to_json` gave; shares that fit nothing here are forgotten.
        """
        self._groups, self._count = tuple(groups), max(groups) + 1
        self._total, self._least = global_batch, accumulation
        self._most = MOST * (global_batch // self._count)
        self._unit = accumulation if at_once else 1
        self._equal = (global_batch // self._count,) * self._count
        self.sequences: tuple[int, ...] = self._equal
        """Of a step, by group."""
        given = kept.get("sequences") if isinstance(kept, dict) else None
        if isinstance(given, list) and self._fits(given):
            self.sequences = tuple(given)
        self._forget()

    def _fits(self, given: list[Any]) -> bool:
        whole = all(isinstance(each, int) and not isinstance(each, bool) for each in given)
        return (
            whole
            and (len(given), sum(given)) == (self._count, self._total)
            and all(self._least <= each <= self._most and each % self._unit == 0 for each in given)
        )

    def _forget(self) -> None:
        self._settles = SETTLE_STEPS
        self._window: list[list[int]] = []

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"sequences": list(self.sequences)}

    def heard(self, paces: Sequence[int]) -> Change | None:
        """Once a step: the nanoseconds that each rank has computed for a sequence lately, 0 where it does not know.

        Returns: other shares, if they are worth it; `sequences` has them from now on.
        """
        if not all(paces):
            return None
        if self._settles:
            self._settles -= 1
            return None
        slowest = [0] * self._count
        for group, pace in zip(self._groups, paces, strict=True):
            slowest[group] = max(slowest[group], pace)
        self._window.append(slowest)
        if len(self._window) < WINDOW_STEPS:
            return None
        seconds = [statistics.median(column) / 1e9 for column in zip(*self._window, strict=True)]
        self._window = []
        after = share_out(seconds, self._total, least=self._least, most=self._most, unit=self._unit)
        before_s, after_s = _slowest(seconds, self.sequences), _slowest(seconds, after)
        if after_s > (1 - LEAST_GAIN) * before_s:
            return None
        change = Change(
            before=self.sequences,
            after=after,
            before_s=before_s,
            after_s=after_s,
            equal_s=_slowest(seconds, self._equal),
            ideal_s=self._total / sum(1 / each for each in seconds),
        )
        self.sequences = after
        self._forget()
        return change


def _slowest(seconds: Sequence[float], sequences: Sequence[int]) -> float:
    """When the last group ends."""
    return max(each * count for each, count in zip(seconds, sequences, strict=True))
