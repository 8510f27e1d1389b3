"""A prepared folder as token streams: shards are mapped into memory, and reads cross their borders.

Beside each shard of conversations lies a file of rows: the rows' lengths in tokens, uint32 each, and then a bit for
each token, eight a byte, the first one highest: whether it is counted. Of unpaired answers and of choices more follows
for each row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtrain.base.errors import DataError
from llmtrain.data.manifest import NAME, SPLITS, Shard, Split, read_manifest

_CHUNK = 4 << 20
"""Bytes that a comparison with checksums reads at a time."""
JUDGED = np.dtype([("prompt", "<u8"), ("begin", "<u4"), ("desirable", "u1")])
"""Entry for a row of unpaired answers: hash of its prompt, place of its answer's first token, label of the answer."""
CHOICE = np.dtype([("first", "u1"), ("right", "u1"), ("characters", "<u4"), ("bytes", "<u4")])
"""Entry for a row of multiple choice: whether it begins a question, whether it is the answer, sizes of the choice."""


def entry_of(chat: dict[str, Any] | None) -> np.dtype | None:
    """Type of the entries at the end of a file of rows. `chat`: the manifest's."""
    chat = chat or {}
    return JUDGED if chat.get("unpaired") else CHOICE if chat.get("choices") else None


def rows_path(shard: Path) -> Path:
    """Name of the file of rows beside a shard of conversations."""
    return shard.with_suffix(".rows")


