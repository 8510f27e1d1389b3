"""Which samples of the global order each site trains: disjoint blocks, dealt out anew with every synchronisation.

Every site holds the same ledger and changes it by the same facts, so that nothing but those facts is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Span = tuple[int, int]
"""Samples [begin, end) of the global order."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a site is dealt."""

    site: str
    batch: int
    """Sequences of one of its optimizer steps."""
    steps: int
    """Its steps until the next synchronisation."""
    reserve: int
    """Steps beyond them, which it trains only while a synchronisation fails; they return with the next one."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Blocks that are being trained; all other samples before `next` are in the model."""

    next: int
    """First sample that was never dealt."""
    free: tuple[Span, ...] = ()
    """Samples before `next` that came back from sites, in order."""
    dealt: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    """Of each site, in the order in which it trains them."""

    def settled(self, trained: Mapping[str, int], requests: Sequence[Request]) -> Ledger:
        """After a synchronisation: what is in the model is done, the rest returns, every participant gets a block.

        Args:
            trained: site -> samples of its block that are in the model now. A site that is missing here was lost, and
                all of its block is handed on.
            requests: of the participants, in an order that is the same for all.
        """
        back = list(self.free)
        for site, spans in self.dealt.items():
            back += _without(spans, trained.get(site, 0))
        pool = _Pool([*_merged(back), (self.next, None)])
        dealt = {request.site: pool.take(request.batch, request.steps) for request in requests}
        for request in requests:  # after all blocks: while nobody is cut off, the samples are used without gaps
            dealt[request.site] += pool.take(request.batch, request.reserve)
        free, following = pool.rest()
        return Ledger(next=following, free=free, dealt={site: tuple(_joined(spans)) for site, spans in dealt.items()})

    def left_out(self) -> int:
        """Samples that are in no model though later ones are: of sites that have not delivered them."""
        waiting = _merged([*self.free, *(span for spans in self.dealt.values() for span in spans)])
        if waiting and waiting[-1][1] == self.next:
            waiting.pop()
        return sum(end - begin for begin, end in waiting)

    def to_json(self) -> dict[str, Any]:
        return {"next": self.next, "free": self.free, "dealt": self.dealt}

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Ledger:
        """What `to_json` gave. Raises KeyError, TypeError, ValueError for anything else."""
        spans = {site: _spans(given) for site, given in tree["dealt"].items()}
        if (following := int(tree["next"])) < 0:
            raise ValueError(f"{following} is no sample")
        return Ledger(next=following, free=_spans(tree["free"]), dealt=spans)


def steps_of(spans: Sequence[Span], batch: int) -> Iterator[int]:
    """First sample of each step of a block."""
    for begin, end in spans:
        yield from range(begin, end, batch)


class _Pool:
    """Samples to deal, from first to last; the last span has no end."""

    def __init__(self, spans: list[tuple[int, int | None]]) -> None:
        if len(spans) > 1 and spans[-2][1] == spans[-1][0]:
            spans[-2:] = [(spans[-2][0], None)]
        self._spans = spans

    def take(self, batch: int, steps: int) -> list[Span]:
        """So many steps; a span that is shorter than a step is left for a site with a smaller batch."""
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
        """(what came back and was not dealt, the first sample that was never dealt)."""
        return tuple((begin, end) for begin, end in self._spans if end is not None), self._spans[-1][0]


def _without(spans: Sequence[Span], count: int) -> list[Span]:
    """The spans without their first `count` samples."""
    rest = []
    for begin, end in spans:
        done = min(count, end - begin)
        count -= done
        if begin + done < end:
            rest.append((begin + done, end))
    return rest


def _merged(spans: Sequence[Span]) -> list[Span]:
    """The same samples in order, as few spans as possible."""
    return _joined(sorted(spans))


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Spans that follow one another as one."""
    joined: list[Span] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _spans(given: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    spans = tuple((int(begin), int(end)) for begin, end in given)
    if any(not 0 <= begin < end for begin, end in spans):
        raise ValueError(f"{spans} are no samples")
    return spans
