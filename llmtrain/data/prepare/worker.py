"""Worker processes of `llmtrain prepare`: they get units as JSON lines, write shards, and answer with records.

A unit leaves `train-NNNNN.bin`, `validation-NNNNN.bin` and, last, the record `unfinished/unit-NNNNN.json`, without
which it does not count as done. A worker writes in a folder of its own, because a worker that seemed lost may go on
writing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import field as of_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtrain.base.child import Parent
from llmtrain.base.errors import DataError, UserError
from llmtrain.base.files import replace_file
from llmtrain.data.chat.encoder import Kept, kept
from llmtrain.data.kinds import RowKind
from llmtrain.data.manifest import SPLITS, Shard, Split
from llmtrain.data.origins import write_origins
from llmtrain.data.prepare import out_folder, plugin_source, token_corpora
from llmtrain.data.prepare.out_folder import HELD_OUT, UNFINISHED
from llmtrain.data.prepare.records import Document, Lines, Rejection, read_piece, reject
from llmtrain.data.prepare.settings import draw, parts
from llmtrain.data.prepare.sources import Unit, refuse_changed
from llmtrain.data.row import Row
from llmtrain.data.token_stream import rows_path
from llmtrain.storage.addresses import is_url

_BATCH_BYTES = 1 << 19  # text encoded in one call: enough to amortise it, little enough to stay flat
_BATCH_DOCUMENTS = 256


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    out: str
    here: str
    """Folder on this host with plan and tokenizer: `out`, or a copy of files of the store (out_folder.py)."""
    owner: str = ""
    """The command's claim on a folder in a store."""
    kind: RowKind
    max_document_bytes: int
    validation_fraction: float
    cut_bytes: int
    """A document above this size is cut for the split (prepare/settings.py)."""
    held_out: str | None = None
    """File of `write_held_out` in `here`: the documents of --validation-source, which training units leave out."""
    reject_limit: int
    """Rejections after which a unit is given up: `prepare` will stop anyway, and the list must not fill memory."""
    bare: bool = False
    """Add no special tokens to texts."""
    dtype: str
    """Type of the ids in the shards, in numpy's notation."""
    plugins: tuple[str, ...] = ()
    fields: Mapping[str, Mapping[str, Any]] = of_dataclass(default_factory=dict)
    """Values of the fields of plugins' sources, by source."""
    sample: int = 0
    """How many conversations of each unit are kept as a sample, with the numbers of their rows."""

    @staticmethod
    def from_dict(values: dict[str, Any]) -> WorkerSettings:
        """Return the settings that a preparation sent as JSON; its plugins must be imported already."""
        return WorkerSettings(**{**values, "kind": RowKind.from_dict(values["kind"])})


@dataclass(frozen=True, kw_only=True)
class RowFigures:
    """Figures of the rows in a shard."""

    counted: int
    """Counted tokens."""
    longest: int
    """Tokens of the longest row or pair."""


@dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """What the manifest needs of a finished unit; saved as a file in `unfinished/`."""

    unit: int
    shards: dict[Split, Shard | None] = field(default_factory=dict)
    """Entry of the shard of each split; None: the split has no document."""
    lines: int | None = None
    """Number of lines that begin in the unit's last piece; None: not all of it was read."""
    rejected: list[Rejection] = field(default_factory=list)
    cut: int = 0
    left_out: int = 0
    excluded: list[tuple[str, int]] = field(default_factory=list)
    lowest_draw: float = 1.0
    chat: dict[Split, RowFigures] | None = None
    """Figures of conversations by split; None: the documents are texts, and the fields below are empty."""
    too_long: int = 0
    dated: bool = False
    unread: list[str] = field(default_factory=list)
    sample: list[Kept] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for split, shard in values["shards"].items():
            values["shards"][split] = shard and {key: value for key, value in shard.items() if value}
        values["rejected"] = [rejection.as_dict() for rejection in self.rejected]
        if self.chat is None:
            for key in ("chat", "too_long", "dated", "unread", "sample"):
                del values[key]
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> UnitRecord:
        chat = values.get("chat")
        typed = {
            "shards": {split: entry and Shard(**entry) for split, entry in values["shards"].items()},
            "rejected": [Rejection.from_dict(entry) for entry in values["rejected"]],
            "excluded": [(file, record) for file, record in values.get("excluded", ())],
            "chat": chat and {split: RowFigures(**figures) for split, figures in chat.items()},
            "sample": [Kept(**entry) for entry in values.get("sample", ())],
        }
        return UnitRecord(**{**values, **typed})


