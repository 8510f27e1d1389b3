"""Moves elements of a flat tensor between memory, files and pieces of any form."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from llmtrain.storage.region import Region, Shared, shared
from llmtrain.storage.tensorfile import ITEM_BYTES, TensorFile

_SHORT = 1 << 10  # bytes: between shorter rows the gaps are read, too, as a system call costs more
_SCRATCH = 1 << 20  # elements that are read at once into scratch memory
DTYPE_OF = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Name of a floating-point dtype in safetensors -> torch's dtype."""


def byte_view(values: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, to be read or filled."""
    return values.detach().reshape(-1).view(torch.uint8).numpy().data


def pick(flat: Tensor, region: Region) -> Tensor:
    """Return the region's elements [numel] of a flat tensor; a view if they are contiguous."""
    if region.contiguous:
        return flat[region.start : region.start + region.numel]
    out = torch.empty(region.numel, dtype=flat.dtype, device=flat.device)
    for rows in shared(region, Region(0, flat.numel())):
        _rows(out, rows, 0).copy_(_rows(flat, rows, 1))
    return out


def put(flat: Tensor, region: Region, values: Tensor) -> None:
    """Write the region's elements [numel] into a flat tensor."""
    for rows in shared(region, Region(0, flat.numel())):
        _rows(flat, rows, 1).copy_(_rows(values, rows, 0))


def read_shared(file: TensorFile, name: str, rows: Shared, out: Tensor) -> None:
    """Read the elements that `out` (side 0 of `rows`) and the file's tensor (side 1) share.

    Only these and the gaps between rows shorter than 1 KiB are read. Raises TensorFileError.
    """
    dtype = DTYPE_OF[file.entries[name].dtype]
    item = ITEM_BYTES[file.entries[name].dtype]
    step = rows.step[1] if rows.rows > 1 else rows.length
    if step > rows.length and (rows.length * item < _SHORT or 20 * (step - rows.length) < rows.length):
        for low, count in _some(rows, step):
            values = torch.empty((count - 1) * step + rows.length, dtype=dtype)
            file.read_into(name, rows.at[1] + low * step, byte_view(values))
            _rows(out, rows, 0)[low : low + count].copy_(values.as_strided((count, rows.length), (step, 1)))
        return
    for low, count in _some(rows, rows.length):
        part = _rows(out, rows, 0)[low : low + count]
        straight = part.dtype == dtype and part.is_contiguous() and part.device.type == "cpu"
        values = part if straight else torch.empty(part.shape, dtype=dtype)
        start = rows.at[1] + low * step
        if step == rows.length:
            file.read_into(name, start, byte_view(values))
        else:
            file.read_rows_into(name, start, step, values.view(torch.uint8).numpy().data)
        if not straight:
            part.copy_(values)


def _some(rows: Shared, size: int) -> Iterable[tuple[int, int]]:
    """Return (first row, number of rows) of groups that fit into scratch memory with `size` elements per row."""
    some = max(1, _SCRATCH // max(1, size))
    return ((low, min(some, rows.rows - low)) for low in range(0, rows.rows, some))


def _rows(flat: Tensor, rows: Shared, side: int) -> Tensor:
    """Return one side of the shared rows as a view [rows, length]."""
    size, step = (rows.rows, rows.length), max(1, rows.step[side])
    return flat.as_strided(size, (step, 1), flat.storage_offset() + rows.at[side])
