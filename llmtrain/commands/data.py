"""`llmtrain data show|where DATA`: the content of a prepared folder.

`show` prints rows of conversations with the counted tokens marked; of texts the documents. `where` computes the
documents that a step of a run has read, and the steps that have read a document: from the order of a run's sequences
(data/stream/order.py), the origin of each document (data/origins.py), and events.jsonl.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from llmtrain.base import units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.commands import completion
from llmtrain.commands.arguments import Parser
from llmtrain.config.reader import read_saved
from llmtrain.config.stages import DataConfig
from llmtrain.config.topology import Degrees
from llmtrain.data.manifest import SPLITS, Manifest, Split
from llmtrain.data.origins import Origin
from llmtrain.data.shards import PreparedSet, TokenStream
from llmtrain.data.stream.order import rows_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.stream.windows import ends_in
from llmtrain.data.tokenize import Encoder
from llmtrain.tracking.local import read_rows

_STYLES = {(True, False): "bold green", (True, True): "bold magenta", (False, False): "dim", (False, True): "cyan"}
"""Terminal style of each (counted, special token)."""

_PREFIX = len("counted | ")
_SHOWN_TOKENS = 2000
"""Limit of shown tokens of one text: a document may be a book."""
_QUOTED_TOKENS = 24
"""Limit of shown tokens of a document that `where` names."""
_READ_TOKENS = 4 << 20


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one kind."""

    text: str
    counted: bool
    special: bool
    """One token with a name, instead of text."""


@dataclass(frozen=True)
class Shown:
    heading: str
    runs: list[Run]


def shown_text(data: PreparedSet, encoder: Encoder, split: Split, index: int) -> Shown:
    """Return document `index` of a split of texts, shortened. Raises DataError."""
    stream, documents = data.split(split), data.manifest.documents[split]
    if not 0 <= index < documents:
        raise DataError(f"--index {index}: the {split} split of {data.name} has documents 0 to {documents - 1}")
    start, end = _document(stream, data.manifest, index)
    ids = stream.read(start, min(end - start, _SHOWN_TOKENS))
    more = f", the first {_SHOWN_TOKENS} of them" if end - start > _SHOWN_TOKENS else ""
    heading = f"document {index} of {split}: {end - start} tokens{more}"
    return Shown(heading, _runs(ids.tolist(), np.ones(len(ids), bool), encoder))


def _document(stream: TokenStream, manifest: Manifest, index: int) -> tuple[int, int]:
    begin = at = seen = 0
    while at < stream.tokens:
        length = min(_READ_TOKENS, stream.tokens - at)
        ids = np.append(stream.read(at, min(length + 1, stream.tokens - at)), manifest.separator_id)  # after the last
        ends = np.flatnonzero(ends_in(ids[: length + 1], manifest.separator_id, manifest.doubled))
        if index < seen + len(ends):
            begin = begin if index == seen else at + int(ends[index - seen - 1]) + 1
            return begin, at + int(ends[index - seen]) + 1
        begin = at + int(ends[-1]) + 1 if len(ends) else begin
        seen, at = seen + len(ends), at + length
    return begin, stream.tokens


def shown_row(data: PreparedSet, encoder: Encoder, split: Split, index: int) -> Shown:
    stream = data.split(split)
    lengths = stream.row_lengths()
    if not 0 <= index < len(lengths):
        raise DataError(f"--index {index}: the {split} split of {data.name} has rows 0 to {len(lengths) - 1}")
    start, length = int(lengths[:index].sum()), int(lengths[index])
    ids, counted = stream.read(start, length), stream.counted(start, length)
    assert counted is not None
    chat = data.manifest.chat
    assert chat is not None
    side = (" (chosen)", " (rejected)")[index % 2] if chat.pairs else ""
    if chat.unpaired:
        side = " (desired)" if stream.judged()["desirable"][index] else " (not desired)"
    if chat.choices:
        entries = stream.choices()[: index + 1]
        side = f" (question {int(entries['first'].sum()) - 1}{', the answer' if entries['right'][index] else ''})"
    heading = f"row {index} of {split}{side}: {length} tokens, {int(counted.sum())} counted"
    return Shown(heading, _runs(ids.tolist(), counted, encoder))


