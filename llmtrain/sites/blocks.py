"""Which compressed blocks of another rank hold the elements that this one needs, and where each of them goes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from llmtrain.sites.compress import BLOCK, Array
from llmtrain.sites.wire import Rectangle

Pairs = Sequence[tuple[Rectangle, Rectangle]]
"""(elements of the other rank's array, the same elements in this rank's), as `Peer.covers` gives them."""


class Blocks:
    """The blocks that hold all elements of some pairs."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self.runs: list[tuple[int, int]] = []
        """(first block, blocks) that follow one another, in order; no block twice."""
        spans = sorted((there // BLOCK, (there + length - 1) // BLOCK + 1) for there, _, length in self._rows())
        for begin, end in spans:
            if self.runs and begin <= sum(self.runs[-1]):
                first, count = self.runs[-1]
                self.runs[-1] = (first, max(count, end - first))
            else:
                self.runs.append((begin, end - begin))
        self.count = sum(count for _, count in self.runs)

    def wanted(self, record: int) -> list[tuple[Rectangle, Rectangle]]:
        """The records as pairs of bytes: where they are, and where in an array of `count` records they go."""
        pairs: list[tuple[Rectangle, Rectangle]] = []
        at = 0
        for first, count in self.runs:
            size = count * record
            pairs.append(((first * record, size, 1, size), (at, size, 1, size)))
            at += size
        return pairs

    def spread(self, decoded: Array, into: Array) -> None:
        """Put what the records say, [count * BLOCK], where the pairs say."""
        firsts = [first for first, _ in self.runs]
        before = [0]
        for _, count in self.runs:
            before.append(before[-1] + count)
        for there, here, length in self._rows():
            run = bisect_right(firsts, there // BLOCK) - 1
            at = there + (before[run] - firsts[run]) * BLOCK
            into[here : here + length] = decoded[at : at + length]

    def _rows(self) -> Iterator[tuple[int, int, int]]:
        """(first element there, first element here, elements)."""
        for (there, step, rows, length), (here, own_step, _, _) in self._pairs:
            for row in range(rows):
                yield there + row * step, here + row * own_step, length
