"""Step rates: each site trains so many steps that all of them arrive at the next synchronisation together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

NEAR = 0.05
"""A site slower than the fastest by no more than this share trains as many steps."""
SLOWEST = 1 / 16
"""Least share of the fastest site's steps for any site: a reported time must not stop the others."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Size of a site's optimizer step."""

    batch: int
    """Sequences."""
    tokens: int
    """Tokens."""


class StepClock:
    """Measures the seconds of an optimizer step, without what happens between steps."""

    def __init__(self) -> None:
        self._took_s: list[float] = []
        self._began_s: float | None = None

    def begin(self) -> None:
        """Start timing a step."""
        self._began_s = time.monotonic()

    def end(self) -> None:
        """Stop timing it."""
        if self._began_s is not None:
            self._took_s.append(time.monotonic() - self._began_s)

    def take(self) -> float:
        """Return the median since the last call, in seconds; 0 if there was no step."""
        found = statistics.median(self._took_s) if self._took_s else 0.0
        self._took_s.clear()
        return found


def steps_each(step_s: Mapping[str, float], most: int, least: int) -> dict[str, int]:
    """Return the steps of each site: `most` of the fastest, and as many of each other, at least `least`, as fit into
    the same time. `step_s`: site -> seconds of a step; 0: none trained yet, it gets as many as the fastest."""
    fastest = min((each for each in step_s.values() if each), default=0.0)
    found = {}
    for site, each in step_s.items():
        share = max(fastest / each, SLOWEST) if each else 1.0
        found[site] = most if share >= 1 - NEAR else min(most, max(least, round(most * share)))
    return found
