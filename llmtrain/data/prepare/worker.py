"""Worker processes of `llmtrain prepare`: units go in as JSON lines, shards go to the folder, results come out.

A worker is started as `python -m llmtrain.data.prepare.worker`; the parent's side, `run_units`, stands at the end. A
unit leaves `train-NNNNN.bin`, `validation-NNNNN.bin` and, last, its record `unfinished/unit-NNNNN.json`; without the
record the unit does not count as done.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from dataclasses import field as of_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtrain.base.child import child_environment
from llmtrain.base.errors import DataError, UserError
from llmtrain.base.files import replace_file
from llmtrain.data.chat.conversation import RefusedError
from llmtrain.data.chat.encoder import ChatEncoder, ChatOptions, Row, kept
from llmtrain.data.manifest import SPLITS, Split
from llmtrain.data.prepare import plugin_source, token_corpora
from llmtrain.data.prepare.questions import ChoiceEncoder
from llmtrain.data.prepare.records import Document, Rejection, read_piece, reject
from llmtrain.data.prepare.settings import draw, parts
from llmtrain.data.prepare.sources import Piece, Unit
from llmtrain.data.prepare.token_corpora import TokenEncoder
from llmtrain.data.shards import CHOICE, JUDGED, rows_path
from llmtrain.data.tokenize import Encoder

UNFINISHED = "unfinished"
_BATCH_BYTES = 1 << 19  # text encoded in one call: enough to amortise it, little enough to stay flat
_BATCH_DOCUMENTS = 256


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings that every unit is processed with."""

    out: str
    field: str
    max_document_bytes: int
    validation_fraction: float
    cut_bytes: int
    """A document above this size is cut for the split (prepare/settings.py)."""
    held_out: str | None = None
    """File that `write_held_out` wrote: the documents of --validation-source, which no unit for training may hold."""
    reject_limit: int
    """Give a unit up after this many rejections: the run will stop anyway, and the list must not fill the memory."""
    chat: ChatOptions | None = None
    """The documents are conversations, or rows of which some tokens are counted; None: they are texts."""
    ids_field: str | None = None
    """The documents are token ids: the field of a record that holds them."""
    dtype: str
    """Type of the ids in the shards, as numpy writes it."""
    plugins: tuple[str, ...] = ()
    fields: Mapping[str, Mapping[str, Any]] = of_dataclass(default_factory=dict)
    """Values of the fields of plugins' sources, by source."""
    sample: int = 0
    """Keep so many of each unit's conversations with the places of their rows."""

    @staticmethod
    def from_dict(values: dict[str, Any]) -> WorkerSettings:
        chat = values["chat"]
        return WorkerSettings(**{**values, "chat": None if chat is None else ChatOptions(**chat)})


def unit_record_path(out: Path, index: int) -> Path:
    return out / UNFINISHED / f"unit-{index:05d}.json"


def _hashes_path(out: Path, index: int) -> Path:
    return out / UNFINISHED / f"unit-{index:05d}.hashes"


def write_held_out(out: Path, units: Iterable[int]) -> str:
    """Gather what these finished units for validation hold into one file, [2, documents] uint64; returns its path."""
    hashes = b"".join(_hashes_path(out, index).read_bytes() for index in units)
    high, low = np.frombuffer(hashes, dtype=">u8").reshape(-1, 2).T.astype(np.uint64)
    order = np.argsort(high)
    path = out / UNFINISHED / "held_out.npy"
    np.save(path, np.stack([high[order], low[order]]))
    return str(path)


class _HeldOut:
    """Hashes of 128 bits, in a file that all workers map."""

    def __init__(self, path: str | None) -> None:
        table: np.ndarray = np.empty((2, 0), np.uint64) if path is None else np.load(path, mmap_mode="r")
        self._high, self._low = table

    def __contains__(self, hashed: int) -> bool:
        high, low = divmod(hashed, 1 << 64)
        at = int(np.searchsorted(self._high, np.uint64(high)))
        same = slice(at, at + int(np.searchsorted(self._high[at:], np.uint64(high), side="right")))
        return bool((self._low[same] == np.uint64(low)).any())


