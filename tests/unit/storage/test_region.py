"""Pieces of tensors against what torch's own slicing gives."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llmtrain.checkpoint.format import uncovered
from llmtrain.storage.checksum import checksum, checksum_part, checksum_part_array
from llmtrain.storage.pieces import pick, put, read_shared
from llmtrain.storage.region import Region, shard, shared, whole
from llmtrain.storage.tensorfile import TensorFile


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


@st.composite
def regions(draw, most=4):
    """Pieces of strided shards, of any shape that a manifest may describe."""
    runs, end = [], 0
    for _ in range(draw(st.integers(1, 3))):
        offset = end + draw(st.integers(0, 3))
        end = offset + draw(st.integers(1, 4))
        runs.append((offset, end - offset))
    stride = end + draw(st.integers(0, 3))
    count = draw(st.integers(1, most)) * sum(length for _, length in runs)
    region = Region(draw(st.integers(0, 9)), count, tuple(runs), stride)
    low = draw(st.integers(0, count))
    return region.part(low, draw(st.integers(low, count)))


@given(region=regions(), position=st.integers(-5, 80))
def test_blocks_and_places_are_those_of_the_elements(region, position):
    want, found = elements(region), [-1] * region.numel
    for block in region.blocks():
        for row in map(block.row, range(block.rows)):
            found[row.at : row.at + row.length] = range(row.position, row.position + row.length)
    assert found == want
    assert region.below(position) == sum(element < position for element in want)
    if want:
        assert (region.first, region.end) == (want[0], want[-1] + 1)


@given(a=regions(), b=st.one_of(regions(), st.builds(Region, st.integers(0, 40), st.integers(0, 40))))
def test_what_two_pieces_share(a, b):
    left, right = elements(a), elements(b)
    pairs = []
    for rows in shared(a, b):
        for row in range(rows.rows):
            x, y = (rows.at[side] + row * rows.step[side] for side in (0, 1))
            pairs += [(x + i, y + i) for i in range(rows.length)]
    assert all(left[x] == right[y] for x, y in pairs)
    assert sorted(left[x] for x, _ in pairs) == sorted(set(left) & set(right))


def test_the_cost_of_sharing_does_not_grow_with_the_sizes():
    shape = (1 << 30, 1 << 20)
    column, _ = shard(shape, 1, 3, 4)
    for other in (whole(shape), column, Region(12345, 1 << 45), column.part(12345, 1 << 40)):
        assert len(list(shared(column, other))) < 10
        assert sum(rows.rows * rows.length for rows in shared(column, column)) == column.numel


@given(region=regions(), seed=st.integers(0, 99))
def test_pick_and_put(region, seed):
    flat = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    values = pick(flat, region)
    assert values.tolist() == flat[elements(region)].tolist()
    other = torch.zeros(100)
    put(other, region, values)
    assert torch.equal(other[elements(region)], values) and int((other != 0).sum()) == region.numel


@given(stride=st.sampled_from([5, 300, 65536, 70000]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_checksums_of_shards_add_up(stride, data):
    """Short and long rows, within and across the blocks of 65536 that share a factor."""
    lines = data.draw(st.integers(1, 200_000 // stride))
    count = data.draw(st.sampled_from([k for k in (1, 5) if stride % k == 0]))
    values = torch.randn(lines * stride, generator=torch.Generator().manual_seed(0))
    total = 0
    for index in range(count):
        region, _ = shard((lines, stride), 1, index, count)
        cut = data.draw(st.integers(0, region.numel))
        for part in (region.part(0, cut), region.part(cut, region.numel)):
            held = pick(values, part)
            assert checksum_part_array(held.numpy(), part) == checksum_part(held, part)
            total += checksum_part(held, part)
    assert total % 2**64 == checksum(values)


def cover(draw) -> tuple[tuple[int, int], list[Region]]:
    """A matrix cut by columns, each shard cut again in any places."""
    count = draw(st.integers(1, 3))
    shape = (draw(st.integers(1, 4)), count * draw(st.integers(1, 4)))
    pieces = []
    for index in range(count):
        region, _ = shard(shape, 1, index, count)
        cuts = sorted(draw(st.lists(st.integers(0, region.numel), max_size=3)))
        pieces += [region.part(low, high) for low, high in pairwise([0, *cuts, region.numel])]
    return shape, [piece for piece in pieces if piece.numel]


@given(data=st.data())
def test_pieces_that_cover_a_tensor_once(data):
    shape, pieces = cover(data.draw)
    assert uncovered(data.draw(st.permutations(pieces)), shape) is None
    gone = data.draw(st.integers(0, len(pieces) - 1))
    rest = pieces[:gone] + pieces[gone + 1 :]
    assert uncovered(rest, shape) is not None
    assert uncovered([*pieces, pieces[gone]], shape) is not None
    start, numel = data.draw(st.integers(0, 9)), pieces[gone].numel
    moved = replace(pieces[gone], start=start) if data.draw(st.booleans()) else Region(start, numel)
    held = sorted(element for piece in [*rest, moved] for element in elements(piece))
    assert (uncovered([*rest, moved], shape) is None) == (held == list(range(math.prod(shape))))


def test_covering_is_decided_without_looking_at_elements():
    shape = (1 << 40, 1 << 20)
    pieces = [shard(shape, 1, index, 1 << 10)[0] for index in range(1 << 10)]
    assert uncovered(pieces, shape) is None
    assert "overlap" in str(uncovered([*pieces[:-1], pieces[0]], shape))
    assert "gap" in str(uncovered(pieces[1:], shape))
    assert "ends at element" in str(uncovered(pieces, (1 << 39, 1 << 20)))
    assert "strides of" in str(uncovered([pieces[0], shard(shape, 1, 1, 4)[0], Region(0, 4, ((0, 2),), 3)], shape))


@pytest.mark.parametrize("lines", [3, 300])
@pytest.mark.parametrize("width", [64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_of_pieces(tmp_path, monkeypatch, lines, width, dtype):
    """From a file with a part of a matrix into another part: the values, and the bytes that it takes."""
    shape = (lines, width)
    flat = torch.arange(lines * width).to(dtype)
    forms = {"whole": whole(shape), "rows": Region(width // 3, lines * width // 2), "columns": shard(shape, 1, 1, 2)[0]}
    forms["some columns"] = shard(shape, 1, 1, 4)[0].part(width // 8, width * lines // 5)
    save_file({name: pick(flat, region).clone() for name, region in forms.items()}, tmp_path / "file")
    preadv, read = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(preadv(*args)) or read[-1])
    with TensorFile(tmp_path / "file") as file:
        for (name, there), wanted in itertools.product(forms.items(), forms.values()):
            read.clear()
            out = torch.full((wanted.numel,), -1.0)
            for rows in shared(wanted, there):
                read_shared(file, name, rows, out)
            held = torch.zeros(flat.numel(), dtype=torch.bool)
            put(held, there, torch.ones(there.numel, dtype=torch.bool))
            want = torch.where(pick(held, wanted), pick(flat, wanted).float(), torch.tensor(-1.0))
            assert torch.equal(out, want), (name, wanted)
            if width == 4096:  # rows of 2 KiB and more
                assert sum(read) == int((want >= 0).sum()) * dtype.itemsize
