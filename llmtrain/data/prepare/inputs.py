"""Read input files, by path on this host or by URL in an object store.

A file in a store is read in ranges, the next one while the last is used, without a copy on this host.
"""

from __future__ import annotations

import io
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, cast

import numpy as np

from llmtrain.base.errors import DataError
from llmtrain.storage.addresses import is_url
from llmtrain.storage.object_store import Store, StoreError

AT_ONCE = 32
"""Concurrent requests to a store: each waits for a round trip and costs this host little."""
_BLOCK = 8 << 20
"""Bytes of a request: large enough that the transfer outweighs the round trip; a worker holds two in memory."""
_LEAST = 256 << 10
"""Bytes of a first request, doubled for each further one in a row, and of requests beyond the piece's end."""


def is_file(path: str) -> bool:
    """Return True if `path` is a file on this host or in a store. Raises StoreError."""
    if not is_url(path):
        return os.path.isfile(path)
    try:
        Store(path).stat()
    except FileNotFoundError:
        return False
    return True


def size(path: str) -> int:
    """Return the size of a file in bytes. Raises OSError."""
    return Store(path).stat().bytes if is_url(path) else os.path.getsize(path)


def read(path: str, start: int = 0, stop: int | None = None) -> bytes:
    """Return bytes [start, stop) of a file, fewer at its end. Raises OSError."""
    if is_url(path):
        stop = size(path) if stop is None else min(stop, size(path))
        return Store(path).read("", start, stop) if stop > start else b""
    with open(path, "rb") as stream:
        stream.seek(start)
        return stream.read(-1 if stop is None else stop - start)


def version(path: str) -> str:
    """Return "BYTES:VERSION" of a file in a store. Raises StoreError, FileNotFoundError."""
    found = Store(path).stat()
    return f"{found.bytes}:{found.version}"


def of_the_machine(error: Exception) -> bool:
    """Return True if reading failed because of the machine or the store, not of the file's contents."""
    return isinstance(error, StoreError) or (isinstance(error, OSError) and error.errno is not None)


def cannot_be_read(path: str, error: Exception) -> DataError:
    if not is_url(path):
        return DataError(f"{path}: cannot be read ({error}); check the file and its permissions")
    return DataError(
        f"{path}: cannot be read ({error}); check the URL, the store's credentials on this host and the network, and "
        "run the same command again: finished shards are kept"
    )


def mapped(path: str) -> np.ndarray:
    """Map a file's bytes into memory, uint8; a file in a store is first copied to an unnamed file. Raises OSError."""
    return StoredIds(path, np.dtype(np.uint8), 0, size(path))[:] if is_url(path) else np.memmap(path, np.uint8, "r")


class StoredIds:
    """An array of numbers in a file in a store. A requested range is first read into an unnamed file.

    The unnamed file holds the last range and what follows it, so that two requests for a range read it once.
    """

    _HELD = 512 << 20
    """Size in bytes above which the unnamed file is replaced by an empty one."""

    def __init__(self, url: str, dtype: np.dtype, begin: int, count: int) -> None:
        """`begin`: bytes before the first number."""
        self.dtype = dtype
        self._url, self._begin, self._count = url, begin, count
        self._file: Any = None
        self._first = self._last = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, wanted: slice) -> np.ndarray:
        """Raises DataError."""
        start, stop, _ = wanted.indices(self._count)
        width = self.dtype.itemsize
        if stop <= start:
            return np.empty(0, self.dtype)
        if self._file is None or not self._first <= start <= self._last or self._held > self._HELD:
            self._file, self._first, self._last = tempfile.TemporaryFile(), start, start  # noqa: SIM115
        try:
            for at in range(self._begin + self._last * width, self._begin + stop * width, _BLOCK):
                self._file.write(read(self._url, at, min(at + _BLOCK, self._begin + stop * width)))
        except (StoreError, FileNotFoundError) as error:
            self._file = None
            raise cannot_be_read(self._url, error) from None
        self._file.flush()
        self._last = max(self._last, stop)
        return np.memmap(self._file, self.dtype, "r", offset=(start - self._first) * width, shape=(stop - start,))

    @property
    def _held(self) -> int:
        return (self._last - self._first) * self.dtype.itemsize


def open_file(path: str, *, stop: int | None = None, seeking: bool = False) -> BinaryIO:
    """Open a file for reading. Reads raise OSError.

    Args:
        stop: for a URL: position after which little or nothing is read.
        seeking: for a URL: read only the requested parts, and nothing ahead.
    """
    if not is_url(path):
        return open(path, "rb")
    raw = _Ranges(path, stop, ahead=not seeking)
    return cast(BinaryIO, raw if seeking else io.BufferedReader(raw, _BLOCK))


def arrow_file(path: str, *, seeking: bool) -> Any:
    """Open a file for pyarrow, for `seeking` or for reading from the beginning. Reads raise OSError."""
    import pyarrow

    if is_url(path):
        return pyarrow.PythonFile(open_file(path, seeking=seeking), "r")
    return pyarrow.OSFile(path, "r") if seeking else pyarrow.memory_map(path)


class _Ranges(io.RawIOBase):
    """Reads byte ranges of one remote file; storage/object_store.py repeats interrupted requests."""

    def __init__(self, url: str, stop: int | None, *, ahead: bool) -> None:
        self._store = Store(url)
        try:
            self._size = self._store.stat().bytes
        except FileNotFoundError:
            raise StoreError("it is not there any more") from None
        self._stop = self._size if stop is None else min(stop, self._size)
        self._place = self._in_a_row = 0
        self._ahead = ThreadPoolExecutor(1) if ahead else None
        self._next: tuple[int, int, Future[bytes]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place, self._in_a_row = begin + offset, 0
        return self._place

    def readinto(self, buffer: Any) -> int:
        start, stop = self._place, self._end(self._place, len(buffer))
        if stop <= start:
            return 0
        waiting, self._next = self._next, None
        if waiting is not None and waiting[:2] == (start, stop):
            data = waiting[2].result()
        else:
            data = self._read(start, stop)
        buffer[: len(data)] = data
        self._place, self._in_a_row = stop, self._in_a_row + 1
        if self._ahead is not None and self._in_a_row > 1 and stop < self._stop:
            end = self._end(stop, len(buffer))
            self._next = stop, end, self._ahead.submit(self._read, stop, end)
        return len(data)

    def _end(self, start: int, count: int) -> int:
        """Return the end of a request. First requests are short, because the reader may want no more, and so are those
        beyond the piece's end."""
        if self._ahead is None:
            return min(start + count, self._size)
        if start >= self._stop:
            return min(start + min(count, _LEAST), self._size)
        return min(start + min(count, _LEAST << min(self._in_a_row, 10), _BLOCK), self._stop)

    def _read(self, start: int, stop: int) -> bytes:
        try:
            return self._store.read("", start, stop)
        except FileNotFoundError:
            raise StoreError("it is not there any more") from None

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.shutdown(wait=False, cancel_futures=True)
        super().close()
