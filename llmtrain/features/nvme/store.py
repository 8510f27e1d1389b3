"""The swap file of a rank, in place of DeepSpeed's asynchronous I/O op (csrc/aio).

The op is built at its first use, with libaio's headers, which takes minutes, and it returns whatever a damaged file
holds. Here threads read and write blocks past the page cache, each block has a checksum, and all tensors lie in
a file without a name: whatever ends a run, the kernel frees its space.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, pipelined_optimizer_swapper
from torch import Tensor

from llmtrain.engine.deepspeed.patches import Private
from llmtrain.storage.pieces import byte_view

PAGE = 4096
_MOST_REQUESTS = 32

PRIVATE = (
    Private("deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper", ("AsyncIOBuilder",), "files are our own"),
    Private("deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper", ("AsyncIOBuilder",), "files are our own"),
)


class SwapError(Exception):
    """A swap file cannot be read or written, or is damaged: on one rank, while the others compute."""


@dataclass
class _Extent:
    """Place of a tensor in the file."""

    offset: int
    size: int
    sums: dict[int, int] = field(default_factory=dict)
    """First byte of a block -> its checksum."""


class Store:
    """Tensors by the names that DeepSpeed has for their files. `key`: of the folder in the DeepSpeed JSON."""

    def __init__(self, folder: Path, key: str, *, block: int, requests: int) -> None:
        self.folder, self._key, self._block = folder, key, -(-block // PAGE) * PAGE
        handle = open_unnamed(folder)
        weakref.finalize(self, os.close, handle)
        self._handle = self._direct = handle
        with contextlib.suppress(OSError):  # the file system has no direct I/O
            self._direct = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_DIRECT)
            weakref.finalize(self, os.close, self._direct)
        self._pool = ThreadPoolExecutor(min(requests, _MOST_REQUESTS), thread_name_prefix="swap")
        self._extents: dict[str, _Extent] = {}
        self._end = 0
        self.buffers: dict[int, Tensor] = {}
        """Address -> memory that DeepSpeed has asked for."""

    def write(self, name: str, values: Tensor) -> list[Future[None]]:
        """Begin to write a complete tensor, which may not change meanwhile."""
        extent = self._extent(name, values.numel() * values.element_size())
        return self._each_block(self._write_block, name, extent, 0, values)

    def read(self, name: str, values: Tensor) -> list[Future[None]]:
        """Begin to read a complete tensor."""
        return self._each_block(self._read_block, name, self._extents[name], 0, values)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return bytes [start, stop) of a tensor."""
        low, values = self._blocks(name, start, stop)
        return values[start - low : stop - low]

    def set_part(self, name: str, start: int, values: Tensor) -> None:
        """Write bytes from `start` on."""
        low, around = self._blocks(name, start, start + values.numel())
        around[start - low : start - low + values.numel()] = values
        finish(self._each_block(self._write_block, name, self._extents[name], low, around))

    def _blocks(self, name: str, start: int, stop: int) -> tuple[int, Tensor]:
        """Return the first byte, and the values, of the blocks around [start, stop)."""
        extent = self._extents[name]
        low, high = start // self._block * self._block, min(-(-stop // self._block) * self._block, extent.size)
        values = aligned(high - low)
        finish(self._each_block(self._read_block, name, extent, low, values))
        return low, values

    def _extent(self, name: str, size: int) -> _Extent:
        extent = self._extents.get(name)
        if extent is None or extent.size != size:
            extent = self._extents[name] = _Extent(self._end, size)
            try:
                os.posix_fallocate(self._handle, self._end, size)
            except OSError as error:
                raise self._error(name, f"its {size} bytes cannot be had: {error.strerror}") from None
            self._end += -(-size // PAGE) * PAGE
        return extent

    def _each_block(self, do: Any, name: str, extent: _Extent, low: int, values: Tensor) -> list[Future[None]]:
        view, address = byte_view(values), values.data_ptr()
        starts = range(0, len(view), self._block)
        blocks = ((start, view[start : start + self._block]) for start in starts)
        return [self._pool.submit(do, name, extent, low + start, block, address + start) for start, block in blocks]

    def _write_block(self, name: str, extent: _Extent, start: int, block: memoryview, address: int) -> None:
        handle, place = self._handle_for(block, address), extent.offset + start
        try:
            if os.pwrite(handle, block, place) < len(block):
                raise self._error(name, "a block was written in part: is the disk full?")
        except OSError as error:
            raise self._error(name, f"it cannot be written: {error.strerror}") from None
        extent.sums[start] = xxhash.xxh3_64_intdigest(block)

    def _read_block(self, name: str, extent: _Extent, start: int, block: memoryview, address: int) -> None:
        handle, place = self._handle_for(block, address), extent.offset + start
        try:
            count = os.preadv(handle, [block], place)
        except OSError as error:
            raise self._error(name, f"it cannot be read: {error.strerror}") from None
        if count < len(block) or xxhash.xxh3_64_intdigest(block) != extent.sums[start]:
            raise self._error(name, f"bytes {start} to {start + len(block)} are not those that were written")

    def _handle_for(self, block: memoryview, address: int) -> int:
        return self._direct if address % PAGE == 0 and len(block) % PAGE == 0 else self._handle

    def _error(self, name: str, reason: str) -> SwapError:
        return SwapError(
            f"{self._key} = {str(self.folder)!r}: the swap file of {Path(name).name.removesuffix('.tensor.swp')} is "
            f"of no use: {reason}. Resume from the last checkpoint, which does not depend on swap files; if it happens "
            "again, use another disk"
        )


def open_unnamed(folder: Path) -> int:
    """Open a new file without a name in the folder; returns its descriptor."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    except OSError:  # a file system without it
        handle, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
        return handle


def finish(futures: list[Future[None]]) -> None:
    """Wait for blocks. Raises SwapError."""
    for future in futures:
        future.result()


def aligned(size: int) -> Tensor:
    """Bytes for direct I/O."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return memory[-memory.data_ptr() % PAGE :][:size]


class Handle:
    """The methods of DeepSpeed's aio_handle that its swappers call."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._pending: list[list[Future[None]]] = []

    def async_pwrite(self, values: Tensor, name: str, offset: int) -> int:
        self._pending.append(self.store.write(name, values))
        return 0

    def async_pread(self, values: Tensor, name: str, offset: int) -> int:
        self._pending.append(self.store.read(name, values))
        return 0

    def wait(self) -> int:
        """Return the number of tensors that were read or written since the last call."""
        pending, self._pending = self._pending, []
        finish(list(itertools.chain.from_iterable(pending)))
        return len(pending)

    def new_cpu_locked_tensor(self, numel: int, like: Tensor) -> Tensor:
        memory = aligned(numel * like.element_size())
        self.store.buffers[memory.data_ptr()] = memory
        return memory.view(like.dtype)

    def free_cpu_locked_tensor(self, values: Tensor) -> None:
        self.store.buffers.pop(values.data_ptr(), None)

    def is_pinned(self, values: Tensor) -> bool:
        address = values.data_ptr()
        return any(first <= address < first + len(memory) for first, memory in self.store.buffers.items())


@contextlib.contextmanager
def in_place_of_op(store: Store) -> Iterator[None]:
    """A context in which DeepSpeed makes the swapper of the optimizer with this store."""
    op = SimpleNamespace(aio_handle=lambda **_: Handle(store))
    modules: tuple[Any, ...] = (partitioned_optimizer_swapper, pipelined_optimizer_swapper)
    builders = [module.AsyncIOBuilder for module in modules]
    for module in modules:
        module.AsyncIOBuilder = lambda: SimpleNamespace(load=lambda: op)
    try:
        yield
    finally:
        for module, builder in zip(modules, builders, strict=True):
            module.AsyncIOBuilder = builder
