"""Regions: which elements of a tensor a flat piece holds, after tensor or expert parallelism and then ZeRO have cut it.

Standard library only: the checkpoint's manifest consists of regions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice


@dataclass(frozen=True, slots=True)
class Region:
    """The elements of a flat Hugging Face tensor that a flat piece holds, in the piece's order.

    A contiguous piece is only `start` and `numel`. A piece of a strided shard (columns of a matrix, a share of each
    section of a fused matrix) repeats `runs` every `stride` elements of the tensor, and begins `skip` elements into
    that endless sequence.
    """

    start: int
    """First element; for a strided piece, where its first period begins."""
    numel: int
    runs: tuple[tuple[int, int], ...] = ()
    """(offset within a period, elements) of each run, in order; empty for a contiguous piece."""
    stride: int = 0
    """Elements of the tensor from one period to the next."""
    skip: int = 0
    """Elements of the first period that precede the piece: fewer than a period has."""

    @property
    def contiguous(self) -> bool:
        return not self.runs

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield (position in the tensor, position in the piece, elements) of each contiguous span, in the piece's
        order."""
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

    def blocks(self) -> list[Block]:
        """Return rectangles that form the region, at most three per run: before, in and after complete periods."""
        if not self.runs:
            return [Block(self.start, 0, 1, self.numel)] if self.numel else []
        period = self._period
        before = min(self.numel, -self.skip % period)
        periods, after = divmod(self.numel - before, period)
        blocks = [Block(position, at, 1, count) for position, at, count in self._piece(0, before).spans()]
        begin, at = self.start + (self.stride if self.skip else 0), before
        for offset, length in self.runs if periods else ():
            blocks.append(Block(begin + offset, at, periods, length, self.stride, period))
            at += length
        rest = self._piece(self.numel - after, self.numel)
        return blocks + [Block(position, self.numel - after + at, 1, count) for position, at, count in rest.spans()]

    def part(self, low: int, high: int) -> Region:
        """Return the region of the piece's elements [low, high), 0 <= low <= high <= numel."""
        return self._piece(low, high)._simplest()

    def below(self, position: int) -> int:
        """Return the number of the piece's elements before this element of the tensor."""
        if not self.runs:
            return min(max(position - self.start, 0), self.numel)
        periods, rest = divmod(position - self.start, self.stride)
        within = sum(min(max(rest - offset, 0), length) for offset, length in self.runs)
        return min(max(periods * self._period + within - self.skip, 0), self.numel)

    @property
    def first(self) -> int:
        return self._place(0) if self.numel else self.start

    @property
    def end(self) -> int:
        return self._place(self.numel - 1) + 1 if self.numel else self.start

    def _place(self, index: int) -> int:
        if not self.runs:
            return self.start + index
        periods, index = divmod(self.skip + index, self._period)
        for offset, length in self.runs:
            if index < length:
                return self.start + periods * self.stride + offset + index
            index -= length
        raise AssertionError(self)

    @property
    def _period(self) -> int:
        return sum(length for _, length in self.runs)

    def _piece(self, low: int, high: int) -> Region:
        assert 0 <= low <= high <= self.numel, (self, low, high)
        if not self.runs:
            return Region(self.start + low, high - low)
        periods, skip = divmod(self.skip + low, self._period)
        return replace(self, start=self.start + periods * self.stride, numel=high - low, skip=skip)

    def _simplest(self) -> Region:
        """Return the canonical form, contiguous if the elements are, so that equal pieces compare equal."""
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


@dataclass(frozen=True)
class Block:
    """Rows of equal length, at equal distances in the tensor and in the piece."""

    position: int
    """First element in the tensor."""
    at: int
    """First element in the piece."""
    rows: int
    length: int
    """Elements of a row, contiguous in tensor and piece."""
    stride: int = 0
    """Elements of the tensor from one row to the next."""
    period: int = 0
    """Elements of the piece from one row to the next."""

    @property
    def last(self) -> int:
        return self.position + (self.rows - 1) * self.stride + self.length - 1

    def row(self, index: int) -> Block:
        return Block(self.position + index * self.stride, self.at + index * self.period, 1, self.length)

    def on(self, stride: int) -> Iterator[Cell]:
        """Yield the block as rectangles of the tensor seen in lines of `stride` elements (the block's own stride if it
        has rows)."""
        line, column = divmod(self.position, stride)
        if self.rows > 1:
            assert self.stride == stride, (self, stride)
            fits = min(self.length, stride - column)
            yield Cell(line, column, self.rows, fits, self.at, self.period)
            if fits < self.length:
                yield Cell(line + 1, 0, self.rows, self.length - fits, self.at + fits, self.period)
            return
        before = min(self.length, -column % stride)
        lines, after = divmod(self.length - before, stride)
        if before:
            yield Cell(line, column, 1, before, self.at, stride)
            line += 1
        if lines:
            yield Cell(line, 0, lines, stride, self.at + before, stride)
        if after:
            yield Cell(line + lines, 0, 1, after, self.at + self.length - after, stride)


@dataclass(frozen=True)
class Cell:
    """A rectangle of lines and columns of a tensor, and its position in a piece."""

    line: int
    column: int
    lines: int
    columns: int
    at: int
    """First element in the piece."""
    step: int
    """Elements of the piece from one line to the next."""


@dataclass(frozen=True)
class Shared:
    """Rows of elements that two pieces of a tensor share."""

    at: tuple[int, int]
    """First element in each piece."""
    step: tuple[int, int]
    """Elements from one row to the next, in each piece."""
    rows: int
    length: int


def shared(a: Region, b: Region) -> Iterator[Shared]:
    """Yield the elements in both regions. The cost does not grow with their sizes if one is contiguous or the strides
    agree."""
    if a.first >= b.end or b.first >= a.end:
        return
    for left in a.blocks():
        for right in b.blocks():
            yield from _shared(left, right)


def _shared(a: Block, b: Block) -> Iterator[Shared]:
    if a.rows > 1 and b.rows > 1 and a.stride != b.stride:
        for index in range(min(a.rows, b.rows)):
            yield from _shared(a.row(index), b) if a.rows <= b.rows else _shared(a, b.row(index))
        return
    stride = next((block.stride for block in (a, b) if block.rows > 1), max(a.last, b.last) + 1)
    for x in a.on(stride):
        for y in b.on(stride):
            line, column = max(x.line, y.line), max(x.column, y.column)
            rows = min(x.line + x.lines, y.line + y.lines) - line
            length = min(x.column + x.columns, y.column + y.columns) - column
            if rows > 0 and length > 0:
                at = tuple(c.at + (line - c.line) * c.step + column - c.column for c in (x, y))
                yield Shared((at[0], at[1]), (x.step, y.step), rows, length)


def whole(shape: Sequence[int]) -> Region:
    return Region(0, math.prod(shape))


def shard(
    shape: Sequence[int], dim: int, index: int, count: int, sections: Sequence[int] | None = None
) -> tuple[Region, tuple[int, ...]]:
    """Return (region, shape) of part `index` of `count` equal parts of a tensor along `dim`, as a row-major flat piece.

    Args:
        sections: sizes along `dim` of the parts of a fused matrix (query, key, value; gate, up), each cut in `count`;
            the piece has its share of the first, then of the second, and so on. None: one section.
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