def record_name(index: int) -> str:
    return f"{UNFINISHED}/unit-{index:05d}.json"


def hashes_name(index: int) -> str:
    return f"{UNFINISHED}/unit-{index:05d}.hashes"


def write_held_out(here: Path, units: Iterable[int]) -> str:
    """Write the hashes of these units' validation documents into one file, uint64 [2, documents]. Returns its name."""
    hashes = b"".join((here / hashes_name(index)).read_bytes() for index in units)
    high, low = np.frombuffer(hashes, dtype=">u8").reshape(-1, 2).T.astype(np.uint64)
    order = np.argsort(high)
    np.save(here / HELD_OUT, np.stack([high[order], low[order]]))
    return HELD_OUT


class _HeldOut:
    """Hashes of the held-out documents, 128 bits each, in a file that all workers map."""

    def __init__(self, path: Path | None) -> None:
        table: np.ndarray = np.empty((2, 0), np.uint64) if path is None else np.load(path, mmap_mode="r")
        self._high, self._low = table

    def __contains__(self, hashed: int) -> bool:
        high, low = divmod(hashed, 1 << 64)
        at = int(np.searchsorted(self._high, np.uint64(high)))
        same = slice(at, at + int(np.searchsorted(self._high[at:], np.uint64(high), side="right")))
        return bool((self._low[same] == np.uint64(low)).any())


