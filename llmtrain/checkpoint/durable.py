"""Files that survive a power cut. No torch import."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

_PAGE = 4096
_PIECE = 16 << 20  # bytes handed to the kernel at once
_SYNCED = 256 << 20  # bytes between two fdatasync: a single fsync of many GB would look like a disk that hangs
_UNDER_WAY = 2  # pieces queued for the disk: one is written, and the next one is ready


class DurableFile:
    """A new file, written from front to end. `close` makes it durable and returns its size and xxh3-64 in hexadecimal.

    The disk writes while the next piece is hashed. Data goes by O_DIRECT where the file system has it (a checkpoint
    would push everything else out of the page cache), from the caller's memory where that is aligned to 4096 bytes,
    else through a buffer. On an error or an early exit the file is removed. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._digest = xxhash.xxh3_64()
        self._direct = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._handle = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            self._handle = os.open(path, flags, 0o644)
        self._written = self._synced = 0
        self._buffers = [mmap.mmap(-1, _PIECE) for _ in range(_UNDER_WAY + 1)]
        self._filled = 0  # bytes in buffer 0
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="durable-file")
        self._pending: deque[Future[None]] = deque()

    def write(self, data: memoryview, *, stays: bool = False) -> None:
        """Append bytes. The caller may change their memory after the return, unless it has said that the memory `stays`
        as it is until `close`: then the disk may still be reading from it."""
        data = data.cast("B")
        done, lent = 0, False
        while done < data.nbytes:
            direct = self._filled == 0 and data.nbytes - done >= _PAGE
            if direct and np.frombuffer(data[done:], dtype=np.uint8).ctypes.data % _PAGE == 0:  # aligned
                count = min(_PIECE, (data.nbytes - done) // _PAGE * _PAGE)
                self._queue_write(data[done : done + count])
                lent = True  # the disk reads the caller's memory
            else:
                count = min(_PIECE - self._filled, data.nbytes - done)
                self._buffers[0][self._filled : self._filled + count] = data[done : done + count]
                self._filled += count
                if self._filled == _PIECE:
                    self._queue_write(memoryview(self._buffers[0]))
                    self._buffers.append(self._buffers.pop(0))
                    self._filled = 0
            done += count
        self.bytes += data.nbytes
        if lent and not stays:
            self._wait_for_writes()

    def close(self) -> tuple[int, str]:
        if self._filled:
            padded = -(-self._filled // _PAGE) * _PAGE
            self._digest.update(memoryview(self._buffers[0])[: self._filled])
            self._wait_for_writes()
            self._write_piece(memoryview(self._buffers[0])[:padded])
        self._wait_for_writes()
        os.ftruncate(self._handle, self.bytes)
        os.fsync(self._handle)
        self._close_and_stop()
        return self.bytes, self._digest.hexdigest()

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle < 0:
            return
        with contextlib.suppress(OSError):
            self._wait_for_writes()
        self._close_and_stop()
        self.path.unlink(missing_ok=True)

    def _close_and_stop(self) -> None:
        self._disk.shutdown()
        handle, self._handle = self._handle, -1
        os.close(handle)

    def _queue_write(self, piece: memoryview) -> None:
        self._wait_for_writes(_UNDER_WAY - 1)
        self._pending.append(self._disk.submit(self._write_piece, piece))
        self._digest.update(piece)

    def _wait_for_writes(self, left: int = 0) -> None:
        """Wait until at most `left` pieces are queued. Raises OSError if a write has failed."""
        while len(self._pending) > left:
            self._pending.popleft().result()

    def _write_piece(self, piece: memoryview) -> None:
        done = 0
        while done < piece.nbytes:
            try:
                done += os.pwrite(self._handle, piece[done:], self._written + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # The file system accepts O_DIRECT only at open, or a short write left an unaligned offset.
                self._direct = False
                fcntl.fcntl(self._handle, fcntl.F_SETFL, fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._written += piece.nbytes
        if not self._direct and self._written - self._synced >= _SYNCED:
            os.fdatasync(self._handle)
            self._synced = self._written


def write_durably(path: Path, text: str) -> tuple[int, str]:
    """Write and fsync a small text file; returns (bytes, xxh3-64). Raises OSError."""
    data = text.encode()
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data), xxhash.xxh3_64_hexdigest(data)


def sync(path: Path) -> None:
    """fsync a file or a folder: a rename alone does not survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(folder: Path) -> None:
    """Rename a folder, then delete it, so that nobody takes a half-deleted folder for a complete one."""
    doomed = folder if folder.name.endswith(".trash") else folder.with_name(folder.name + ".trash")
    if doomed != folder:
        with contextlib.suppress(FileNotFoundError):
            if doomed.exists():
                shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