def _judged(rows: Iterable[Row]) -> np.ndarray:
    """JUDGED [rows]. What precedes the first counted token is a row's prompt."""
    begins = [(row, int(row.counted.argmax())) for row in rows]
    judged = [(xxhash.xxh3_64_intdigest(row.ids[:at].tobytes()), at, bool(row.desirable)) for row, at in begins]
    return np.array(judged, dtype=JUDGED)


class _ShardWriter:
    """One shard under its temporary name until `commit`, with its file of rows if it is of conversations."""

    def __init__(self, path: Path, chat: ChatOptions | None) -> None:
        self.path = path
        self._chat = chat
        self._lengths: list[int] = []
        self._counted: list[np.ndarray] = []
        self._entries: list[np.ndarray] = []
        self._partial = path.with_name(path.name + ".tmp")
        self._stream = open(self._partial, "wb")  # noqa: SIM115  # closed by commit or discard
        self._digest = xxhash.xxh3_64()
        self.tokens = self.documents = 0

    def write(self, rows: list[Row], separator_id: int | None) -> None:
        """Append rows; the separator, if there is one, follows each."""
        if not rows:
            return
        end = np.array([] if separator_id is None else [separator_id], dtype=rows[0].ids.dtype)
        block = np.concatenate([part for row in rows for part in (row.ids, end)])
        if self._chat is not None:
            self._lengths += [len(row.ids) for row in rows]
            self._counted += [row.counted for row in rows]
            if self._chat.labelled:
                self._entries.append(_judged(rows))
            if self._chat.choices:
                self._entries.append(np.array([row.choice for row in rows], dtype=CHOICE))
        data = block.tobytes()
        self._stream.write(data)
        self._digest.update(data)
        self.tokens += len(block)
        self.documents += len(rows)

    def of_chat(self) -> dict[str, int]:
        """The manifest's figures of conversations: counted tokens, and tokens of the longest row or pair."""
        together = 2 if self._chat is not None and self._chat.pairs else 1
        lengths = np.array(self._lengths, dtype=np.int64).reshape(-1, together).sum(1)
        return {"counted": sum(int(row.sum()) for row in self._counted), "longest": int(lengths.max(initial=0))}

    def commit(self) -> dict[str, Any] | None:
        """The shard's manifest entry; None (and no file) when it got no document."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        if not self.documents:
            self._partial.unlink()
            return None
        entry = {
            "file": self.path.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "xxh3": self._digest.hexdigest(),
        }
        if self._chat is not None:
            data = np.array(self._lengths, dtype="<u4").tobytes() + np.packbits(np.concatenate(self._counted)).tobytes()
            data += b"".join(part.tobytes() for part in self._entries)
            replace_file(rows_path(self.path), data)
            entry["rows"] = xxhash.xxh3_64_hexdigest(data)
        self._partial.replace(self.path)
        return entry

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full: what is buffered cannot be written, and need not be
            self._stream.close()
        self._partial.unlink(missing_ok=True)


@dataclass
class _Written:
    """Counts and hashes of a unit's documents, for its record."""

    rejected: list[Rejection] = field(default_factory=list)
    content: int = 0
    """Sum of the documents' hashes: the same however the input is cut into units."""
    cut: int = 0
    left_out: int = 0
    """Documents for training that are in --validation-source, too."""
    hashes: bytearray = field(default_factory=bytearray)
    """Hashes of a validation unit's documents, 16 bytes each."""
    sample: list[dict[str, Any]] = field(default_factory=list)
    """`kept` for the first conversations."""
    lowest_draw: float = 1.0
    """The smallest validation fraction that would hold one of the documents out whole."""
    in_place: dict[Split, dict[str, Any] | None] | None = None
    """Manifest entries of shards that are parts of the source itself; None: the writers have the shards."""


AnyEncoder = Encoder | ChatEncoder | ChoiceEncoder | TokenEncoder


