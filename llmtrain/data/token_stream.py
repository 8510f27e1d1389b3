"""The tokens of one split of a prepared folder as a stream: shards are mapped into memory, reads cross their borders.

Each shard of rows has a file beside it: the rows' lengths in tokens, uint32 each, and then a bit for each token, eight
a byte, the first one highest: 1 if it is counted. Some kinds of row add an entry for each row (`RowKind.entry`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmtrain.base.errors import DataError
from llmtrain.data.manifest import Shard

if TYPE_CHECKING:
    from llmtrain.data.cache import CachedFolder


def rows_path(shard: Path) -> Path:
    return shard.with_suffix(".rows")


class _Piece(NamedTuple):
    """A range of tokens within one shard."""

    shard: int
    offset: int
    """Number of its first token in the shard."""
    size: int


class TokenStream:
    """The tokens of one split, shard after shard, mapped into memory or, without a copy here, read from the store."""

    def __init__(
        self, folder: Path, shards: tuple[Shard, ...], dtype: np.dtype, cached: CachedFolder | None = None
    ) -> None:
        """`cached`: the folder in a store whose copy is `folder`."""
        self.name = str(folder) if cached is None else cached.shown
        """Path or URL of the folder, for messages."""
        self._cached = cached
        self._shards = shards
        self._paths = [folder / shard.file for shard in shards]
        self._rows = [shard.documents for shard in shards if shard.rows]
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        self._maps: list[np.ndarray | None] = [None] * len(shards)
        self._fetched: dict[_Piece, bytes] = {}
        self._dtype = dtype
        self.tokens: int = self._starts[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length) as an array [length] of the shards' dtype, a view if one shard has all.

        Raises DataError: the store cannot be read.
        """
        parts = [self._read(piece) for piece in self._pieces(start, length)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self._dtype)

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Read the parts of spans (start, length) that are not on this host; `read` can use them until the next call.

        Raises DataError.
        """
        if self._cached is None:
            return
        unique = dict.fromkeys(piece for span in spans for piece in self._pieces(*span))
        pieces = [piece for piece in unique if self._map(piece.shard) is None]
        self._fetched = dict(zip(pieces, self._from_store(self._cached, pieces), strict=True))

    def _pieces(self, start: int, length: int) -> Iterator[_Piece]:
        assert start >= 0 and start + length <= self.tokens, (start, length, self.tokens)
        index = bisect_right(self._starts, start) - 1
        while length > 0:
            offset = start - self._starts[index]
            size = min(length, self._shards[index].tokens - offset)
            if size:
                yield _Piece(index, offset, size)
            start, length, index = start + size, length - size, index + 1

    def _read(self, piece: _Piece) -> np.ndarray:
        mapped = self._map(piece.shard)
        if mapped is not None:
            return mapped[piece.offset : piece.offset + piece.size]
        assert self._cached is not None
        content = self._fetched.get(piece)
        if content is None:
            [content] = self._from_store(self._cached, [piece])
        return np.frombuffer(content, self._dtype)

    def _from_store(self, cached: CachedFolder, pieces: list[_Piece]) -> list[bytes]:
        parts = []
        for piece in pieces:
            shard = self._shards[piece.shard]
            start = shard.begin + piece.offset * self._dtype.itemsize
            parts.append((shard.file, start, start + piece.size * self._dtype.itemsize))
        return cached.read(parts)

    def shard_of(self, token: int) -> str:
        return self._shards[bisect_right(self._starts, token) - 1].file

    def is_here(self, index: int) -> bool:
        return self._cached is None or self._paths[index].is_file()

    def counted(self, start: int, length: int) -> np.ndarray | None:
        """Return which of tokens [start, start + length) count, bool [length]; None for texts, where all count."""
        if not self._rows:
            return None
        parts = [np.empty(0, dtype=bool)]
        for index, offset, size in self._pieces(start, length):
            first = 4 * self._rows[index] + offset // 8
            last = 4 * self._rows[index] + (offset + size + 7) // 8
            bits = np.unpackbits(np.memmap(rows_path(self._paths[index]), np.uint8, "r")[first:last])
            parts.append(bits[offset % 8 : offset % 8 + size].astype(bool))
        return np.concatenate(parts)

    def row_lengths(self) -> np.ndarray:
        """Return the tokens of each row, int64 [rows]. Raises DataError if their sum is not the stream's length."""
        parts = [
            np.fromfile(rows_path(path), dtype="<u4", count=rows).astype(np.int64)
            for path, rows in zip(self._paths, self._rows, strict=True)
        ]
        for index, lengths in enumerate(parts):
            if lengths.sum() != self._starts[index + 1] - self._starts[index] or not lengths.all():
                raise DataError(
                    f"{rows_path(self._paths[index])}: its rows do not fit its shard: one of the files is damaged; "
                    "copy the folder again, or delete it and prepare it again"
                )
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def entries(self, dtype: np.dtype) -> np.ndarray:
        """Return the entry of each row, [rows]. `dtype`: `RowKind.entry`."""
        sizes = np.diff(self._starts)
        parts = [
            np.fromfile(rows_path(path), dtype=dtype, count=rows, offset=4 * rows + (int(tokens) + 7) // 8)
            for path, rows, tokens in zip(self._paths, self._rows, sizes, strict=True)
        ]
        return np.concatenate([np.empty(0, dtype), *parts])

    def _map(self, index: int) -> np.ndarray | None:
        """Return a shard's tokens, mapped into memory; None: the shard is not on this host."""
        mapped = self._maps[index]
        if mapped is None and self.is_here(index):
            shard = self._shards[index]
            mapped = np.memmap(self._paths[index], self._dtype, "r", offset=shard.begin, shape=(shard.tokens,))
            self._maps[index] = mapped
        return mapped
