"""Reads the documents in a piece of a file, one at a time; an unusable record becomes a `Rejection`.

Memory use is constant: compressed files are streamed, jsonl is read line by line with a limit, parquet and Arrow in
small batches. A file that is damaged in the middle gives the documents before the damage and one rejection.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from dataclasses import field as of_dataclass
from typing import Any, BinaryIO, TextIO

from llmtrain.base.units import size
from llmtrain.base.untrusted import first_line
from llmtrain.data.chat.conversation import no_repeats
from llmtrain.data.kinds import RowKind
from llmtrain.data.prepare import inputs, plugin_source
from llmtrain.data.prepare.sources import BOM, Piece

_CHUNK = 1 << 20
_DECODER, _WHITE = json.JSONDecoder(), re.compile(r"\s*")
_ROWS = 64  # rows decoded at a time: 64 documents of the largest allowed size still fit in memory


@dataclass(frozen=True, slots=True)
class Document:
    """An accepted record. `data` is `text` in UTF-8; `number` is the record's line or row, as in a `Rejection`."""

    text: str
    data: bytes
    number: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """An unusable record. `unit`: "line" (from 1; of jsonl in the piece), "row" or "token" (from 0) in the file."""

    file: str
    unit: str
    number: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {"file": self.file, self.unit: self.number, "reason": self.reason}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Rejection:
        [unit] = values.keys() - {"file", "reason"}
        return Rejection(values["file"], unit, values[unit], values["reason"])

    @property
    def place(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(slots=True)
class Lines:
    """How many lines that begin in a piece have been read."""

    count: int = 0
    excluded: list[tuple[str, int]] = of_dataclass(default_factory=list)
    """(file, record) of each document that --exclude has left out."""


def read_piece(
    piece: Piece, field: str | None, max_bytes: int, lines: Lines | None = None
) -> Iterator[Document | Rejection]:
    """Yield the documents of a piece: the values of `field`, or, if it is None, complete records as JSON objects.

    `lines` counts lines of jsonl. Raises DataError: the file cannot be opened (gone, no permission).
    """
    lines = lines or Lines()
    readers: dict[str, Callable[[Piece, str | None, int], Iterator[Document | Rejection]]] = {
        "text": _read_text,
        "jsonl": functools.partial(_read_jsonl, lines),
        "array": _read_array,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
        "plugin": _read_plugin,
    }
    reader = readers[piece.kind]
    try:
        for item in reader(piece, field, max_bytes):
            if piece.excluded and isinstance(item, Document) and item.number + piece.before in piece.excluded:
                lines.excluded.append((piece.origin, item.number + piece.before))
            else:
                yield item
    except OSError as error:
        raise inputs.cannot_be_read(piece.path, error) from error


def reject(piece: Piece, document: Document, reason: str) -> Rejection:
    unit = "line" if piece.kind in ("text", "jsonl") else "row"
    return Rejection(piece.label, unit, document.number, reason)


def _check(
    value: object, piece: Piece, unit: str, number: int, max_bytes: int, field: str | None
) -> Document | Rejection:
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        return Rejection(piece.label, unit, number, f"field {field!r} is {kind}, not a string")
    try:
        data = value.encode()
    except UnicodeEncodeError:
        return Rejection(piece.label, unit, number, "invalid Unicode: a lone surrogate")
    if not value.strip():
        return Rejection(piece.label, unit, number, "empty document")
    if len(data) > max_bytes:
        return Rejection(piece.label, unit, number, _huge(size(len(data)), max_bytes))
    return Document(value, data, number)


def _huge(found: str, max_bytes: int) -> str:
    return f"huge document: {found}, the limit is {size(max_bytes)}; --max-document-bytes raises it"


# --- plain and compressed byte streams ------------------------------------------------------------


class _GzipStream(gzip.GzipFile):
    """Decompressed bytes of a .gz file; closing the stream closes the file."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(fileobj=raw, mode="rb")
        self._raw_file = raw

    def close(self) -> None:
        super().close()
        self._raw_file.close()


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of a .zst file with any number of frames. Raises EOFError if the last frame is incomplete.

    The `stream_reader` of zstandard ends without an error at a truncated frame, so half a corpus would look complete.
    """

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw = raw
        self._start_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._ready:
            unused = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = unused or self._raw.read(1 << 16)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("truncated")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._start_frame()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except zstandard.ZstdError as error:
                raise zlib.error(str(error)) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _open(piece: Piece) -> BinaryIO:
    raw = inputs.open_file(piece.path, stop=piece.stop)
    if piece.path.endswith(".gz"):
        return _GzipStream(raw)  # type: ignore[return-value]
    return io.BufferedReader(_ZstdStream(raw), _CHUNK) if piece.path.endswith(".zst") else raw


def _broken(error: Exception) -> str | None:
    """Return why a compressed stream is unreadable; None if the machine is at fault and not the file."""
    if isinstance(error, EOFError):
        return "truncated: the compressed data ends before its end marker"
    if isinstance(error, (zlib.error, gzip.BadGzipFile)):
        return f"corrupt compressed data ({error})"
    return None


# --- text: one document a file --------------------------------------------------------------------


def _read_text(piece: Piece, field: str | None, max_bytes: int) -> Iterator[Document | Rejection]:
    with _open(piece) as stream:
        try:
            data = stream.read(max_bytes + 1)
        except (EOFError, zlib.error, OSError) as error:
            if (reason := _broken(error)) is None:
                raise
            yield Rejection(piece.label, "line", 1, reason)
            return
    if len(data) > max_bytes:
        yield Rejection(piece.label, "line", 1, _huge(f"over {size(max_bytes)}", max_bytes))
        return
    if data.startswith(_PDF):  # it may have ASCII alone
        yield Rejection(piece.label, "line", 1, _not_utf8(data, 0))
        return
    try:
        text = data.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield Rejection(piece.label, "line", line, _not_utf8(data, error.start))
        return
    yield _check(text, piece, "line", 1, max_bytes, field)


# --- jsonl: one object a line ---------------------------------------------------------------------


def _read_jsonl(count: Lines, piece: Piece, field: str | None, max_bytes: int) -> Iterator[Document | Rejection]:
    # JSON may write a character in six bytes (\u00e9), and a record has other fields, for which the limit leaves room.
    limit = 6 * max_bytes + _CHUNK
    number = 0
    with _open(piece) as stream:
        lines = _lines(stream, piece, limit)
        while True:
            number += 1
            try:
                line = next(lines, None)
            except (EOFError, zlib.error, OSError) as error:
                if (reason := _broken(error)) is None:
                    raise
                yield Rejection(piece.label, "line", number, reason)
                return
            if line is None:
                break
            count.count = number
            if number == 1 and not piece.start:
                line = line.removeprefix(BOM)
            if len(line) > limit:
                yield Rejection(piece.label, "line", number, _huge(f"a line of over {size(limit)}", max_bytes))
            elif line.strip():  # a blank line is no record
                yield _parse(line, piece, number, field, max_bytes)
    if piece.stop == 0 or (piece.compressed and number == 1):
        yield Rejection(piece.label, "line", 1, "empty file")


def _form_of(names: Iterable[str]) -> str:
    """Return the option that reads a record without the text field: --format or --field with its value."""
    given = set(names)
    columns_of = [(columns, kind) for kind in reversed([*RowKind.CHOICES.values()]) for columns in kind.columns]
    fitting = [(len(columns), kind) for columns, kind in columns_of if given.issuperset(columns)]
    if not fitting:
        return "see --field"
    kind = max(fitting, key=lambda each: each[0])[1]
    of_init = "DIR/launch/templates/turns.jinja, which `llmtrain init DIR` writes"
    template = f", and with --vocab-size --chat-template {of_init}" if kind.templated else ""
    return f"they are not plain text: add --format {kind.selected()}{template}"


_PDF = b"%PDF-"
_BEGINNINGS = (
    (_PDF, "a PDF: convert it to text first, such as by `pdftotext -enc UTF-8 FILE.pdf`"),
    (b"\x89PNG\r\n", "a PNG picture, which has no text: leave it out"),
    (b"\xff\xd8\xff", "a JPEG picture, which has no text: leave it out"),
    (b"GIF8", "a GIF picture, which has no text: leave it out"),
    (b"PK\x03\x04", "a ZIP archive, as for Word and EPUB: convert it to text first, such as by pandoc"),
)
"""First bytes of a file -> a reason to reject it."""


def _not_utf8(data: bytes, at: int) -> str:
    if reason := next((reason for first, reason in _BEGINNINGS if data.startswith(first)), None):
        return f"it is {reason}"
    kind = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
    return f"invalid UTF-8: byte 0x{data[at]:02x}; convert it, such as `iconv -f {kind} -t UTF-8 FILE > NEW`"


def _parse(
    line: bytes, piece: Piece, number: int, field: str | None, max_bytes: int, unit: str = "line"
) -> Document | Rejection:
    try:
        # A text is one field; a conversation would lose the first value of a repeated key.
        record = json.loads(line.decode(), object_pairs_hook=no_repeats if field is None else None)
        whole = json.dumps(record, ensure_ascii=False) if field is None else ""
    except UnicodeDecodeError as error:
        return Rejection(piece.label, unit, number, _not_utf8(line, error.start))
    except (ValueError, RecursionError) as error:
        return Rejection(piece.label, unit, number, f"broken JSON ({error})")
    if not isinstance(record, dict):
        kind = f"a JSON {type(record).__name__}, not an object"
        list_too = "; a list of records must not be compressed" if piece.compressed else ""
        return Rejection(piece.label, unit, number, kind + (list_too if isinstance(record, list) else ""))
    if field is None:
        return _check(whole, piece, unit, number, max_bytes, field)
    if field not in record:
        names = ", ".join(sorted(record)[:8]) or "none"
        return Rejection(piece.label, unit, number, f"no field {field!r} (its fields: {names}); {_form_of(record)}")
    return _check(record[field], piece, unit, number, max_bytes, field)


@functools.lru_cache(maxsize=1)  # called for bad lines only, and cached, since it reads all earlier bytes
def lines_in(piece: Piece) -> int:
    """Count the lines that begin in a piece by reading it. Raises DataError."""
    try:
        with _open(piece) as stream:
            return sum(1 for _ in _lines(stream, piece, _CHUNK))
    except OSError as error:
        raise inputs.cannot_be_read(piece.path, error) from error


def _lines(stream: BinaryIO, piece: Piece, limit: int) -> Iterator[bytes]:
    """Yield the lines whose first byte is in [start, stop); one longer than `limit` is cut to limit + 1 bytes."""
    position = 0
    if piece.start:
        stream.seek(piece.start - 1)
        position = piece.start - 1 + _skip_line(stream)
    while piece.compressed or position < piece.stop:
        line = stream.readline(limit + 1)
        if not line:
            return
        position += len(line)
        if len(line) > limit and not line.endswith(b"\n"):
            position += _skip_line(stream)
        yield line


def _skip_line(stream: BinaryIO) -> int:
    """Read up to and including the next newline; returns the number of bytes."""
    skipped = 0
    while chunk := stream.readline(_CHUNK):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


# --- a JSON list of records -----------------------------------------------------------------------


def _read_array(piece: Piece, field: str | None, max_bytes: int) -> Iterator[Document | Rejection]:
    """Yield the objects of a JSON list, decoded one by one, so that the file is never completely in memory."""
    limit, number = 6 * max_bytes + _CHUNK, 0
    with inputs.open_file(piece.path) as raw, io.TextIOWrapper(raw, "utf-8-sig") as stream:
        text, at, ended = "", 0, False  # the text in memory, and the place of the next record in it
        while True:
            found = _next_record(text, at, first=number == 0)
            if isinstance(found, str) and not ended and len(text) - at <= limit:
                try:
                    more = stream.read(_CHUNK)
                except UnicodeDecodeError as error:
                    found = f"invalid UTF-8: byte 0x{error.object[error.start]:02x}"
                else:
                    text, at, ended = text[at:] + more, 0, not more
                    continue
            if isinstance(found, str):
                found = _huge(f"a record of over {size(limit)}", max_bytes) if len(text) - at > limit else found
                yield Rejection(piece.label, "row", number, found)
                return
            begin, at = found
            if begin == at:
                if text[at + 1 :].strip() or _goes_on(stream):
                    yield Rejection(piece.label, "row", number, "broken JSON (more text follows the list's end)")
                break
            yield _parse(text[begin:at].encode(errors="surrogatepass"), piece, number, field, max_bytes, "row")
            number += 1
    if number == 0:
        yield Rejection(piece.label, "row", 0, "empty file")


def _goes_on(stream: TextIO) -> bool:
    try:
        return any(block.strip() for block in iter(lambda: stream.read(_CHUNK), ""))
    except UnicodeDecodeError:
        return True


def _next_record(text: str, at: int, *, first: bool) -> tuple[int, int] | str:
    """Return (begin, end) of a list's next value, equal at the list's end; or why there is none in `text` yet."""
    at = _WHITE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
    if text.startswith("]", at):
        return at, at
    if not text.startswith("[" if first else ",", at):
        return f"broken JSON (no list of records: {text[at : at + 20]!r})"
    begin = _WHITE.match(text, at + 1).end()  # type: ignore[union-attr]
    if first and text.startswith("]", begin):
        return begin, begin
    try:
        _, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        return f"broken JSON ({error})"
    if _WHITE.match(text, end).end() == len(text):  # type: ignore[union-attr]  # a number may continue
        return "broken JSON (the list does not end)"
    return begin, end


# --- tables as text ---


def _read_csv(piece: Piece, field: str | None, max_bytes: int) -> Iterator[Document | Rejection]:
    """Yield the rows of a table whose first line names the columns; quoted values may have line breaks."""
    bare = piece.path.removesuffix(".gz").removesuffix(".zst").lower()
    csv.field_size_limit(max_bytes + _CHUNK)
    number = 0
    with _open(piece) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as stream:
        try:
            rows = csv.DictReader(stream, delimiter="\t" if bare.endswith(".tsv") else ",", strict=True)
            names = list(rows.fieldnames or [])
            if field is not None and field not in names:
                yield _no_column(piece, field, names)
                return
            if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
                yield Rejection(piece.label, "row", 0, f"two columns are named {twice!r}; name each once")
                return
            for number, row in enumerate(rows):
                if None in row or None in row.values():
                    reason = f"it has another number of values than the first line, which names {len(names)} columns"
                    yield Rejection(piece.label, "row", number, reason)
                    continue
                whole = json.dumps(row, ensure_ascii=False) if field is None else row[field]
                yield _check(whole, piece, "row", number, max_bytes, field)
            if number == 0 and not names:
                yield Rejection(piece.label, "row", 0, "empty file")
        except (csv.Error, UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield Rejection(piece.label, "row", number, _broken(error) or f"no table as text ({error})")


# --- of a plugin ----------------------------------------------------------------------------------


def _read_plugin(piece: Piece, field: str | None, max_bytes: int) -> Iterator[Document | Rejection]:
    for number, record in enumerate(plugin_source.records_of(piece.path)):
        if isinstance(record, dict) and field is not None and field not in record:
            names = ", ".join(sorted(map(str, record))[:8]) or "none"
            reason = f"no field {field!r} (its fields: {names}); {_form_of(map(str, record))}"
            yield Rejection(piece.label, "row", number, reason)
        elif isinstance(record, dict):
            whole = json.dumps(record, ensure_ascii=False, default=_named) if field is None else record[field]
            yield _check(whole, piece, "row", number, max_bytes, field)
        elif isinstance(record, str) and field is not None:
            yield _check(record, piece, "row", number, max_bytes, field)
        else:
            wanted = "a map, as --format says" if field is None else "a text or a map"
            yield Rejection(piece.label, "row", number, f"a record is {type(record).__name__}, not {wanted}")


# --- columns: parquet and Arrow -------------------------------------------------------------------


def _no_column(piece: Piece, field: str, names: list[str]) -> Rejection:
    found = ", ".join(names[:8])
    return Rejection(piece.label, "row", 0, f"no field {field!r} in the file (its fields: {found}); {_form_of(names)}")


def _read_parquet(piece: Piece, field: str | None, max_bytes: int) -> Iterator[Document | Rejection]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with inputs.arrow_file(piece.path, seeking=True) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
            if field is not None and field not in file.schema_arrow.names:
                yield _no_column(piece, field, file.schema_arrow.names)
                return
            if file.metadata.num_rows == 0:
                yield Rejection(piece.label, "row", 0, "empty file")
                return
            groups = list(range(piece.start, piece.stop))
            columns = None if field is None else [field]
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=columns, use_threads=False):
                for value in _values(batch, field):
                    yield _check(value, piece, "row", row, max_bytes, field)
                    row += 1
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        if inputs.of_the_machine(error):
            raise
        yield Rejection(piece.label, "row", row, f"truncated or corrupt parquet ({first_line(error, 200)})")


def _read_arrow(piece: Piece, field: str | None, max_bytes: int) -> Iterator[Document | Rejection]:
    import pyarrow

    row = 0
    try:
        with inputs.arrow_file(piece.path, seeking=False) as stream, pyarrow.ipc.open_stream(stream) as reader:
            if field is not None and field not in reader.schema.names:
                yield _no_column(piece, field, reader.schema.names)
                return
            for index, batch in enumerate(reader):
                if index >= piece.stop > 0:
                    return
                if index < piece.start:
                    row += batch.num_rows
                    continue
                for start in range(0, batch.num_rows, _ROWS):
                    for value in _values(batch.slice(start, _ROWS), field):
                        yield _check(value, piece, "row", row, max_bytes, field)
                        row += 1
    except (OSError, pyarrow.ArrowException) as error:
        if inputs.of_the_machine(error):
            raise
        yield Rejection(piece.label, "row", row, f"truncated or corrupt Arrow file ({first_line(error, 200)})")


def _values(batch: Any, field: str | None) -> Iterator[object]:
    """Return the column's values, or complete rows. A string that is not UTF-8 does not affect other rows."""
    for scalar in batch.to_struct_array() if field is None else batch.column(field):
        try:
            value = scalar.as_py()
            yield value if field is not None else json.dumps(_without_nulls(value), ensure_ascii=False, default=_named)
        except UnicodeDecodeError:
            yield "\udcff"  # a lone surrogate: `_check` rejects the row as invalid Unicode


def _without_nulls(value: Any) -> Any:
    """Remove keys with null values at any depth, because Arrow gives every record the keys of all records."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _named(value: object) -> dict[str, str]:
    """Return a placeholder for a value that JSON cannot express (bytes, a date)."""
    return {type(value).__name__: repr(value)}
