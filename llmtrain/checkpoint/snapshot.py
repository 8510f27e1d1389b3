"""Copies a rank's optimizer state into host memory while the next step computes, for the writer process."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import signal
import threading
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from llmtrain.base import log
from llmtrain.base.child import Child, of_module
from llmtrain.checkpoint.durable import DurableFile
from llmtrain.checkpoint.format import Piece, keys
from llmtrain.engine.api import StateTensor
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.checksum import checksum_part
from llmtrain.storage.pieces import byte_view
from llmtrain.storage.tensorfile import ITEM_BYTES, header_bytes

_GROUP = Path("/sys/fs/cgroup")


def memory_available() -> int:
    """Return the bytes of memory that this process may still allocate, by its host and its container (cgroup 2)."""
    free = psutil.virtual_memory().available
    try:
        limit = int((_GROUP / "memory.max").read_text())  # "max" is no number: no limit
        used = int((_GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(stat["file"]) - int(stat["shmem"]))  # the page cache counts as free
    except (OSError, ValueError, KeyError):
        return free


def boot_id() -> str:
    """Return an id that all processes on this host share, and no process on another host has."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PAGE = 4096
_CHUNK = 4 << 20  # elements that a synchronous save holds in host memory
_RANK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class RankFile:
    """Layout of a rank's file: a safetensors header, then in order the part of each piece that this rank owns."""

    def __init__(self, pieces: Sequence[StateTensor]) -> None:
        self.pieces = _entries(pieces)
        """The pieces of the file, whose checksums are not yet known."""
        dtypes = [_DTYPES[piece.dtype] for piece in pieces]
        names = keys(self.pieces)
        described: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, dtype, piece in zip(names, dtypes, self.pieces, strict=True):
            described[name] = (dtype, (piece.region.numel,))
        self.header = header_bytes(described, {}, _PAGE)
        self.layout: list[tuple[int, str, Piece]] = []
        """(first byte in the file, dtype, piece)."""
        end = len(self.header)
        for dtype, piece in zip(dtypes, self.pieces, strict=True):
            self.layout.append((end, dtype, piece))
            end += piece.region.numel * ITEM_BYTES[dtype]
        self.bytes = end

    def holds(self, pieces: Sequence[StateTensor]) -> bool:
        return _entries(pieces) == self.pieces


def written(pieces: Iterable[StateTensor], elsewhere: Container[str]) -> list[StateTensor]:
    """Return the pieces that this rank writes, in the order of its file: largest dtype first, so that each is aligned.
    `elsewhere`: parameters that the checkpoint does not hold."""
    owned = [piece for piece in pieces if piece.own.stop > piece.own.start]
    saved = [piece for piece in owned if piece.kind != PARAM or piece.name not in elsewhere]
    return sorted(saved, key=lambda piece: -piece.dtype.itemsize)


def _entries(pieces: Sequence[StateTensor]) -> list[Piece]:
    return [Piece(piece.kind, piece.name, piece.own_region, 0) for piece in pieces]


def write_piece(file: DurableFile, piece: StateTensor) -> int:
    """Append the part of a piece that this rank owns, a chunk at a time. Returns its checksum."""
    region, total = piece.own_region, 0
    with piece.open() as view:
        values = view[piece.own]
        for low in range(0, values.numel(), _CHUNK):
            chunk = values[low : low + _CHUNK].detach().cpu().contiguous()
            total += checksum_part(chunk, region.part(low, low + chunk.numel()))
            file.write(byte_view(chunk))
    return total % 2**64


