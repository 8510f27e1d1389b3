"""A checksum of a tensor that can be computed slice by slice, in any order, on any number of ranks. No torch import.

The 32 bits of each element are multiplied by an odd 64-bit factor for its position in the flat tensor, and the products
are added modulo 2^64 (multilinear hashing). Sums of slices add up to the sum of the tensor, so two ranks with halves of
a parameter and one rank with all of it agree. One changed element always changes the sum; so does any other damage (a
slice in the wrong place, missing, or repeated), except for one chance in about 2^32. It guards against faults, not
against an attacker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from llmtrain.storage.region import Block, Region

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1 << 16  # positions that share a row of factors: the row is 512 KiB and stays in the cache
_CPU_PIECE = 4 * _BLOCK  # elements converted to fp32 at once: 1 MiB stays in the cache
_GPU_PIECE = 16 * _BLOCK  # elements of a strided region on a GPU hashed at once
_GPU_BLOCKS = 128  # blocks hashed at once on a GPU: the int64 temporaries stay at 64 MiB
_LONG = 1 << 13  # elements from which on a separate call per row costs little
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def checksum(values: Tensor, start: int = 0) -> int:
    """Return the hash of `values` (any shape, converted to fp32) as elements [start, start + numel) of a flat tensor.

    It is an integer in [0, 2^64). `(checksum(x[:k]) + checksum(x[k:], k)) % 2**64 == checksum(x)`.
    """
    flat = values.detach().reshape(-1)
    if flat.device.type != "cpu":
        return _on_device(flat.float(), start)
    total = 0
    for done in range(0, flat.numel(), _CPU_PIECE):
        piece = flat[done : done + _CPU_PIECE].float().contiguous()
        total += checksum_array(piece.numpy(), start + done)
    return total % 2**64


def weights_hash(checksums: Mapping[str, int]) -> str:
    """Return a hash of a model's parameter checksums (by name)."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(checksums.items())).encode())


def checksum_part(values: Tensor, region: Region) -> int:
    """Return the hash of `values` as a region of a flat tensor; the regions' hashes add up to the tensor's."""
    if region.contiguous:
        return checksum(values, region.start)
    flat = values.detach().reshape(-1)
    total = 0
    size = _GPU_PIECE if flat.is_cuda else _CPU_PIECE
    for low in range(0, flat.numel(), size):
        piece = flat[low : low + size].float().contiguous()
        where = region.part(low, low + piece.numel())
        total += _strided_on_device(piece, where) if piece.is_cuda else checksum_part_array(piece.numpy(), where)
    return total % 2**64


def checksum_part_array(values: npt.NDArray[np.float32], region: Region) -> int:
    """Return `checksum_part` of a flat fp32 array, without torch. 0.8 G elements/s with rows of 512, 0.5 G with rows of
    32."""
    assert values.size == region.numel, (values.size, region)
    total = 0
    for block in region.blocks():
        if block.rows == 1 or block.length >= _LONG:
            for row in map(block.row, range(block.rows)):
                total += checksum_array(values[row.at : row.at + row.length], row.position)
        else:
            total += _rows(values, block)
    return total % 2**64