class TokenStream:
    """The tokens of one split, shard after shard. Reading maps pages in; nothing is held in memory."""

    def __init__(self, folder: Path, shards: tuple[Shard, ...], dtype: np.dtype) -> None:
        self.folder = folder
        self._shards = shards
        self._paths = [folder / shard.file for shard in shards]
        self._rows = [shard.documents for shard in shards if shard.rows]
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        self._maps: list[np.ndarray | None] = [None] * len(shards)
        self._dtype = dtype
        self.tokens: int = self._starts[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as an array [length] of the shards' dtype (a view if one shard holds them)."""
        assert start >= 0 and start + length <= self.tokens, (start, length, self.tokens)
        parts: list[np.ndarray] = []
        index = bisect_right(self._starts, start) - 1
        while length > 0:
            offset = start - self._starts[index]
            part = self._map(index)[offset : offset + length]
            parts.append(part)
            start += len(part)
            length -= len(part)
            index += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self._dtype)

    def counted(self, start: int, length: int) -> np.ndarray | None:
        """Counted bits of tokens [start, start + length), bool [length]; None for texts, where all are counted."""
        if not self._rows:
            return None
        parts = [np.empty(0, dtype=bool)]
        while length > 0:
            index = bisect_right(self._starts, start) - 1
            offset = start - self._starts[index]
            size = min(length, self._starts[index + 1] - start)
            first = 4 * self._rows[index] + offset // 8
            last = 4 * self._rows[index] + (offset + size + 7) // 8
            bits = np.unpackbits(np.memmap(rows_path(self._paths[index]), np.uint8, "r")[first:last])
            parts.append(bits[offset % 8 : offset % 8 + size].astype(bool))
            start, length = start + size, length - size
        return np.concatenate(parts)

    def row_lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]. Of conversations only. Raises DataError when they are not the stream's."""
        parts = [
            np.fromfile(rows_path(path), dtype="<u4", count=rows).astype(np.int64)
            for path, rows in zip(self._paths, self._rows, strict=True)
        ]
        for index, lengths in enumerate(parts):
            if lengths.sum() != self._starts[index + 1] - self._starts[index] or not lengths.all():
                raise DataError(
                    f"{rows_path(self._paths[index])}: its rows are not those of the shard beside it: one is damaged; "
                    "copy the folder again, or delete it and prepare it again"
                )
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def judged(self) -> np.ndarray:
        """JUDGED [rows], of unpaired answers only."""
        return self._entries(JUDGED)

    def choices(self) -> np.ndarray:
        """CHOICE [rows], of multiple choice only."""
        return self._entries(CHOICE)

    def _entries(self, dtype: np.dtype) -> np.ndarray:
        sizes = np.diff(self._starts)
        parts = [
            np.fromfile(rows_path(path), dtype=dtype, count=rows, offset=4 * rows + (int(tokens) + 7) // 8)
            for path, rows, tokens in zip(self._paths, self._rows, sizes, strict=True)
        ]
        return np.concatenate([np.empty(0, dtype), *parts])

    def _map(self, index: int) -> np.ndarray:
        mapped = self._maps[index]
        if mapped is None:
            shard = self._shards[index]
            mapped = np.memmap(self._paths[index], self._dtype, "r", offset=shard.begin, shape=(shard.tokens,))
            self._maps[index] = mapped
        return mapped


@dataclass(frozen=True)
class FileSum:
    """A file of a prepared folder, and what its manifest says of the content."""

    path: Path
    xxh3: str
    """xxh3 of the bytes, of 64 or 128 bits; empty: the manifest tells none, and none is compared."""
    dtype: np.dtype | None = None
    """Type of the token ids in a shard; None: the file is no shard."""
    vocab_size: int = 0
    begin: int = 0
    """Bytes before what is compared."""
    length: int | None = None
    """Bytes that are compared; None: the whole file."""

    @property
    def bytes(self) -> int:
        """Bytes that `compare` reads; 0 where there is no file."""
        whole = self.path.stat().st_size if self.path.is_file() else 0
        return whole if self.length is None else self.length

    def compare(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Read the file and compare. `go_on`: asked every 4 MiB; where it says no, nothing is known.

        Raises DataError: the content is another, or an id lies outside the vocabulary.
        """
        folder = self.path.parent.parent if self.path.parent.name == "tokenizer" else self.path.parent
        content, largest = xxhash.xxh3_64() if len(self.xxh3) == 16 else xxhash.xxh3_128(), -1
        try:
            left = self.bytes
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(self.begin)
                while chunk := stream.read(min(left, _CHUNK)):
                    if not go_on():
                        return
                    left -= len(chunk)
                    content.update(chunk)
                    if self.dtype is not None and len(chunk) % self.dtype.itemsize == 0:
                        largest = max(largest, int(np.frombuffer(chunk, self.dtype).max()))
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}); copy the folder again") from error
        if self.xxh3 and content.hexdigest() != self.xxh3:
            raise DataError(
                f"{self.path}: its checksum is not that of {folder / NAME}: the file was changed or is damaged; "
                "copy it again, or delete the folder and prepare it again"
            )
        if self.dtype is not None and largest >= self.vocab_size:
            raise DataError(
                f"{self.path}: holds the id {largest}, outside the vocabulary [0, {self.vocab_size}); "
                "delete the folder and prepare it again"
            )


class PreparedSet:
    """A complete folder of `llmtrain prepare`. Opening it checks that every shard is there with its full size."""

    def __init__(self, folder: str | Path) -> None:
        """Raises DataError when the folder is not complete."""
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.tokenizer_dir = self.folder / "tokenizer"
        self.dtype = np.dtype("<u2" if self.manifest.dtype == "uint16" else "<u4")
        for split in SPLITS:
            for shard in self.manifest.shards[split]:
                self._check_size(shard)

    def split(self, name: Split) -> TokenStream:
        return TokenStream(self.folder, self.manifest.shards[name], self.dtype)

    def sums(self) -> list[FileSum]:
        """Return each file with its checksum from the manifest: the tokenizer, shards, files of rows."""
        found = [FileSum(self.tokenizer_dir / "tokenizer.json", self.manifest.tokenizer_fingerprint)]
        for shard in (shard for split in SPLITS for shard in self.manifest.shards[split]):
            path = self.folder / shard.file
            length = shard.tokens * self.dtype.itemsize
            found.append(FileSum(path, shard.xxh3, self.dtype, self.manifest.vocab_size, shard.begin, length))
            found += [FileSum(rows_path(path), shard.rows)] if shard.rows else []
        return found

    def verify(self) -> None:
        """Read every file and compare its checksum, and a shard's largest id, with the manifest. Raises DataError."""
        for file in self.sums():
            file.compare()

    def _check_size(self, shard: Shard) -> None:
        path = self.folder / shard.file
        end = shard.begin + shard.tokens * self.dtype.itemsize
        wanted = {path: end if shard.bytes is None else max(end, shard.bytes)}
        if shard.rows:
            entry = entry_of(self.manifest.chat)
            each = 4 + (0 if entry is None else entry.itemsize)
            wanted[rows_path(path)] = each * shard.documents + (shard.tokens + 7) // 8
        for path, expected in wanted.items():
            found = path.stat().st_size if path.is_file() else None
            if found != expected:
                state = "is missing" if found is None else f"has {found} bytes, the manifest says {expected}"
                raise DataError(f"{path}: {state}; copy the folder again, or delete it and prepare it again")
