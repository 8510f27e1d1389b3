"""Whether pieces of a tensor cover it once: for what a manifest says, which may be anything. No torch."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from llmtrain.storage.region import Region

_RUNS = 4096  # a fused matrix has two or three sections; one with sections for each head still stays far below


def uncovered(regions: Sequence[Region], shape: Sequence[int]) -> str | None:
    """Where the pieces leave a gap, overlap, or leave the tensor; None when they cover each element once.

    Its cost grows with the number of pieces and of their runs, not with their sizes.
    """
    total = math.prod(shape)
    strides = {region.stride for region in regions if region.runs}
    if not strides:
        return _chain(regions, total)
    if len(strides) > 1:
        return f"has pieces with strides of {' and '.join(map(str, sorted(strides)[:2]))} elements"
    end = max(region.end for region in regions)
    if end > total:
        return f"ends at element {end} of {total}"
    twice = _overlap(regions, strides.pop())
    if twice is not None:
        return f"has an overlap at element {twice}"
    held = sum(region.numel for region in regions)
    return None if held == total else f"has a gap: its pieces hold {held} of {total} elements"


def _chain(regions: Sequence[Region], total: int) -> str | None:
    """All contiguous: one begins where another ends."""
    end = 0
    for start, numel in sorted([(region.start, region.numel) for region in regions]):
        if start != end:
            return f"has a gap or an overlap at element {min(start, end)}"
        end += numel
    return None if end == total else f"ends at element {end} of {total}"


def _overlap(regions: Sequence[Region], stride: int) -> int | None:
    """An element that two pieces hold: the tensor in lines of `stride`, gone through from line to line."""
    cells = [cell for region in regions for block in region.blocks() for cell in block.on(stride)]
    events = sorted(
        event
        for cell in cells
        # What ends before a line leaves before what begins there comes; from the right, which is cheap in a list.
        for event in (
            (cell.line, 1, cell.column, cell.columns),
            (cell.line + cell.lines, 0, -cell.column, cell.columns),
        )
    )
    open_columns: list[tuple[int, int]] = []
    """(first column, one past the last) of the cells on this line, from left to right."""
    for line, begins, column, columns in events:
        span = (abs(column), abs(column) + columns)
        index = bisect_left(open_columns, span)
        if not begins:
            open_columns.pop(index)
            continue
        if index < len(open_columns) and open_columns[index][0] < span[1]:
            return line * stride + open_columns[index][0]
        if index and open_columns[index - 1][1] > span[0]:
            return line * stride + span[0]
        insort(open_columns, span)
    return None


def wrong_region(region: Region) -> str | None:
    """Why it is none; None when it is. The numbers are natural."""
    if not region.contiguous:
        end = 0
        if len(region.runs) > _RUNS:
            return f"it has more than {_RUNS} runs"
        for offset, length in region.runs:
            if offset < end or length < 1:
                return "its runs are empty, overlap, or are not in order"
            end = offset + length
        if end > region.stride:
            return f"its runs are longer than its stride of {region.stride} elements"
        if region.skip >= sum(length for _, length in region.runs):
            return f"it skips {region.skip} elements, more than a period holds"
        if region.numel < 1:
            return "it is empty"
    elif region.stride or region.skip:
        return "it has a stride, but no runs"
    return None
