"""A prepared folder on this host or in a store: its files, their checksums, and the kind of its rows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from llmtrain.base.errors import DataError
from llmtrain.data.kinds import RowKind, class_of, kind_of
from llmtrain.data.manifest import NAME, SPLITS, URL, Shard, Split, origins_path, read_manifest
from llmtrain.data.token_stream import TokenStream, rows_path
from llmtrain.storage.addresses import is_url

if TYPE_CHECKING:
    from llmtrain.data.cache import CachedFolder
    from llmtrain.data.origins import Origins

_CHUNK = 4 << 20
"""Bytes that a checksum comparison reads at a time."""


@dataclass(frozen=True)
class FileSum:
    """A file of a prepared folder with its checksum in the manifest."""

    path: Path
    xxh3: str
    """xxh3 of the bytes, 64 or 128 bits; empty: the manifest has no checksum to compare with."""
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
        """False for a shard of a folder in a store that is not on this host."""
        return self.cached is None or self.path.is_file()

    @property
    def bytes(self) -> int:
        """Bytes that `compare` reads; 0 without a file."""
        whole = self.path.stat().st_size if self.path.is_file() else 0
        return whole if self.length is None else self.length

    def compare(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Read the file and compare its checksum. `go_on` is called every 4 MiB, and False ends the comparison early.

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
    """Return the remedy for a changed file. `copy`: the remedy if the file is in the prepared folder itself."""
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
    """A complete folder made by `llmtrain prepare`, on this host or in a store. Opening it checks the shards' sizes."""

    def __init__(self, folder: str | Path, cache: str | None = None) -> None:
        """`folder`: a path, which may be in a cache, or a URL. `cache`: data.cache.

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

    @cached_property
    def kind(self) -> RowKind:
        """The kind of row in this folder. Raises DataError: no class of this process has the folder's format."""
        return kind_of(self.manifest, self.name)

    def split(self, name: Split) -> TokenStream:
        return TokenStream(self.folder, self.manifest.shards[name], self.dtype, self._cached)

    def fetch(self, names: Collection[str]) -> None:
        """Download small files of a folder in a store. Raises DataError."""
        if self._cached is not None:
            self._cached.fetch(names)

    def origins(self, split: Split) -> Origins:
        """Open the documents' origins. Raises DataError: the folder was prepared without them."""
        from llmtrain.data.origins import Origins  # no run reads them

        shards = self.manifest.shards[split]
        self.fetch([origins_path(Path(shard.file)).name for shard in shards])
        return Origins(self.folder, shards)

    def shards_in_store(self, split: Split) -> list[tuple[str, str]]:
        """Return (folder's URL, file) of each shard; empty if the folder is not in a store."""
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
        """Return the files with checksums. `origins`: also the documents' origins, which no run reads."""
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
        if shard.rows and (kind := class_of(self.manifest)) is not None:
            each = 4 + (0 if kind.entry is None else kind.entry.itemsize)
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