class HostImage:
    """Shared memory for a rank's file, page-locked if values come from a GPU. Raises OSError."""

    def __init__(self, plan: RankFile, *, cuda: bool) -> None:
        self.bytes = plan.bytes
        self._size = -(-plan.bytes // _PAGE) * _PAGE
        self.handle = os.memfd_create("llmtrain-checkpoint")  # freed if the process is killed
        try:
            os.posix_fallocate(self.handle, 0, self._size)  # fails now instead of with a signal during a copy
            self._memory = mmap.mmap(self.handle, self._size)
        except BaseException:
            os.close(self.handle)
            raise
        self._memory[: len(plan.header)] = plan.header
        image = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._address = image.data_ptr()
        self._locked = cuda and lock_pages(self._address, self._size)
        if cuda and not self._locked:
            log.warn("checkpoints: the host memory for the copy could not be page-locked, so copying holds up training")
        ends = [offset + piece.region.numel * ITEM_BYTES[dtype] for offset, dtype, piece in plan.layout]
        self.slots = [
            [view.view(_TORCH_DTYPES[dtype]) for view in between_locks(image, offset, end)]
            for (offset, dtype, _), end in zip(plan.layout, ends, strict=True)
        ]
        """For each piece, its place in the image, as views to which a GPU can copy."""

    def close(self) -> None:
        if self._locked:
            unlock_pages(self._address, self._size)
        os.close(self.handle)


LOCKED_AT_ONCE = 2**28
"""Bytes to lock at once: meanwhile another thread's kernels wait, for seconds if the whole image is locked at once."""


def lock_pages(address: int, size: int) -> bool:
    """Page-lock host memory for copies from the GPU. Returns False if CUDA refuses; the memory can still be used."""
    runtime = torch.cuda.cudart()
    for low in range(0, size, LOCKED_AT_ONCE):
        if int(runtime.cudaHostRegister(address + low, min(LOCKED_AT_ONCE, size - low), 0)) != 0:
            unlock_pages(address, low)
            break
    else:
        return True
    # The CUDA runtime keeps the error, and torch would raise it after its next kernel. torch has no call to clear it.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}").cudaGetLastError()
    return False


def unlock_pages(address: int, size: int) -> None:
    for low in range(0, size, LOCKED_AT_ONCE):
        torch.cuda.cudart().cudaHostUnregister(address + low)


def between_locks(memory: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return views of bytes [start, stop) of locked memory, each within one registration: CUDA refuses a copy across
    two registrations as an invalid argument, even if they are neighbours."""
    cuts = range((start // LOCKED_AT_ONCE + 1) * LOCKED_AT_ONCE, stop, LOCKED_AT_ONCE)
    return [memory[low:high] for low, high in itertools.pairwise((start, *cuts, stop))]


_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


class Snapshot:
    """Copies the optimizer's state into an image: from a GPU on a separate stream, from host memory in a thread.

    The optimizer must not write before `wait_before_update` has returned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: Any = None
        self._waiting: tuple[Any, Any] | None = None
        """CUDA events before and after the GPU's wait for the copy."""
        self._thread: threading.Thread | None = None
        self._host_done = threading.Event()
        self.error: BaseException | None = None

    def start(self, pieces: Sequence[StateTensor], slots: Sequence[Sequence[Tensor]], then: Any) -> None:
        """Start to copy. Another thread calls `then()` after the copy, if there is no `error`. `slots`: for each piece
        its place, as views.

        Raises RuntimeError: when the device refuses a copy; none is then under way.
        """
        if self._thread is not None:
            self._thread.join()  # left by a save that failed early, whose errors are not this save's
        self.error, self._copied, self._waiting = None, None, None
        host = []
        try:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())
            for piece, slot in zip(pieces, slots, strict=True):
                if piece.device.type == "cpu":
                    host.append((piece, slot))
                else:
                    self._copy_on_device(piece, slot)
        except RuntimeError:
            if self._stream is not None:
                with contextlib.suppress(RuntimeError):
                    self._stream.synchronize()
            raise
        self._copied = self._stream.record_event() if self._stream is not None else None
        self._host_done.clear()
        self._thread = threading.Thread(target=self._finish, args=(host, self._copied, then), name="checkpoint-copy")
        self._thread.start()

    def _copy_on_device(self, piece: StateTensor, slot: Sequence[Tensor]) -> None:
        with piece.open() as values:
            if piece.write is not None and self._stream is not None:  # `open` has just computed the values
                self._stream.wait_stream(torch.cuda.current_stream())
                values.record_stream(self._stream)
            with torch.cuda.stream(self._stream):
                _copy(values[piece.own], slot)

    def wait_before_update(self) -> None:
        """Delay the optimizer until the old values are copied: those on the host by the host, those on a GPU by the
        GPU."""
        if self._thread is None:
            return
        self._host_done.wait()
        if self._copied is not None:
            stream = torch.cuda.current_stream()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(stream)
            stream.wait_event(self._copied)
            ended.record(stream)
            self._copied, self._waiting = None, (began, ended)

    def device_wait_s(self) -> float:
        """Return the seconds that the GPU waited before the update, unseen by the host. Call it after the copy."""
        if self._waiting is None:
            return 0.0
        began, ended = self._waiting
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    def _finish(self, host: list[tuple[StateTensor, Sequence[Tensor]]], copied: Any, then: Any) -> None:
        try:
            if copied is not None:
                torch.cuda.set_device(self._device)  # a new thread would make a context of 0.5 GB on GPU 0
            for piece, slot in host:
                with piece.open() as values:
                    _copy(values[piece.own], slot)
            self._host_done.set()
            if copied is not None:
                copied.synchronize()
            then()
        except BaseException as error:
            self.error = error
        finally:
            self._host_done.set()


def _copy(values: Tensor, slot: Sequence[Tensor]) -> None:
    for part, place in zip(values.split([len(view) for view in slot]), slot, strict=True):
        place.copy_(part, non_blocking=True)


class WriterDied(Exception):
    """The writer process ended before it answered."""


class WriterProcess(Child):
    """Runs checkpoint/writer.py as a child process that shares an image. Raises OSError."""

    def __init__(self, image: HostImage, table: dict[str, Any]) -> None:
        words = of_module("llmtrain.checkpoint.writer", str(image.handle), str(image.bytes), str(os.getpid()))
        # Signals to a process group or tree are for the rank, which needs the writer for its last checkpoint.
        # Signals that are blocked here stay blocked in the child, from its first instruction on.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _RANK_SIGNALS)
        try:
            super().__init__(words, pass_fds=[image.handle])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._answers: list[dict[str, Any]] = []
        self.send(table)

    def answer(self) -> dict[str, Any] | None:
        """Return the writer's next answer, or None if there is none yet. Raises WriterDied."""
        self._answers += self.received()
        if self._answers:
            return self._answers.pop(0)
        if self.is_closed:
            code = self._process.wait()
            raise WriterDied(f"the checkpoint writer (process {self.pid}) ended with {code}")
        return None
