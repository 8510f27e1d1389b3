"""Origin of each document of a prepared folder, its source file and record, in a file next to the shard.

`train-00000.origins.parquet` has a row for each document (or row of conversations) of `train-00000.bin`, in order:
`end`, tokens of the shard until its end, separator included; `file`, as messages name it; `record`, its line (from 1),
row (from 0), or first token in its file. 12 bytes each before compression, without the names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from llmtrain.base.errors import DataError
from llmtrain.data.manifest import Shard, origins_path

_GROUP = 16384
"""Documents that are read at a time."""


@dataclass(frozen=True)
class Origin:
    """Where a document comes from, and where it is in its split."""

    file: str
    record: int
    begin: int
    """Number of the document's first token in the split."""
    end: int
    """Number of the token after its last one; the separator belongs to the document."""
    index: int
    """Number of the document in the split."""


def write_origins(
    shard: Path, lengths: np.ndarray, files: Sequence[str], places: np.ndarray, records: np.ndarray
) -> str:
    """Write a shard's file of origins atomically; returns its xxh3_64. Raises OSError.

    Args:
        lengths: tokens of each document, int [documents].
        places: each document's file, an index of `files`, int [documents].
        records: each document's line, row or first token, int [documents].
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def narrow(values: np.ndarray) -> np.ndarray:
        return values.astype(np.uint32 if values.max(initial=0) < 1 << 32 else np.uint64)

    names = pa.DictionaryArray.from_arrays(places.astype(np.int32), list(files))
    columns = {"end": narrow(np.cumsum(lengths)), "file": names, "record": narrow(records)}
    path = origins_path(shard)
    partial = path.with_name(path.name + ".tmp")
    pq.write_table(
        pa.table(columns),
        partial,
        row_group_size=_GROUP,
        compression="zstd",
        use_dictionary=["file"],
        column_encoding={"end": "DELTA_BINARY_PACKED", "record": "DELTA_BINARY_PACKED"},
        write_page_checksum=True,
    )
    digest = xxhash.xxh3_64_hexdigest(partial.read_bytes())
    partial.replace(path)
    return digest


class Origins:
    """Origins of the documents of one split."""

    def __init__(self, folder: Path, shards: tuple[Shard, ...]) -> None:
        """Raises DataError: the folder was prepared without origins."""
        self._folder, self._shards = folder, shards
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._before = np.cumsum([0, *(shard.documents for shard in shards)])
        for shard in shards:
            if not origins_path(folder / shard.file).is_file():
                raise DataError(
                    f"{folder}: it keeps no origins of its documents ({origins_path(Path(shard.file))} is not there); "
                    "prepare it again"
                )

    def within(self, begin: int, end: int) -> Iterator[Origin]:
        """Yield the documents with any of the split's tokens [begin, end), in order."""
        for index in range(int(np.searchsorted(self._starts, begin, "right")) - 1, len(self._shards)):
            start = int(self._starts[index])
            if start >= end:
                return
            opened = self._file(index)
            for group in range(opened.group_at(max(begin, start) - start), opened.groups):
                found = opened.read(group)
                low = int(np.searchsorted(found.ends, begin - start, "right"))
                for at in range(low, int(np.searchsorted(found.begins, end - start))):
                    yield self._origin(index, group, at)
                if start + int(found.ends[-1]) >= end:
                    return

    def of_rows(self, rows: Sequence[int]) -> Iterator[Origin]:
        for row in rows:
            index = int(np.searchsorted(self._before, row, "right")) - 1
            yield self._origin(index, *divmod(row - int(self._before[index]), _GROUP))

    def find(self, file: str, record: int | None) -> Iterator[Origin]:
        """Yield the documents of a record of a source file; None: of all records of the file."""
        for index, shard in enumerate(self._shards):
            opened = self._file(index)
            wanted = record
            if record is not None and file == shard.continues:
                wanted = record - shard.records_before
            for group in opened.groups_with(file, wanted):
                found = opened.read(group)
                same = (found.files == file) & (wanted is None or found.records == wanted)
                for at in np.flatnonzero(same).tolist():
                    yield self._origin(index, group, at)

    def _origin(self, index: int, group: int, at: int) -> Origin:
        shard, start, found = self._shards[index], int(self._starts[index]), self._file(index).read(group)
        before = shard.records_before if found.files[at] == shard.continues else 0
        return Origin(
            file=str(found.files[at]),
            record=int(found.records[at]) + before,
            begin=start + int(found.begins[at]),
            end=start + int(found.ends[at]),
            index=int(self._before[index]) + group * _GROUP + at,
        )

    def _file(self, index: int) -> _File:
        opened = self._opened.get(index)
        if opened is None:
            opened = self._opened[index] = _File(origins_path(self._folder / self._shards[index].file))
        return opened

    @cached_property
    def _opened(self) -> dict[int, _File]:
        return {}


class _Group(NamedTuple):
    """Columns of a group of documents, [documents] each. `begins` and `ends` count tokens of the shard."""

    begins: np.ndarray
    ends: np.ndarray
    files: np.ndarray
    records: np.ndarray


class _File:
    """A file of origins; its groups are read on demand."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self._path = path
        self._cached: dict[int, _Group] = {}
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            metadata = self._file.metadata
            self.groups = metadata.num_row_groups
            statistics = [[metadata.row_group(g).column(c).statistics for c in range(3)] for g in range(self.groups)]
            self._ends = [int(end.max) for end, _, _ in statistics]
            self._bounds = [(file.min, file.max, record.min, record.max) for _, file, record in statistics]
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self._path}: is damaged ({error}); copy the folder again, or prepare it again")

    def group_at(self, token: int) -> int:
        return bisect_left(self._ends, token + 1)

    def groups_with(self, file: str, record: int | None) -> Iterator[int]:
        for group, (first, last, least, most) in enumerate(self._bounds):
            if first <= file <= last and (record is None or least <= record <= most):
                yield group

    def read(self, group: int) -> _Group:
        """Read a group of documents. Raises DataError: the file is damaged."""
        if group not in self._cached:
            try:
                table = self._file.read_row_group(group)
            except (OSError, ValueError) as error:
                raise self._damaged(error) from error
            ends, files, records = (table.column(name).to_numpy() for name in ("end", "file", "record"))
            begins = np.concatenate([[self._ends[group - 1] if group else 0], ends[:-1]])
            self._cached[group] = _Group(
                begins.astype(np.int64), ends.astype(np.int64), files, records.astype(np.int64)
            )
        return self._cached[group]