def _runs(ids: list[int], counted: np.ndarray, encoder: Encoder) -> list[Run]:
    runs: list[Run] = []
    begin = 0
    for at in range(1, len(ids) + 1):
        special = ids[begin] in encoder.special
        same = at < len(ids) and counted[at] == counted[begin] and not special and ids[at] not in encoder.special
        if not same:
            runs.append(Run(encoder.decode(ids[begin:at]), bool(counted[begin]), special))
            begin = at
    return runs


def _print(row: Shown, *, marks: bool) -> None:
    """Print a row; `marks`: mark counted lines in text, for output without colours."""
    from rich.console import Console
    from rich.text import Text

    lines: list[Text] = []
    before = None
    for run in row.runs:
        if marks and run.counted is not before and lines and len(lines[-1]) == _PREFIX:  # a line break came last
            lines.pop()
        for number, part in enumerate(untrusted.shown(run.text, lines=True).split("\n")):
            if number or run.counted is not before:
                lines.append(Text(("counted | " if run.counted else "        | ") if marks else "", style="dim"))
            before = run.counted
            lines[-1].append(part, style=_STYLES[run.counted, run.special])
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(row.heading, style="bold"))
    for line in lines:
        line.rstrip()
        console.print(line)


@dataclass(frozen=True)
class Span:
    """Steps of a run that read one data set in one batch."""

    after: int
    """Steps done before its first."""
    until: int | None
    """Steps done after its last; None: it is the run's last so far. This is the next span's `after`, unless a part
    of the run has moved its position."""
    next: int
    """First sequence of its first step."""
    event: dict[str, Any]

    @property
    def batch(self) -> int:
        return int(self.event["global_batch"])

    def sequence_at(self, step: int) -> int:
        """Return the first sequence after `step` steps."""
        return self.next + (step - self.after) * self.batch

    @property
    def folders(self) -> list[str]:
        return list(read_saved(DataConfig, self.event["data"]).folders)

    def leaves_out(self, data: TrainData, step: int, index: int) -> bool:
        """Return True if a step has read a sequence and counted no token of it."""
        return step in (self.event["data"].get("skip_steps") or ()) or data.place_of(index) in data.excluded

    def data(self) -> TrainData:
        """Open the data. Raises DataError: it is missing, or another one."""
        data = TrainData(read_saved(DataConfig, self.event["data"]))
        if data.fingerprint != self.event["fingerprint"]:
            raise DataError(
                f"{', '.join(self.folders)}: it is not the data that the run has read: it was prepared again, or is "
                "elsewhere (paths count from the current folder)"
            )
        return data


def spans(run: Path) -> list[Span]:
    """Return the run's data in the order of its steps, the last reading of a repeated step. Raises DataError: the
    folder has no record."""
    rows, _ = read_rows(run / "events.jsonl")
    found: list[Span] = []
    try:
        for row in rows:
            if row.get("kind") == "reads":
                event = {**(found[-1].event if found else {}), **row}  # an event with a place only keeps the data
            elif row.get("kind") == "shares" and found:
                event = {**found[-1].event, "shares": row["after"], "next": found[-1].sequence_at(int(row["step"]))}
            else:
                continue
            step = int(row["step"])
            while found and found[-1].after >= step:
                found.pop()
            if found:
                found[-1] = replace(found[-1], until=int(row.get("trained", step)))
            found.append(Span(step, None, int(event["next"]), event))
            if not (found[-1].batch and found[-1].folders):  # of numbers and texts
                raise LookupError
    except (LookupError, TypeError, ValueError, AttributeError):
        raise DataError(f"{run}/events.jsonl: the row {untrusted.shown(row, 100)} does not say which data is read from "
                        "which step on; restore it, or remove it if it is foreign") from None  # fmt: skip
    if not found:
        raise DataError(f"--run {run}: its events.jsonl does not say what it has read; give the folder of a run")
    return found


