"""A prepared folder as token streams: shards are mapped into memory, and reads cross their borders.

Each shard of conversations has a file of rows: the rows' lengths in tokens, uint32 each, and then a bit for each token,
eight a byte, the first one highest: 1 if it is counted. Unpaired answers and choices add an entry for each row.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from llmtrain.base.errors import DataError
from llmtrain.data.manifest import NAME, SPLITS, URL, ChatFigures, Shard, Split, origins_path, read_manifest
from llmtrain.storage.addresses import is_url

if TYPE_CHECKING:
    from llmtrain.data.cache import CachedFolder
    from llmtrain.data.origins import Origins

_CHUNK = 4 << 20
"""Bytes that a checksum comparison reads at a time."""
JUDGED = np.dtype([("prompt", "<u8"), ("begin", "<u4"), ("desirable", "u1")])
"""Entry for an unpaired answer's row: hash of its prompt, place of its first token, label."""
CHOICE = np.dtype([("first", "u1"), ("right", "u1"), ("characters", "<u4"), ("bytes", "<u4")])
"""Entry for a row of multiple choice: whether it begins a question, whether it is the answer, sizes of the choice."""


def entry_of(chat: ChatFigures | None) -> np.dtype | None:
    """Type of the entries at the end of a row file. `chat`: the manifest's section."""
    if chat is None:
        return None
    return JUDGED if chat.unpaired else CHOICE if chat.choices else None


def rows_path(shard: Path) -> Path:
    return shard.with_suffix(".rows")


class _Piece(NamedTuple):
    """Tokens of one shard."""

    shard: int
    offset: int
    """Place of the first one in the shard."""
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
        """Tokens [start, start + length) as an array [length] of the shards' dtype (a view if one shard holds them).

        Raises DataError: the store does not give them.
        """
        parts = [self._read(piece) for piece in self._pieces(start, length)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self._dtype)

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Read missing parts of spans, (start, length) each, for `read` until the next call. Raises DataError."""
        if self._cached is None:
            return
        pieces = [piece for piece in dict.fromkeys(piece for span in spans for piece in self._pieces(*span))
                  if self._map(piece.shard) is None]  # fmt: skip
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
        """Counted bits of tokens [start, start + length), bool [length]; None for texts, where all are counted."""
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
        """Tokens of each row, int64 [rows], for conversations only. Raises DataError if they do not fit the stream."""
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

    def judged(self) -> np.ndarray:
        """JUDGED [rows], for unpaired answers only."""
        return self._entries(JUDGED)

    def choices(self) -> np.ndarray:
        """CHOICE [rows], for multiple choice only."""
        return self._entries(CHOICE)

    def _entries(self, dtype: np.dtype) -> np.ndarray:
        sizes = np.diff(self._starts)
        parts = [
            np.fromfile(rows_path(path), dtype=dtype, count=rows, offset=4 * rows + (int(tokens) + 7) // 8)
            for path, rows, tokens in zip(self._paths, self._rows, sizes, strict=True)
        ]
        return np.concatenate([np.empty(0, dtype), *parts])

    def _map(self, index: int) -> np.ndarray | None:
        """A shard's tokens; None: it is not on this host."""
        mapped = self._maps[index]
        if mapped is None and self.is_here(index):
            shard = self._shards[index]
            mapped = np.memmap(self._paths[index], self._dtype, "r", offset=shard.begin, shape=(shard.tokens,))
            self._maps[index] = mapped
        return mapped