def process_unit(
    unit: Unit,
    settings: WorkerSettings,
    encoder: AnyEncoder,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Tokenize `unit` and leave its shards and its record; returns the record. `progress` gets bytes of text done.

    Raises DataError, leaving nothing behind, when the output cannot be written.
    """
    out = Path(settings.out)
    writers: dict[str, _ShardWriter] = {}
    try:
        for split in SPLITS:
            path = out / f"{split}-{unit.index:05d}.bin"
            writers[split] = _ShardWriter(path, settings.chat)
        too_long = 0 if isinstance(encoder, Encoder) else encoder.too_long
        written = _write_documents(unit, settings, encoder, writers, progress)
        order = {piece.label: place for place, piece in enumerate(unit.pieces)}
        written.rejected.sort(key=lambda rejection: (order[rejection.file], rejection.number))
        record = {
            "unit": unit.index,
            "shards": written.in_place or {split: writers[split].commit() for split in SPLITS},
            "rejected": [rejection.as_dict() for rejection in written.rejected],
            "content": f"{written.content:032x}",
            "cut": written.cut,
            "left_out": written.left_out,
            "lowest_draw": written.lowest_draw,
        }
        if settings.chat is not None and not isinstance(encoder, Encoder):
            record["chat"] = {split: writers[split].of_chat() for split in SPLITS}
            record["too_long"] = encoder.too_long - too_long
            record["dated"] = encoder.dated
            record["sample"] = written.sample
        if unit.validation:
            _hashes_path(out, unit.index).write_bytes(written.hashes)
        replace_file(unit_record_path(out, unit.index), json.dumps(record).encode())
        return record
    except OSError as error:
        raise DataError(
            f"{settings.out}: shard {unit.index} cannot be written ({error.strerror or error}); it was removed and the "
            "finished shards are kept: make room (or correct the folder) and run the same command again"
        ) from error
    finally:
        for writer in writers.values():
            writer.discard()


def _write_documents(
    unit: Unit,
    settings: WorkerSettings,
    encoder: AnyEncoder,
    writers: dict[str, _ShardWriter],
    progress: Callable[[int], None],
) -> _Written:
    written = _Written()
    held_out = _HeldOut(settings.held_out)
    whole = not isinstance(encoder, Encoder)  # records are read whole, and what is trained decides their side
    separator = encoder.separator_id if settings.chat is None and isinstance(encoder, Encoder | TokenEncoder) else None
    batch: list[tuple[Piece, Document, Split, str]] = []
    filled = 0

    def flush() -> None:
        nonlocal filled
        chosen: dict[str, list[Row]] = {split: [] for split in SPLITS}
        for (piece, document, side, _), rows in zip(batch, _rows(encoder, [text for *_, text in batch]), strict=True):
            if isinstance(rows, str):
                written.rejected.append(reject(piece, document, rows))
                continue
            if whole:  # not the record, which may have another id
                trained = b"".join(part.tobytes() for row in rows for part in (row.ids, row.counted))
                sides = _sides(unit, document.text, trained, settings, held_out, written)
                if not sides:
                    continue
                side = sides[0][0]
            at = writers["train"].documents + len(chosen["train"])
            if side == "train" and whole and len(written.sample) < settings.sample:
                written.sample += filter(None, [kept(document.text, rows, at)])
            chosen[side] += rows
        for split in SPLITS:
            writers[split].write(chosen[split], separator)
        progress(filled)
        batch.clear()
        filled = 0

    for piece in unit.pieces:
        if piece.kind == "tokens":
            assert isinstance(encoder, TokenEncoder)
            flush()
            _write_tokens(unit, piece, settings, encoder, writers, held_out, written)
            progress(piece.bytes)
            continue
        for item in read_piece(piece, None if whole else settings.field, settings.max_document_bytes):
            if len(written.rejected) > settings.reject_limit:
                return written
            if isinstance(item, Rejection):
                written.rejected.append(item)
                continue
            written.content = (written.content + xxhash.xxh3_128_intdigest(item.data)) % (1 << 128)
            if whole:
                batch.append((piece, item, "train", item.text))
            else:
                sides = _sides(unit, item.text, item.data, settings, held_out, written)
                batch += [(piece, item, split, text) for split, text in sides]
            filled += len(item.data)
            if filled >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
                flush()
    if batch:
        flush()
    return written


def _rows(encoder: AnyEncoder, texts: list[str]) -> list[list[Row] | str]:
    """The rows of each document, or why there are none."""
    if isinstance(encoder, Encoder):
        # A tokenizer may drop all characters that it does not know.
        none = "the tokenizer gives no token for it"
        return [[Row(ids, ids[:0])] if len(ids) else none for ids in encoder.encode(texts)]
    found: list[list[Row] | str] = []
    for text in texts:
        try:
            found.append(encoder.rows(text))
        except RefusedError as error:
            found.append(str(error))
    return found


def _sides(
    unit: Unit, text: str, data: bytes, settings: WorkerSettings, held_out: _HeldOut, written: _Written
) -> list[tuple[Split, str]]:
    """A text by split, counted in `written`; nothing when --validation-source has it. `data` decides: the text's bytes,
    or what a conversation trains."""
    hashed = xxhash.xxh3_128_intdigest(data)
    if unit.validation:
        written.hashes += hashed.to_bytes(16, "big")
        return [("validation", text)]
    if hashed in held_out:
        written.left_out += 1
        return []
    sides = parts(text, data, settings.validation_fraction, settings.cut_bytes)
    written.cut += len(sides) > 1
    written.lowest_draw = min(written.lowest_draw, draw(data))
    return sides


def _write_tokens(
    unit: Unit,
    piece: Piece,
    settings: WorkerSettings,
    encoder: TokenEncoder,
    writers: dict[str, _ShardWriter],
    held_out: _HeldOut,
    written: _Written,
) -> None:
    """The documents that begin in a range of a file of ids: in place where the file has them as a shard does, and the
    unit is of this range alone; else copied. Raises DataError: an id is outside the vocabulary."""
    file = token_corpora.read(piece.path)
    borders = file.documents(piece.start, piece.stop, encoder.separator_id)
    if len(borders) < 2:
        return
    ids = file.ids[borders[0] : borders[-1]]
    encoder.check(ids, piece.label, int(borders[0]))
    ends = borders[1:] - borders[0]
    full = np.diff(borders) > 0
    separated = bool(full.all() and (ids[ends - 1] == encoder.separator_id).all())
    starts = np.concatenate([[0], ends[:-1]])
    plain = file.begin is not None and ids.dtype.itemsize == np.dtype(settings.dtype).itemsize
    as_it_is = separated and plain and len(unit.pieces) == 1 and not unit.validation and settings.chat is None
    if as_it_is and not _any_held_out(ids, starts, ends, settings, held_out):
        held = int((borders[:-1] >= len(file.ids) * (1 - settings.validation_fraction)).sum())
        begin = (file.begin or 0) + int(borders[0]) * ids.dtype.itemsize
        written.in_place = _in_place(unit, ids, ends, held, begin, Path(settings.out))
        written.content = xxhash.xxh3_128_intdigest(ids.data)
        return
    chosen: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        row = encoder.row(ids[start:end])
        data = row.ids.tobytes()
        written.content = (written.content + xxhash.xxh3_128_intdigest(data)) % (1 << 128)
        if not len(row.ids):
            written.rejected.append(Rejection(piece.label, "row", number, "empty document"))
            continue
        for split, _ in _sides(unit, "", data, settings, held_out, written):
            chosen[split].append(row)
    for split in SPLITS:
        writers[split].write(chosen[split], None if settings.chat else encoder.separator_id)


def _any_held_out(
    ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, settings: WorkerSettings, held_out: _HeldOut
) -> bool:
    """True if one of the documents, each with an end token, is in --validation-source."""
    if settings.held_out is None:
        return False
    documents = zip(starts.tolist(), ends.tolist(), strict=True)
    return any(xxhash.xxh3_128_intdigest(ids[start : end - 1].tobytes()) in held_out for start, end in documents)


def _in_place(
    unit: Unit, ids: np.ndarray, ends: np.ndarray, held: int, begin: int, out: Path
) -> dict[Split, dict[str, Any] | None]:
    """The manifest's entries of a unit of one piece, and a link to its file for each.

    `ends`: of the documents, in `ids`. `held`: how many of them, the last ones, are for validation. `begin`: bytes of
    the file before the first id.
    """
    piece, documents = unit.pieces[0], len(ends) - held
    border = int(ends[documents - 1]) if documents else 0
    parts: dict[Split, tuple[int, int, int]] = {
        "train": (0, border, documents),
        "validation": (border, len(ids), held),
    }
    entries: dict[Split, dict[str, Any] | None] = {}
    for split, (first, last, count) in parts.items():
        path = out / f"{split}-{unit.index:05d}.bin"
        path.unlink(missing_ok=True)
        entries[split] = None
        if count:
            path.symlink_to(piece.path)
            entries[split] = {
                "file": path.name,
                "tokens": last - first,
                "documents": count,
                "xxh3": xxhash.xxh3_64_hexdigest(ids[first:last].data),
                "begin": begin + first * ids.dtype.itemsize,
                "bytes": os.path.getsize(piece.path),
            }
    return entries


def encoder_of(folder: Path, settings: WorkerSettings) -> AnyEncoder:
    """What makes rows of documents with the tokenizer in a folder. Raises DataError: it cannot be loaded."""
    chat = settings.chat
    if settings.ids_field is not None:
        return TokenEncoder(folder, settings.ids_field, np.dtype(settings.dtype), counted=chat is not None)
    if chat is None:
        return Encoder(folder)
    return ChoiceEncoder(folder, chat) if chat.choices else ChatEncoder(folder, chat)


def _jobs_from(stream: Any) -> queue.Queue[str]:
    """Lines of `stream` as they come. When it ends, the parent is gone (even by kill -9) and so is this process."""
    jobs: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in stream:
            jobs.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return jobs


def main() -> None:
    """The worker's loop. Its first line is the settings, each further line a unit; it ends when the input ends."""
    # Standard output carries the answers; whatever a library prints must not get between them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    jobs = _jobs_from(sys.stdin)
    settings = WorkerSettings.from_dict(json.loads(jobs.get()))
    folder = Path(settings.out) / "tokenizer"
    try:
        plugin_source.use(settings.plugins, settings.fields)
        encoder = encoder_of(folder, settings)
        while True:
            unit = Unit.from_dict(json.loads(jobs.get()))
            record = process_unit(unit, settings, encoder, lambda size: answer({"progress": size}))
            answer({"done": record})
    except UserError as error:
        answer({"error": str(error)})


# --- the parent's side ---
#
# Plain subprocesses and pipes, not multiprocessing: nothing appears in /dev/shm, a worker that is killed shows as
# the end of its pipe instead of a hang, and when the parent dies (kill -9) the workers see the end of theirs.


class _Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        self.unit: Unit | None = None
        self._partial_line = b""
        self.process = subprocess.Popen(
            # -P: a corpus of code may lie in the current folder, and its queue.py must not be imported for Python's.
            [sys.executable, "-P", "-m", "llmtrain.data.prepare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One core a worker: the tokenizers' own threads would fight over the cores that the workers fill.
            env=child_environment(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1"),
            start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone, which then ends the workers
        )
        self._send(asdict(settings))

    def give(self, unit: Unit) -> None:
        self.unit = unit
        self._send(unit.as_dict())

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; the end of its output will tell

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived. Raises DataError when the worker is gone."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise DataError(self._obituary(self.process.wait()))
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _obituary(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "the machine may be out of memory: use fewer --processes" if code == -signal.SIGKILL else "see above"
        return (
            f"a worker (process {self.process.pid}) {how} ({hint}); run the same command again: "
            "finished shards are kept"
        )

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                pass
        self.process.wait()


def run_units(
    units: Iterable[Unit],
    settings: WorkerSettings,
    processes: int,
    on_progress: Callable[[Unit, int], None],
    on_done: Callable[[Unit, dict[str, Any]], None],
) -> None:
    """Process `units` in `processes` workers. An exception, Ctrl-C included, leaves no worker behind."""
    waiting = list(reversed(list(units)))
    workers: list[_Worker] = []
    with selectors.DefaultSelector() as selector:
        try:
            for _ in range(min(processes, len(waiting))):
                worker = _Worker(settings)
                workers.append(worker)
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
                worker.give(waiting.pop())
            while any(worker.unit is not None for worker in workers):
                for key, _ in selector.select():
                    _handle(key.data, waiting, on_progress, on_done)
        finally:
            for worker in workers:
                worker.end()


def _handle(
    worker: _Worker,
    waiting: list[Unit],
    on_progress: Callable[[Unit, int], None],
    on_done: Callable[[Unit, dict[str, Any]], None],
) -> None:
    for message in worker.receive():
        assert worker.unit is not None
        if "progress" in message:
            on_progress(worker.unit, message["progress"])
        elif "error" in message:
            raise DataError(message["error"])
        else:
            finished, worker.unit = worker.unit, None
            # The next unit first: the worker computes while the parent keeps its books.
            if waiting:
                worker.give(waiting.pop())
            on_done(finished, message["done"])


if __name__ == "__main__":
    main()