def sequences(span: Span, step: int, rank: int | None) -> Iterator[int]:
    """Yield the sequences of a step, numbered from 1, or those of a rank's data-parallel group. Raises DataError."""
    first = span.sequence_at(step - 1)
    if rank is None:
        yield from range(first, first + span.batch)
        return
    degrees = Degrees(**span.event["degrees"])
    if not 0 <= rank < degrees.world_size:
        raise DataError(f"--rank {rank}: at step {step} the run had ranks 0 to {degrees.world_size - 1}")
    group, accumulation = degrees.place(rank).data, int(span.event["accumulation"])
    shares = span.event.get("shares") or [span.batch // degrees.data] * degrees.data
    for micro in range(accumulation):
        for row in rows_of(shares, accumulation, micro, group):
            yield first + row


def documents_of(span: Span, index: int) -> list[str]:
    """Return lines on the documents of a sequence. Raises DataError."""
    data = span.data()
    member, window = data.place_of(index)
    origins = data.windows_of(member).origins(window, data.origins_of(member))
    return [shown_origin(data, member, origin) for origin in origins]


def shown_origin(data: TrainData, member: int, origin: Origin) -> str:
    length = min(origin.end - origin.begin, _QUOTED_TOKENS)
    ids = data.streams("train")[member].read(origin.begin, length)
    text = untrusted.shown(Encoder(data.tokenizer_dir).decode(ids.tolist()))
    return f'{origin.file}:{origin.record}, {units.counted(origin.end - origin.begin, "token")}: "{text}"'


class Where:
    """One prepared folder in the order of a run."""

    def __init__(self, folder: str, run: Path) -> None:
        """Raises DataError."""
        self._folder, self._run = folder, run
        self._spans = spans(run)
        self._opened: dict[str, TrainData] = {}

    def _data(self, span: Span) -> tuple[TrainData, int] | None:
        """Return the span's data, and this folder's place among its sets; None: it is none of them."""
        key = str(span.event["fingerprint"])
        if key not in self._opened:
            self._opened[key] = span.data()
        data = self._opened[key]
        same = [
            place for place, each in enumerate(span.folders) if os.path.realpath(each) == os.path.realpath(self._folder)
        ]
        return (data, same[0]) if same else None

    def at_step(self, step: int, rank: int | None) -> Iterator[str]:
        """Yield lines on the documents of a step. Raises DataError: the run has no such step yet, or read other data
        there."""
        span = next((each for each in self._spans if each.after < step <= (each.until or step)), None)
        if span is None and step <= (first := self._spans[0].after):
            raise DataError(f"--step {step}: the run's steps are numbered from {first + 1}")
        if span is None:
            raise DataError(f"--step {step}: the run has none of that number: a part of it has moved its position")
        if step > (last := last_step(self._run)):
            raise DataError(f"--step {step}: the run has done {last} steps")
        found = self._data(span)
        if found is None:
            raise DataError(f"{self._folder}: at step {step} the run read other data: {', '.join(span.folders)}")
        data, member = found
        windows = data.windows_of(member)
        known = data.origins_of(member)
        indices = list(sequences(span, step, rank))
        whose = "" if rank is None else f" of rank {rank}"
        mine = [(index, window) for index in indices for at, window in [data.place_of(index)] if at == member]
        yield (
            f"step {step}: {units.counted(len(indices), 'sequence')}{whose}, {len(mine)} of them from {self._folder}"
        )
        for index, window in mine:
            yield f"sequence {index}" + (", left out" if span.leaves_out(data, step, index) else "")
            for origin in windows.origins(window, known):
                yield f"  {shown_origin(data, member, origin)}"

    def of_source(self, file: str, record: int) -> Iterator[str]:
        """Yield lines on the steps that have read a record's documents. Raises DataError: there are none."""
        first = next((found for span in self._spans if (found := self._data(span)) is not None), None)
        if first is None:
            raise DataError(f"{self._folder}: the run {self._run} has not read it")
        data, member = first
        known, held_out = (data.origins_of(member, split) for split in SPLITS)
        origins = list(known.find(file, record))
        if not origins and any(held_out.find(file, record)):
            yield f"{file}:{record} is held out for validation: no step reads it"
            return
        if not origins:
            raise DataError(
                f"--source {file}:{record}: no training document of {self._folder} is of that record; files are named "
                "relative to the --source that they were prepared from, lines count from 1, rows from 0"
            )
        for origin in origins:
            yield shown_origin(data, member, origin)
            steps = sorted(set(self._steps(origin)))
            read, left_out = ([str(step) for step, out in steps if out is which] for which in (False, True))
            yield f"  read in step {', '.join(read)}" if read else "  not read so far"
            if left_out:
                yield f"  left out of step {', '.join(left_out)} (data.exclude, data.skip_steps)"

    def _steps(self, origin: Origin) -> Iterator[tuple[int, bool]]:
        """Yield steps with the document, and whether they leave it out."""
        last = last_step(self._run)
        for span in self._spans:
            if (found := self._data(span)) is None:
                continue
            data, member = found
            end = span.sequence_at(span.until or max(last, span.after))
            for window in data.windows_of(member).windows_with(origin):
                for index in data.sequences_with(member, window, end):
                    if index >= span.next:
                        step = span.after + (index - span.next) // span.batch + 1
                        yield step, span.leaves_out(data, step, index)


def last_step(run: Path) -> int:
    rows, _ = read_rows(run / "metrics.jsonl")
    return max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="llmtrain data", description="Look at prepared data.")
    actions: Any = parser.add_subparsers(dest="action", required=True)
    show: Any = actions.add_parser(
        "show",
        description="Print rows of prepared conversations, and what of them is counted; of texts, documents.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    show.add_argument("data", metavar="DATA", help="the prepared folder, or its URL")
    show.add_argument("--split", choices=SPLITS, default="train", help="which rows")
    show.add_argument("--index", type=int, default=0, metavar="N", help="the first row, from 0")
    show.add_argument("--rows", type=int, default=1, metavar="N", help="how many rows")
    where: Any = actions.add_parser(
        "where",
        description="Say which documents a step of a run has read, or which steps have read a document.",
    )
    where.add_argument("data", metavar="DATA", help="the prepared folder, as the run named it, or its path")
    where.add_argument("--run", type=Path, required=True, metavar="RUN", help="folder of a run that was trained on it")
    asked = where.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=int, metavar="N", help="the documents that optimizer step N has read")
    asked.add_argument("--source", metavar="FILE:LINE", help="the steps that have read this line, row or document")
    where.add_argument("--rank", type=int, metavar="R", help="with --step: what rank R has read")
    completion.offer(parser)
    args = parser.parse_args(argv)
    if args.action == "where" and args.rank is not None and args.step is None:
        parser.error("--rank goes with --step")
    return args


def _where(args: argparse.Namespace) -> int:
    """Print the data of a step, or the steps that have read a record. Raises DataError."""
    known = Where(args.data, args.run)
    if args.step is not None:
        lines = known.at_step(args.step, args.rank)
    else:
        file, _, record = args.source.rpartition(":")
        if not record.isdecimal() or not file:
            raise DataError(f"--source {args.source}: write FILE:LINE, as `data where --step` does")
        lines = known.of_source(file, int(record))
    for line in lines:
        print(line)
    return 0


def main(argv: list[str]) -> int:
    """Raises DataError."""
    args = _arguments(argv)
    if args.action == "where":
        return _where(args)
    data = PreparedSet(args.data)
    chat = data.manifest.chat
    split = cast(Split, args.split)
    encoder = Encoder(data.tokenizer_dir)
    last = min(args.index + max(1, args.rows), data.manifest.documents[split])
    show = shown_text if chat is None else shown_row
    rows = [show(data, encoder, split, index) for index in range(args.index, max(last, args.index + 1))]
    for line in [] if chat is None else chat.notes():
        print(untrusted.shown(line))
    for row in rows:
        _print(row, marks=chat is not None)
    return 0
