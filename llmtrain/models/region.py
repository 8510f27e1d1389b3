"""Which elements of a tensor a flat piece of it holds: what a tensor-parallel or expert-parallel rank has, cut by ZeRO.

Standard library only: the checkpoint's manifest is made of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice


@dataclass(frozen=True)
class Region:
    """Elements of a flat Hugging Face tensor, in the order in which a flat piece holds them.

    A contiguous piece is `start` and `numel` alone. A piece of a strided shard (columns of a matrix, a share of each
    section of a fused matrix) repeats `runs` every `stride` elements of the tensor; it begins `skip` elements into
    that endless sequence.
    """

    start: int
    """First element; for a strided piece, where its first period begins."""
    numel: int
    runs: tuple[tuple[int, int], ...] = ()
    """(offset within a period, elements) of each run; empty for a contiguous piece."""
    stride: int = 0
    """Elements of the tensor from one period to the next."""
    skip: int = 0
    """Elements of the first period that lie before the piece: less than a period holds."""

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie side by side in the tensor."""
        return not self.runs

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(position in the tensor, position in the piece, elements) of each contiguous span, in the piece's order."""
        if not self.runs:
            if self.numel:
                yield self.start, 0, self.numel
            return
        period, done, skip = self.start, 0, self.skip
        while done < self.numel:
            for offset, length in self.runs:
                if skip >= length:
                    skip -= length
                    continue
                take = min(length - skip, self.numel - done)
                if take:
                    yield period + offset + skip, done, take
                done += take
                skip = 0
            period += self.stride

    def part(self, low: int, high: int) -> Region:
        """Elements [low, high) of the piece, 0 <= low <= high <= numel."""
        assert 0 <= low <= high <= self.numel, (self, low, high)
        if not self.runs:
            return Region(self.start + low, high - low)
        periods, skip = divmod(self.skip + low, self._period)
        return replace(self, start=self.start + periods * self.stride, numel=high - low, skip=skip)._simplest()

    @property
    def end(self) -> int:
        """One past the last element in the tensor."""
        return max((position + count for position, _, count in self.spans()), default=self.start)

    @property
    def _period(self) -> int:
        """Elements that one period holds."""
        return sum(length for _, length in self.runs)

    def _simplest(self) -> Region:
        """The same elements, contiguous if they are: equal pieces compare equal."""
        if not self.runs:
            return self
        merged: list[tuple[int, int]] = []
        for offset, length in self.runs:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            elif length:
                merged.append((offset, length))
        simpler = replace(self, runs=tuple(merged))
        first = list(islice(simpler.spans(), 2))
        if len(first) < 2 or (len(merged) == 1 and merged[0][1] == self.stride):
            return Region(first[0][0] if first else self.start, self.numel)
        return simpler


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region(0, math.prod(shape))


def shard(
    shape: Sequence[int], dim: int, index: int, count: int, sections: Sequence[int] | None = None
) -> tuple[Region, tuple[int, ...]]:
    """Part `index` of `count` equal parts of a tensor along `dim`, as its row-major flat piece: (region, its shape).

    Args:
        sections: sizes along `dim` of the parts of a fused matrix (query, key, value; gate, up): each of them is cut in
            `count`, and the piece holds its share of the first, then of the second, and so on. None: one section.
    """
    sections = [shape[dim]] if sections is None else list(sections)
    assert sum(sections) == shape[dim] and all(size % count == 0 for size in sections), (shape, dim, count, sections)
    inner = math.prod(shape[dim + 1 :])
    runs, begin = [], 0
    for size in sections:
        runs.append(((begin + index * (size // count)) * inner, size // count * inner))
        begin += size
    local = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    return Region(0, math.prod(local), tuple(runs), shape[dim] * inner)._simplest(), local