class _ShardWriter:
    """Writes a shard, and its file of rows if the kind has one, under temporary names until `commit`."""

    def __init__(self, path: Path, kind: RowKind) -> None:
        self.path = path
        self._kind = kind
        self._lengths: list[int] = []
        self._counted: list[np.ndarray] = []
        self._entries: list[np.ndarray] = []
        self._partial = path.with_name(path.name + ".tmp")
        self._stream = open(self._partial, "wb")  # noqa: SIM115  # closed by commit or discard
        self._digest = xxhash.xxh3_64()
        self._origins: list[tuple[int, int]] = []
        self._rows: list[Row] = []
        self.tokens = self.documents = 0

    def add(self, rows: list[Row], origin: tuple[int, int]) -> None:
        """Add the rows of a document for the next `write`. `origin`: (number of the piece, number of the record)."""
        self._rows += rows
        self._origins += [origin] * len(rows)
        self.documents += len(rows)

    def write(self, separator_id: int | None) -> None:
        """Write the added rows, each followed by the separator unless it is None."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        self._lengths += [len(row.ids) + (separator_id is not None) for row in rows]
        end = np.array([] if separator_id is None else [separator_id], dtype=rows[0].ids.dtype)
        block = np.concatenate([part for row in rows for part in (row.ids, end)])
        if self._kind.has_rows:
            self._counted += [row.counted for row in rows]
        if self._kind.entry is not None:
            self._entries.append(np.array([row.entry for row in rows], dtype=self._kind.entry))
        data = block.tobytes()
        self._stream.write(data)
        self._digest.update(data)
        self.tokens += len(block)

    def figures(self) -> RowFigures:
        lengths = np.array(self._lengths, dtype=np.int64).reshape(-1, self._kind.together).sum(1)
        counted = sum(int(row.sum()) for row in self._counted)
        return RowFigures(counted=counted, longest=int(lengths.max(initial=0)))

    def commit(self, files: list[str]) -> Shard | None:
        """Rename the files, and return the shard's entry for the manifest; without documents remove them, return None.

        `files`: the file of each piece of the unit.
        """
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        if not self.documents:
            self._partial.unlink()
            return None
        of_rows = ""
        if self._kind.has_rows:
            data = np.array(self._lengths, dtype="<u4").tobytes() + np.packbits(np.concatenate(self._counted)).tobytes()
            data += b"".join(part.tobytes() for part in self._entries)
            replace_file(rows_path(self.path), data)
            of_rows = xxhash.xxh3_64_hexdigest(data)
        places, records = np.array(self._origins, dtype=np.int64).T
        origins = write_origins(self.path, np.array(self._lengths), files, places, records)
        self._partial.replace(self.path)
        return Shard(
            file=self.path.name,
            tokens=self.tokens,
            documents=self.documents,
            xxh3=self._digest.hexdigest(),
            rows=of_rows,
            origins=origins,
        )

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full: the buffered data is not needed
            self._stream.close()
        self._partial.unlink(missing_ok=True)


@dataclass
class _Written:
    """Collects the shards of a unit, and the counts and hashes of its documents, for its record."""

    unit: Unit
    settings: WorkerSettings
    writers: dict[Split, _ShardWriter]
    held_out: _HeldOut
    rejected: list[Rejection] = field(default_factory=list)
    lines: Lines = field(default_factory=Lines)
    """Lines that begin in the unit's last piece."""
    cut: int = 0
    excluded: list[tuple[str, int]] = field(default_factory=list)
    """(file, record) of each document in --exclude."""
    left_out: int = 0
    """Documents for training that are also in --validation-source."""
    hashes: bytearray = field(default_factory=bytearray)
    """Hashes of the documents in a validation unit, 16 bytes each."""
    sample: list[Kept] = field(default_factory=list)
    """The first conversations, kept as a sample."""
    lowest_draw: float = 1.0
    """Smallest validation fraction that would hold out a complete document."""
    in_place: dict[Split, Shard | None] | None = None
    """Entries of shards that are parts of the source itself; None: the shards were written."""

    def sides(self, text: str, data: bytes) -> list[tuple[Split, str]]:
        """Return the document's text by split; empty if --validation-source has the document.

        `data`: what identifies it: the bytes of a text, or of a conversation's training rows.
        """
        hashed = xxhash.xxh3_128_intdigest(data)
        if self.unit.validation:
            self.hashes += hashed.to_bytes(16, "big")
            return [("validation", text)]
        if hashed in self.held_out:
            self.left_out += 1
            return []
        sides = parts(text, data, self.settings.validation_fraction, self.settings.cut_bytes)
        self.cut += len(sides) > 1
        self.lowest_draw = min(self.lowest_draw, draw(data))
        return sides


def process_unit(
    unit: Unit,
    settings: WorkerSettings,
    encoder: Any,
    progress: Callable[[int], None],
) -> UnitRecord:
    """Write the shards and the record of a unit, and return the record.

    A unit with too many rejected records is not read to its end and leaves no file. `encoder`: from `RowKind.encoder`.
    `progress` is called with bytes of text. Raises DataError, and leaves no file, if the output cannot be written.
    """
    folder = out_folder.opened(settings.out, settings.here, settings.owner)
    own = folder.here / UNFINISHED / f"{socket.gethostname()}-{os.getpid()}"
    writers: dict[Split, _ShardWriter] = {}
    try:
        (own / UNFINISHED).mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            writers[split] = _ShardWriter(own / f"{split}-{unit.index:05d}.bin", settings.kind)
        too_long = encoder.too_long if settings.kind.has_rows else 0
        held_out = _HeldOut(Path(settings.here, settings.held_out) if settings.held_out else None)
        written = _Written(unit, settings, writers, held_out)
        _write_documents(written, encoder, progress)
        refuse_changed(unit.pieces)
        whole = len(written.rejected) <= settings.reject_limit  # otherwise the rest was not read, and the caller ends
        files = [piece.origin for piece in unit.pieces]
        order = {piece.label: place for place, piece in enumerate(unit.pieces)}
        written.rejected.sort(key=lambda rejection: (order[rejection.file], rejection.number))
        record = UnitRecord(
            unit=unit.index,
            shards=written.in_place or {split: writers[split].commit(files) for split in SPLITS},
            lines=written.lines.count if whole else None,
            rejected=written.rejected,
            cut=written.cut,
            left_out=written.left_out,
            excluded=written.excluded,
            lowest_draw=written.lowest_draw,
        )
        if settings.kind.has_rows:
            record = replace(
                record,
                chat={split: writers[split].figures() for split in SPLITS},
                too_long=encoder.too_long - too_long,
                dated=encoder.dated,
                unread=sorted(encoder.unread),
                sample=written.sample,
            )
        if unit.validation:
            replace_file(own / hashes_name(unit.index), bytes(written.hashes))
        replace_file(own / record_name(unit.index), json.dumps(record.as_dict()).encode())
        if whole:
            folder.take(own)
        return record
    except OSError as error:
        remedy = (
            f"make room in {tempfile.gettempdir()}, or check the store's credentials and the network"
            if is_url(settings.out)
            else "make room (or correct the folder)"
        )
        raise DataError(
            f"{settings.out}: shard {unit.index} cannot be written ({error.strerror or error}); it was removed and the "
            f"finished shards are kept: {remedy} and run the same command again"
        ) from error
    finally:
        for writer in writers.values():
            writer.discard()
        shutil.rmtree(own, ignore_errors=True)


