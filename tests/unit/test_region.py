"""Pieces of tensors against what torch's own slicing gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.models.region import Region, shard, whole


def elements(region: Region) -> list[int]:
    out = [-1] * region.numel
    for position, at, count in region.spans():
        out[at : at + count] = range(position, position + count)
    return out


@pytest.mark.parametrize(
    ("shape", "dim", "count", "sections"),
    [
        ((8, 6), 0, 2, None),
        ((8, 6), 1, 3, None),
        ((12, 5), 0, 2, (8, 2, 2)),
        ((4, 12), 1, 2, (8, 2, 2)),
        ((3, 8, 5), 1, 2, (4, 4)),
        ((3, 8, 5), 0, 3, None),
        ((12,), 0, 2, (4, 4, 4)),
    ],
)
def test_a_shard_is_the_slice_of_each_section(shape, dim, count, sections):
    values = torch.arange(math.prod(shape)).view(shape)
    for index in range(count):
        region, local = shard(shape, dim, index, count, sections)
        want = torch.cat([part.chunk(count, dim)[index] for part in values.split(sections or [shape[dim]], dim)], dim)
        assert tuple(want.shape) == local
        assert elements(region) == want.flatten().tolist()
        assert region.end == int(want.max()) + 1


@given(
    sections=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    outer=st.integers(1, 4),
    inner=st.integers(1, 3),
    count=st.integers(1, 3),
    data=st.data(),
)
def test_a_part_of_a_part_holds_the_same_elements(sections, outer, inner, count, data):
    sizes = [size * count for size in sections]
    region, _ = shard((outer, sum(sizes), inner), 1, data.draw(st.integers(0, count - 1)), count, sizes)
    low = data.draw(st.integers(0, region.numel))
    high = data.draw(st.integers(low, region.numel))
    part = region.part(low, high)
    assert elements(part) == elements(region)[low:high]
    assert part.contiguous or len(list(part.spans())) > 1 or part.numel == 0
    middle = data.draw(st.integers(0, part.numel))
    assert elements(part.part(middle, part.numel)) == elements(region)[low + middle : high]


def test_pieces_that_lie_side_by_side_are_contiguous():
    assert shard((8, 4), 0, 1, 2)[0] == Region(16, 16)
    assert shard((8, 4), 1, 0, 1)[0] == whole((8, 4)) == Region(0, 32)
    assert shard((8, 4), 0, 0, 1, (4, 2, 2))[0] == Region(0, 32)