@dataclass(frozen=True)
class FileSum:
    """A file of a prepared folder with its checksum in the manifest."""

    path: Path
    xxh3: str
    """xxh3 of the bytes, of 64 or 128 bits; empty: the manifest has none, and none is compared."""
    dtype: np.dtype | None = None
    """Type of the token ids in a shard; None: the file is no shard."""
    vocab_size: int = 0
    begin: int = 0
    """Bytes before the compared part."""
    length: int | None = None
    """Bytes of the compared part; None: the complete file."""
    cached: CachedFolder | None = None
    """The folder in a store from which a shard that is not on this host is read."""

    @property
    def is_here(self) -> bool:
        """True if the file is on this host, or should be."""
        return self.cached is None or self.path.is_file()

    @property
    def bytes(self) -> int:
        """Bytes that `compare` reads; 0 without a file."""
        whole = self.path.stat().st_size if self.path.is_file() else 0
        return whole if self.length is None else self.length

    def compare(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Read the file and compare its checksum. `go_on`: called every 4 MiB; False ends the reading without a result.

        Raises DataError: the content is different, or an id is outside the vocabulary.
        """
        folder = self.path.parent.parent if self.path.parent.name == "tokenizer" else self.path.parent
        place = self.path if self.is_here or self.cached is None else f"{self.cached.shown}/{self.path.name}"
        content, largest = xxhash.xxh3_64() if len(self.xxh3) == 16 else xxhash.xxh3_128(), -1
        try:
            for chunk in _chunks(self):
                if not go_on():
                    return
                content.update(chunk)
                if self.dtype is not None and len(chunk) % self.dtype.itemsize == 0:
                    largest = max(largest, int(np.frombuffer(chunk, self.dtype).max()))
        except OSError as error:
            raise DataError(f"{place}: cannot be read ({error.strerror}); copy the folder again") from error
        if self.xxh3 and content.hexdigest() != self.xxh3:
            raise DataError(
                f"{place}: its checksum is not that of {folder / NAME}: the file was changed or is damaged; "
                + _put_back(self.path, "copy it again")
            )
        if self.dtype is not None and largest >= self.vocab_size:
            raise DataError(
                f"{place}: holds the id {largest}, outside the vocabulary [0, {self.vocab_size}); "
                "delete the folder and prepare it again"
            )


def _put_back(path: Path, copy: str) -> str:
    """Remedy for a changed file. `copy`: for a file in the folder itself."""
    if path.is_symlink():
        copy = f"it is used in place: put {os.readlink(path)} back as it was"
    return f"{copy}, or delete the folder and prepare it again"


def _chunks(file: FileSum) -> Iterator[bytes]:
    left = file.bytes
    if not file.is_here and file.cached is not None:
        for start in range(file.begin, file.begin + left, _CHUNK):
            [chunk] = file.cached.read([(file.path.name, start, min(start + _CHUNK, file.begin + left))])
            yield chunk
        return
    with file.path.open("rb", buffering=0) as stream:
        stream.seek(file.begin)
        while chunk := stream.read(min(left, _CHUNK)):
            left -= len(chunk)
            yield chunk


class PreparedSet:
    """A complete folder of `llmtrain prepare`, on this host or in a store. Opening it checks the shards' sizes."""

    def __init__(self, folder: str | Path, cache: str | None = None) -> None:
        """`folder`: a path, also in a cache, or a URL. `cache`: data.cache.

        Raises DataError when the folder is not complete, or cannot be read.
        """
        self.name = str(folder)
        """Path or URL for messages."""
        self._cached = None
        if is_url(self.name) or (Path(folder) / URL).is_file():
            from llmtrain.data.cache import copied, opened, root_of  # most sets are in no store

            self._cached = opened(self.name, root_of(cache)) if is_url(self.name) else copied(Path(folder))
        self.name = self.name if self._cached is None else self._cached.shown
        self.folder = Path(folder) if self._cached is None else self._cached.path
        """Path on this host."""
        self.manifest = read_manifest(self.folder) if self._cached is None else self._cached.manifest
        self.tokenizer_dir = self.folder / "tokenizer"
        self.dtype = np.dtype("<u2" if self.manifest.dtype == "uint16" else "<u4")
        for split in SPLITS:
            for shard in self.manifest.shards[split]:
                self._check_size(shard)

    @property
    def in_store(self) -> bool:
        return self._cached is not None

    def split(self, name: Split) -> TokenStream:
        return TokenStream(self.folder, self.manifest.shards[name], self.dtype, self._cached)

    def fetch(self, names: Collection[str]) -> None:
        """Download small files that the store has. Raises DataError."""
        if self._cached is not None:
            self._cached.fetch(names)

    def origins(self, split: Split) -> Origins:
        """Raises DataError: the folder was prepared without origins."""
        from llmtrain.data.origins import Origins  # no run reads them

        shards = self.manifest.shards[split]
        self.fetch([origins_path(Path(shard.file)).name for shard in shards])
        return Origins(self.folder, shards)

    def shards_in_store(self, split: Split) -> list[tuple[str, str]]:
        """(folder's URL, file) of each shard of a folder in a store."""
        return [] if self._cached is None else [(self._cached.url, shard.file) for shard in self.manifest.shards[split]]

    def bytes_of(self, file: str) -> int:
        assert self._cached is not None
        return self._cached.size(file) or 0

    def fetch_shard(self, file: str) -> int:
        """Download a shard; returns its bytes. Raises DataError, and OSError: it cannot be written."""
        assert self._cached is not None
        shard = next(shard for split in SPLITS for shard in self.manifest.shards[split] if shard.file == file)

        def whole(path: Path) -> bool:
            if path.stat().st_size != self.bytes_of(file):
                return False
            with contextlib.suppress(DataError):
                self.sum_of(shard, path).compare()
                return True
            return False

        self._cached.get(file, whole)
        return self.bytes_of(file)

    def sums(self, *, origins: bool = False) -> list[FileSum]:
        """With `origins` also the documents' origins, which no run reads."""
        found = [FileSum(self.tokenizer_dir / "tokenizer.json", self.manifest.tokenizer_fingerprint)]
        for shard in (shard for split in SPLITS for shard in self.manifest.shards[split]):
            path = self.folder / shard.file
            found.append(self.sum_of(shard, path))
            found += [FileSum(rows_path(path), shard.rows)] if shard.rows else []
            if origins and shard.origins:
                self.fetch([origins_path(path).name])
                found.append(FileSum(origins_path(path), shard.origins))
        return found

    def sum_of(self, shard: Shard, path: Path) -> FileSum:
        length = shard.tokens * self.dtype.itemsize
        return FileSum(path, shard.xxh3, self.dtype, self.manifest.vocab_size, shard.begin, length, self._cached)

    def verify(self) -> None:
        """Compare the checksums of all files, and the shards' largest ids, with the manifest. Raises DataError."""
        for file in self.sums():
            file.compare()

    def _check_size(self, shard: Shard) -> None:
        end = shard.begin + shard.tokens * self.dtype.itemsize
        wanted = {shard.file: end if shard.bytes is None else max(end, shard.bytes)}
        if shard.rows:
            entry = entry_of(self.manifest.chat)
            each = 4 + (0 if entry is None else entry.itemsize)
            wanted[rows_path(Path(shard.file)).name] = each * shard.documents + (shard.tokens + 7) // 8
        for name, expected in wanted.items():
            found = self._size(name)
            if found != expected:
                state = "is missing" if found is None else f"has {found} bytes, the manifest says {expected}"
                raise DataError(
                    f"{self.name}/{name}: {state}; {_put_back(self.folder / name, 'copy the folder again')}"
                )

    def _size(self, name: str) -> int | None:
        if self._cached is not None:
            return self._cached.size(name)
        path = self.folder / name
        return path.stat().st_size if path.is_file() else None