def _write_documents(written: _Written, encoder: Any, progress: Callable[[int], None]) -> None:
    unit, settings, writers, kind = written.unit, written.settings, written.writers, written.settings.kind
    whole = kind.reads_records  # the training rows decide the split of a record
    separator = None if kind.has_rows else encoder.separator_id
    batch: list[tuple[int, Document, Split, str]] = []
    filled = 0

    def flush() -> None:
        nonlocal filled
        encoded = kind.encode_all(encoder, [text for *_, text in batch])
        for (place, document, side, _), rows in zip(batch, encoded, strict=True):
            if isinstance(rows, str):
                written.rejected.append(reject(unit.pieces[place], document, rows))
                continue
            if whole:  # not the record, which may have another id
                trained = b"".join(part.tobytes() for row in rows for part in (row.ids, row.counted))
                sides = written.sides(document.text, trained)
                if not sides:
                    continue
                side = sides[0][0]
            if side == "train" and whole and len(written.sample) < settings.sample:
                written.sample += filter(None, [kept(document.text, rows, writers["train"].documents)])
            writers[side].add(rows, (place, document.number))
        for writer in writers.values():
            writer.write(separator)
        progress(filled)
        batch.clear()
        filled = 0

    for place, piece in enumerate(unit.pieces):
        if piece.kind == "tokens":
            flush()
            _write_tokens(written, place, encoder)
            progress(piece.bytes)
            continue
        written.lines = Lines(excluded=written.excluded)
        for item in read_piece(piece, None if whole else kind.field, settings.max_document_bytes, written.lines):
            if len(written.rejected) > settings.reject_limit:
                return
            if isinstance(item, Rejection):
                written.rejected.append(item)
                continue
            if whole:
                batch.append((place, item, "train", item.text))
            else:
                batch += [(place, item, split, text) for split, text in written.sides(item.text, item.data)]
            filled += len(item.data)
            if filled >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
                flush()
    if batch:
        flush()


