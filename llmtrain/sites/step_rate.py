"""How many steps each site trains until the next synchronisation, so that all of them come to it together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

NEAR = 0.05
"""A site that is slower than the fastest by no more trains as many steps: the fastest would wait less than it loses."""
SLOWEST = 1 / 16
"""Share of the fastest site's steps that each site trains at least: one site's word must not stop the others."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a site trains between two synchronisations."""

    batch: int
    """Sequences of an optimizer step."""
    tokens: int
    """Tokens of one."""


class StepClock:
    """The seconds that a step of this site takes, without what lies between steps of one in two."""

    def __init__(self) -> None:
        self._took_s: list[float] = []
        self._began_s: float | None = None

    def begin(self) -> None:
        """A step begins."""
        self._began_s = time.monotonic()

    def end(self) -> None:
        """It is done."""
        if self._began_s is not None:
            self._took_s.append(time.monotonic() - self._began_s)

    def take(self) -> float:
        """The median since the last call; 0 where there was no step."""
        found = statistics.median(self._took_s) if self._took_s else 0.0
        self._took_s.clear()
        return found


def steps_each(step_s: Mapping[str, float], most: int, least: int) -> dict[str, int]:
    """The steps of each site: `most` of the fastest, and of the others as many as these take.

    Args:
        step_s: seconds a step, by site; 0 of one that has trained none yet, which gets as many as the fastest.
        most: of the fastest.
        least: of each.
    """
    fastest = min((each for each in step_s.values() if each), default=0.0)
    found = {}
    for site, each in step_s.items():
        share = max(fastest / each, SLOWEST) if each else 1.0
        found[site] = most if share >= 1 - NEAR else min(most, max(least, round(most * share)))
    return found
