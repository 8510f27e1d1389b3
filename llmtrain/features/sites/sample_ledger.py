"""Ledger of sequences: at every synchronisation each site gets its own blocks of the global order.

Every site updates its copy of the ledger from the same facts, so only these are sent. The numbers of steps let
all sites arrive at the next synchronisation together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Span = tuple[int, int]
"""Sequences [begin, end) of the global order."""


@dataclass(frozen=True, kw_only=True)
class Request:
    site: str
    batch: int
    """Sequences of an optimizer step."""
    steps: int
    """Steps until the next synchronisation."""
    reserve: int
    """Further steps, trained only while synchronisations fail; unused ones are returned at the next one."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Blocks that sites are training on. All other sequences before `next` are in the model."""

    next: int
    """The first sequence that was never dealt."""
    free: tuple[Span, ...] = ()
    """Sequences before `next` that sites returned, in order."""
    dealt: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    """Site -> its spans, in training order."""

    def settled(self, trained: Mapping[str, int], requests: Sequence[Request]) -> Ledger:
        """Return the ledger after a synchronisation: delivered sequences leave it, the rest is dealt again. `trained`:
        site -> its sequences in the model; a missing site's block is passed on complete. `requests`: in the same order
        on all sites."""
        back = list(self.free)
        for site, spans in self.dealt.items():
            back += _without(spans, trained.get(site, 0))
        pool = _Pool([*_merged(back), (self.next, None)])
        dealt = {request.site: pool.take(request.batch, request.steps) for request in requests}
        for request in requests:  # after all blocks: while nobody is cut off, the sequences are used without gaps
            dealt[request.site] += pool.take(request.batch, request.reserve)
        free, following = pool.rest()
        return Ledger(next=following, free=free, dealt={site: tuple(_joined(spans)) for site, spans in dealt.items()})

    def left_out(self) -> int:
        """Count the sequences before the last dealt one that no site has delivered."""
        waiting = _merged([*self.free, *(span for spans in self.dealt.values() for span in spans)])
        if waiting and waiting[-1][1] == self.next:
            waiting.pop()
        return sum(end - begin for begin, end in waiting)

    def to_json(self) -> dict[str, Any]:
        return {"next": self.next, "free": self.free, "dealt": self.dealt}

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Ledger:
        """Raises KeyError, TypeError, ValueError for anything but `to_json`."""
        spans = {site: _spans(pairs) for site, pairs in tree["dealt"].items()}
        if (following := int(tree["next"])) < 0:
            raise ValueError(f"{following} is no sequence number")
        return Ledger(next=following, free=_spans(tree["free"]), dealt=spans)


def steps_of(spans: Sequence[Span], batch: int) -> Iterator[int]:
    for begin, end in spans:
        yield from range(begin, end, batch)


class _Pool:
    """Sequences to deal, from first to last; the last span has no end."""

    def __init__(self, spans: list[tuple[int, int | None]]) -> None:
        if len(spans) > 1 and spans[-2][1] == spans[-1][0]:
            spans[-2:] = [(spans[-2][0], None)]
        self._spans = spans

    def take(self, batch: int, steps: int) -> list[Span]:
        """Remove and return `steps` steps; shorter spans stay for a site with a smaller batch."""
        taken: list[Span] = []
        left: list[tuple[int, int | None]] = []
        for begin, end in self._spans:
            fits = steps if end is None else min(steps, (end - begin) // batch)
            steps -= fits
            if fits:
                taken.append((begin, begin + fits * batch))
            if end is None or begin + fits * batch < end:
                left.append((begin + fits * batch, end))
        self._spans = left
        return taken

    def rest(self) -> tuple[tuple[Span, ...], int]:
        """Return (returned spans, the first sequence that was never dealt)."""
        return tuple((begin, end) for begin, end in self._spans if end is not None), self._spans[-1][0]


def _without(spans: Sequence[Span], count: int) -> list[Span]:
    rest = []
    for begin, end in spans:
        done = min(count, end - begin)
        count -= done
        if begin + done < end:
            rest.append((begin + done, end))
    return rest


def _merged(spans: Sequence[Span]) -> list[Span]:
    return _joined(sorted(spans))


def _joined(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _spans(pairs: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    spans = tuple((int(begin), int(end)) for begin, end in pairs)
    if any(not 0 <= begin < end for begin, end in spans):
        raise ValueError(f"{spans}: each must be a begin and a larger end, from 0")
    return spans


NEAR = 0.05
"""A site slower than the fastest by at most this share trains the same number of steps."""
SLOWEST = 1 / 16
"""Least share of the fastest site's steps for any site: a reported time must not stop the others."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Size of a site's optimizer step."""

    batch: int
    """Sequences."""
    tokens: int
    """Tokens."""


def steps_each(step_s: Mapping[str, float], most: int, least: int) -> dict[str, int]:
    """Return the steps of each site: `most` of the fastest; each other gets the number, at least `least`, that fits
    into the same time. `step_s`: site -> seconds of a step; 0: none trained yet, it gets `most`."""
    fastest = min((seconds for seconds in step_s.values() if seconds), default=0.0)
    steps = {}
    for site, seconds in step_s.items():
        share = max(fastest / seconds, SLOWEST) if seconds else 1.0
        steps[site] = most if share >= 1 - NEAR else min(most, max(least, round(most * share)))
    return steps
