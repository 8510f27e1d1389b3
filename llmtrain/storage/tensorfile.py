"""Safetensors files, read strictly and element by element. No torch import.

The safetensors library maps files into memory, so an I/O error is a signal instead of an exception, and a process's
reads cannot be counted or bounded. Here every header is checked before one byte of data is used, and pread writes data
into the caller's memory. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import UserError
from llmtrain.base.files import open_regular

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Name of a dtype in safetensors -> bytes of an element."""
_MAX_HEADER = 100_000_000  # the safetensors library's own limit
_READ = 1 << 30  # Linux moves at most 2 GiB - 4 KiB in one call


class TensorFileError(UserError):
    """A file is no intact safetensors file, or cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    dtype: str
    """Name of the dtype as in `ITEM_BYTES`."""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    end: int

    @property
    def numel(self) -> int:
        return numel(self.shape)


def numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


class TensorFile:
    """An open safetensors file, also a context manager. Reads are safe from several threads.

    Raises:
        TensorFileError: cut short, a header larger than the file or not JSON, an unknown type, a shape that does not
            fit its bytes, holes or overlaps between tensors, bytes after the last one, more tensors than `most`.
    """

    def __init__(self, path: Path, handle: int | None = None, *, most: int | None = None) -> None:
        """`handle`: the file, open for reading, which `close` closes. `most`: largest number of tensors."""
        self.path = path
        self._most = most
        try:
            self._handle = open_regular(path) if handle is None else handle
        except OSError as error:
            raise TensorFileError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            self.bytes = os.fstat(self._handle).st_size
            self.entries, self.metadata = self._header()
        except BaseException:
            os.close(self._handle)
            raise

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` (bytes) with the flat tensor's elements from `start` on. Raises TensorFileError."""
        entry = self.entries[name]
        at = entry.begin + start * ITEM_BYTES[entry.dtype]
        if at + out.nbytes > entry.end:
            raise TensorFileError(f"{self.path}: {name} ends before byte {at + out.nbytes}.")
        self._pread(at, out.cast("B"))

    def read_rows_into(self, name: str, start: int, step: int, out: memoryview) -> None:
        """Fill `out` [rows, bytes of a row] with rows that begin `step` elements apart, from `start` on.

        One system call per row. Raises TensorFileError.
        """
        entry = self.entries[name]
        item = ITEM_BYTES[entry.dtype]
        rows, size = out.shape  # type: ignore[misc]
        if entry.begin + (start + (rows - 1) * step) * item + size > entry.end:
            raise TensorFileError(f"{self.path}: {name} ends before row {rows - 1} from element {start} on.")
        at, flat = entry.begin + start * item, out.cast("B")
        for low in range(0, out.nbytes, size):
            self._pread(at, flat[low : low + size])
            at += step * item

    def _pread(self, at: int, out: memoryview) -> None:
        done = 0
        while done < out.nbytes:
            try:
                count = os.preadv(self._handle, [out[done : done + _READ]], at + done)
            except OSError as error:
                raise TensorFileError(f"{self.path} cannot be read at byte {at + done}: {error.strerror}") from error
            if count == 0:
                raise TensorFileError(f"{self.path} ends at byte {at + done}: it was cut short while being read.")
            done += count

    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        if self.bytes < 8:
            raise TensorFileError(f"{self.path} has {self.bytes} bytes: no safetensors file.")
        length = memoryview(bytearray(8))
        self._pread(0, length)
        (size,) = struct.unpack("<Q", length)
        if size > min(_MAX_HEADER, self.bytes - 8):
            begin = memoryview(bytearray(min(64, self.bytes)))
            self._pread(0, begin)
            if fetch := untrusted.pointer(bytes(begin)):
                raise TensorFileError(f"{self.path}: {fetch}.")
            raise TensorFileError(
                f"{self.path}: its header claims {size} bytes, the file has {self.bytes} (limit {_MAX_HEADER}). "
                "It is damaged, cut short, or not a safetensors file."
            )
        text = memoryview(bytearray(size))
        self._pread(8, text)
        try:
            header = untrusted.loads(bytes(text).decode("utf-8"), pairs=_no_repeats)
            metadata = header.pop("__metadata__", {})
            if not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("__metadata__ holds something else than strings")
            if self._most is not None and len(header) > self._most:
                raise ValueError(f"{len(header)} tensors in one file, where at most {self._most} are read")
            entries = {name: _entry(name, raw, 8 + size) for name, raw in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TensorFileError(f"{self.path}: its header is not one of safetensors: {error}") from error
        end = 8 + size
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end:
                raise TensorFileError(f"{self.path}: {name} begins at byte {entry.begin}, not {end} (hole or overlap).")
            end = entry.end
        if end != self.bytes:
            raise TensorFileError(
                f"{self.path} has {self.bytes} bytes, its header describes {end}: it is damaged or cut short."
            )
        return entries, metadata


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice")
    return fields


def _entry(name: str, raw: dict[str, Any], data_start: int) -> Entry:
    dtype, shape, (begin, end) = raw["dtype"], raw["shape"], raw["data_offsets"]
    numbers = (*shape, begin, end)
    if not name.isprintable():  # it reaches terminals and file names
        raise ValueError(f"{name!r} is no name of a tensor")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name} has the unknown type {dtype!r}")
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{name} has a size or an offset that is no natural number")
    entry = Entry(dtype=dtype, shape=tuple(shape), begin=data_start + begin, end=data_start + end)
    if entry.end - entry.begin != entry.numel * ITEM_BYTES[dtype]:
        raise ValueError(f"{name} of shape {shape} in {dtype} does not fill its {end - begin} bytes")
    return entry


def header_bytes(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str], align: int = 8) -> bytes:
    """Return the beginning of a file with these tensors {name: (dtype, shape)} in this order.

    `align`: the data starts at a multiple of this number of bytes (spaces after the JSON are allowed). safetensors
    itself aligns to 8.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + numel(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % align)
    return struct.pack("<Q", len(text)) + text