def _write_tokens(written: _Written, place: int, encoder: Any) -> None:
    """Write the documents that begin in a range of a file of ids. Raises DataError: an id is outside the vocabulary.

    If the file stores ids as a shard does and the unit is only this range, the shard is a link to the file.
    """
    unit, settings, writers = written.unit, written.settings, written.writers
    piece = unit.pieces[place]
    file = token_corpora.read(piece.path)
    borders = file.documents(piece.start, piece.stop, encoder.separator_id)
    if len(borders) < 2:
        return
    ids = file.ids[borders[0] : borders[-1]]
    if wrong := encoder.outside(ids, int(borders[0])):
        raise DataError(f"{piece.label}: {wrong}")
    ends = borders[1:] - borders[0]
    full = np.diff(borders) > 0
    separated = bool(full.all() and (ids[ends - 1] == encoder.separator_id).all())
    starts = np.concatenate([[0], ends[:-1]])
    plain = file.begin is not None and ids.dtype.itemsize == np.dtype(settings.dtype).itemsize
    alone = len(unit.pieces) == 1 and not unit.validation and not piece.excluded
    as_it_is = separated and plain and alone and not settings.kind.has_rows
    if as_it_is and settings.held_out is not None:
        documents = zip(starts.tolist(), ends.tolist(), strict=True)
        hashes = (xxhash.xxh3_128_intdigest(ids[start : end - 1].tobytes()) for start, end in documents)
        as_it_is = not any(each in written.held_out for each in hashes)
    if as_it_is:
        held = int((borders[:-1] >= len(file.ids) * (1 - settings.validation_fraction)).sum())
        begin = None
        if not is_url(piece.path) and not is_url(settings.out):
            begin = (file.begin or 0) + int(borders[0]) * ids.dtype.itemsize
        written.in_place = _as_they_lie(unit, ids, borders, held, begin, writers["train"].path.parent)
        return
    for first, start, end in zip(borders[:-1].tolist(), starts.tolist(), ends.tolist(), strict=True):
        if first in piece.excluded:
            written.excluded.append((piece.origin, first))
            continue
        row = encoder.row(ids[start:end])
        if not len(row.ids):
            written.rejected.append(Rejection(piece.label, "token", first, "empty document"))
            continue
        for split, _ in written.sides("", row.ids.tobytes()):
            writers[split].add([row], (place, first))
    for writer in writers.values():
        writer.write(None if settings.kind.has_rows else encoder.separator_id)


def _as_they_lie(
    unit: Unit, ids: np.ndarray, borders: np.ndarray, held: int, begin: int | None, out: Path
) -> dict[Split, Shard | None]:
    """Write a unit of one piece of ids as shards, and return their entries for the manifest.

    Args:
        borders: borders of the documents in tokens of the file; `ids` begin at the first one.
        held: number of documents for validation, which are the last ones.
        begin: bytes of the file before the first id, and the shards become links to the file; None: copies.
    """
    piece, documents = unit.pieces[0], len(borders) - 1
    parts: dict[Split, tuple[int, int]] = {"train": (0, documents - held), "validation": (documents - held, documents)}
    entries: dict[Split, Shard | None] = {}
    for split, (low, high) in parts.items():
        first, last = (borders[[low, high]] - borders[0]).tolist()
        path = out / f"{split}-{unit.index:05d}.bin"
        path.unlink(missing_ok=True)
        entries[split] = None
        if high > low:
            nothing = np.zeros(high - low, np.int64)
            origins = write_origins(path, np.diff(borders[low : high + 1]), [piece.origin], nothing, borders[low:high])
            size = None
            if begin is None:
                with open(path, "wb") as stream:
                    ids[first:last].tofile(stream)
                    os.fsync(stream.fileno())
            else:
                path.symlink_to(piece.path)
                size = os.path.getsize(piece.path)
            entries[split] = Shard(
                file=path.name,
                tokens=last - first,
                documents=high - low,
                xxh3=xxhash.xxh3_64_hexdigest(ids[first:last].data),
                origins=origins,
                begin=0 if begin is None else begin + first * ids.dtype.itemsize,
                bytes=size,
            )
    return entries


def encoder_of(folder: Path, settings: WorkerSettings) -> Any:
    """Make the encoder of the kind of row. Raises DataError: it cannot be loaded."""
    return settings.kind.encoder(folder, np.dtype(settings.dtype), settings.bare)


def main() -> None:
    """Run a worker: the first line on stdin is the settings, each further line a unit."""
    parent = Parent()
    parent.listen()
    values = parent.asked()
    try:
        plugin_source.use(values["plugins"], values["fields"])
        settings = WorkerSettings.from_dict(values)
        encoder = encoder_of(Path(settings.here) / "tokenizer", settings)
        while True:
            unit = Unit.from_dict(parent.asked())

            def tell(what: str, value: Any, index: int = unit.index) -> None:
                parent.tell({"unit": index, what: value})

            tell("done", process_unit(unit, settings, encoder, partial(tell, "progress")).as_dict())
    except UserError as error:
        parent.tell({"error": str(error)})


if __name__ == "__main__":
    main()