def _rows(values: npt.NDArray[np.float32], block: Block) -> int:
    """Hash short rows together. A row's factors are a window of the table, which is repeated for rows that pass its
    end."""
    bits = np.lib.stride_tricks.as_strided(
        values.view(np.int32)[block.at :], (block.rows, block.length), (4 * block.period, 4), writeable=False
    )
    windows = np.lib.stride_tricks.sliding_window_view(_double_row(), block.length)
    total = 0
    some = max(1, _CPU_PIECE // block.length)  # rows at once
    for low in range(0, block.rows, some):
        index = np.arange(low, min(block.rows, low + some), dtype=np.int64)
        blocks, first = np.divmod(block.position + index * block.stride, _BLOCK)
        products = windows[first]
        np.multiply(products, bits[low : low + some], out=products)
        factors = _block_factors(blocks)
        total += int((products.sum(axis=1) * factors).sum())
        passing = np.flatnonzero(first + block.length > _BLOCK)
        if passing.size:
            beyond = first[passing, None] + np.arange(block.length) >= _BLOCK
            change = _block_factors(blocks[passing] + 1) - factors[passing]
            total += int(((products[passing] * beyond).sum(axis=1) * change).sum())
    return total


def checksum_array(values: npt.NDArray[np.float32], start: int = 0) -> int:
    """Return `checksum` of a flat fp32 array, without torch. About 0.8 G elements/s on one core."""
    bits = values.view(np.int32)
    row = _row()
    products = np.empty(_BLOCK, dtype=np.int64)
    total, done = 0, 0
    while done < bits.size:
        block, first = divmod(start + done, _BLOCK)
        part = bits[done : done + _BLOCK - first]
        out = products[: part.size]
        np.multiply(part, row[first : first + part.size], out=out, casting="unsafe")
        total += int(out.sum()) * _block_factor(block)
        done += part.size
    return total % 2**64


def _on_device(flat: Any, start: int) -> int:
    import torch

    row = _row_on(flat.device)
    bits = flat.contiguous().view(torch.int32)
    total, done = torch.zeros((), dtype=torch.int64, device=flat.device), 0
    while done < bits.numel():
        block, first = divmod(start + done, _BLOCK)
        blocks = 0 if first else min((bits.numel() - done) // _BLOCK, _GPU_BLOCKS)
        if blocks:
            part = bits[done : done + blocks * _BLOCK].view(blocks, _BLOCK)
            factors = [as_int64(_block_factor(b)) for b in range(block, block + blocks)]
            sums = (part.long() * row).sum(dim=1) * torch.tensor(factors, device=flat.device)
            total += sums.sum()
            done += blocks * _BLOCK
        else:
            part = bits[done : done + _BLOCK - first]
            total += (part.long() * row[first : first + part.numel()]).sum() * as_int64(_block_factor(block))
            done += part.numel()
    return int(total.item()) % 2**64


def _strided_on_device(flat: Any, region: Region) -> int:
    import torch

    row = _row_on(flat.device)
    bits = flat.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in region.blocks():
        rows = bits.as_strided((block.rows, block.length), (max(1, block.period), 1), bits.storage_offset() + block.at)
        begin = block.position + block.stride * torch.arange(block.rows, device=flat.device).unsqueeze(1)
        place = begin + torch.arange(block.length, device=flat.device)
        numbers = np.arange(block.position // _BLOCK, int(block.last) // _BLOCK + 1, dtype=np.int64)
        factors = torch.from_numpy(_block_factors(numbers)).to(flat.device)
        total += (rows * row[place % _BLOCK] * factors[place // _BLOCK - int(numbers[0])]).sum()
    return int(total.item()) % 2**64


@cache
def _row_on(device: Any) -> Any:
    """Return the row on a device, cached: copying it for each piece took longer than hashing the piece."""
    import torch

    return torch.from_numpy(_row()).to(device)


@cache
def _double_row() -> npt.NDArray[np.int64]:
    return np.concatenate([_row(), _row()])


@cache
def _row() -> npt.NDArray[np.int64]:
    """Return odd factors for the positions in a block (splitmix64 of 1, 2, ...)."""
    return np.array([as_int64(_mixed(i + 1) | 1) for i in range(_BLOCK)], dtype=np.int64)


def _block_factor(block: int) -> int:
    return _mixed(~block % 2**64) | 1


def _block_factors(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    value = (~blocks).astype(np.uint64) * np.uint64(_GOLDEN)
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return ((value ^ value >> np.uint64(31)) | np.uint64(1)).astype(np.int64)


def _mixed(value: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014)."""
    value = value * _GOLDEN % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def as_int64(value: int) -> int:
    """Reinterpret 64 bits as a signed number, for tensors that are summed over ranks."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
