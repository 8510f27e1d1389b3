"""Find the documents that a step of a run has read, and the steps that have read a document.

Both follow from the order of the run's sequences (stream/order.py), the documents' origins and events.jsonl.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain.base import units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.config.reader import read_saved
from llmtrain.config.stages import DataConfig
from llmtrain.config.topology import Degrees
from llmtrain.data.manifest import SPLITS
from llmtrain.data.origins import Origin
from llmtrain.data.stream.order import rows_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenize import Encoder
from llmtrain.tracking.local import read_rows

_QUOTED_TOKENS = 24
"""Most tokens of a document that are shown."""


@dataclass(frozen=True)
class Span:
    """Steps of a run that read one data set in one batch."""

    after: int
    """Number of steps that were done before the first step of the span."""
    until: int | None
    """Number of steps that were done after its last step; None: the span is the run's last one so far. The next span's
    `after` is the same number, unless a part of the run has moved the run's position."""
    next: int
    """First sequence of the span's first step."""
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
        """Return True if a step read a sequence but counted none of its tokens."""
        return step in (self.event["data"].get("skip_steps") or ()) or data.place_of(index) in data.excluded

    def data(self) -> TrainData:
        """Open the data of the span. Raises DataError: it is missing, or has changed since the run read it."""
        data = TrainData(read_saved(DataConfig, self.event["data"]))
        if data.fingerprint != self.event["fingerprint"]:
            raise DataError(
                f"{', '.join(self.folders)}: it is not the data that the run has read: it was prepared again, or is "
                "elsewhere (paths count from the current folder)"
            )
        return data


def spans(run: Path) -> list[Span]:
    """Return the run's spans in the order of its steps; a step that was repeated is in the span that read it last.

    Raises DataError: the run's folder has no record of its data.
    """
    rows, _ = read_rows(run / "events.jsonl")
    found: list[Span] = []
    try:
        for row in rows:
            if row.get("kind") == "reads":
                event = {**(found[-1].event if found else {}), **row}  # an event may name only a position
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
        raise DataError(
            f"{run}/events.jsonl: the row {untrusted.shown(row, 100)} does not say which data is read from "
            "which step on; restore it, or remove it if it is foreign"
        ) from None
    if not found:
        raise DataError(f"--run {run}: its events.jsonl does not say what it has read; give the folder of a run")
    return found


def sequences(span: Span, step: int, rank: int | None) -> Iterator[int]:
    """Yield the sequences of a step (steps begin at 1), or only those that a rank reads. Raises DataError."""
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
    """Return the lines that describe the documents of a sequence. Raises DataError."""
    data = span.data()
    member, number = data.place_of(index)
    origins = data.reader_of(member).origins(number, data.origins_of(member))
    return [shown_origin(data, member, origin) for origin in origins]


def shown_origin(data: TrainData, member: int, origin: Origin) -> str:
    length = min(origin.end - origin.begin, _QUOTED_TOKENS)
    ids = data.streams("train")[member].read(origin.begin, length)
    text = untrusted.shown(Encoder(data.tokenizer_dir).decode(ids.tolist()))
    return f'{origin.file}:{origin.record}, {units.counted(origin.end - origin.begin, "token")}: "{text}"'


class Where:
    """Finds documents of one prepared folder in the steps of a run, and steps with a document."""

    def __init__(self, folder: str, run: Path) -> None:
        """Raises DataError."""
        self._folder, self._run = folder, run
        self._spans = spans(run)
        self._opened: dict[str, TrainData] = {}

    def _data(self, span: Span) -> tuple[TrainData, int] | None:
        """Return the span's data and the number of this folder in its mixture; None: the span does not read it."""
        key = str(span.event["fingerprint"])
        if key not in self._opened:
            self._opened[key] = span.data()
        data = self._opened[key]
        same = [
            place for place, each in enumerate(span.folders) if os.path.realpath(each) == os.path.realpath(self._folder)
        ]
        return (data, same[0]) if same else None

    def at_step(self, step: int, rank: int | None) -> Iterator[str]:
        """Yield the lines that describe a step's documents. Raises DataError: the run has not done this step, or read
        other data in it."""
        span = next((each for each in self._spans if each.after < step <= (each.until or step)), None)
        if span is None and step <= (first := self._spans[0].after):
            raise DataError(f"--step {step}: the run's steps are numbered from {first + 1}")
        if span is None:
            raise DataError(f"--step {step}: the run skipped this number: one of its parts moved the run's position")
        if step > (last := last_step(self._run)):
            raise DataError(f"--step {step}: the run has done {last} steps")
        found = self._data(span)
        if found is None:
            raise DataError(f"{self._folder}: at step {step} the run read other data: {', '.join(span.folders)}")
        data, member = found
        reader = data.reader_of(member)
        known = data.origins_of(member)
        indices = list(sequences(span, step, rank))
        whose = "" if rank is None else f" of rank {rank}"
        mine = [(index, number) for index in indices for at, number in [data.place_of(index)] if at == member]
        yield (
            f"step {step}: {units.counted(len(indices), 'sequence')}{whose}, {len(mine)} of them from {self._folder}"
        )
        for index, number in mine:
            yield f"sequence {index}" + (", left out" if span.leaves_out(data, step, index) else "")
            for origin in reader.origins(number, known):
                yield f"  {shown_origin(data, member, origin)}"

    def of_source(self, file: str, record: int) -> Iterator[str]:
        """Yield for each document of the record its place, the steps that read it, and those that left it out.

        Raises DataError: the record gave no document, or the run has not read the folder.
        """
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
                f"--source {file}:{record}: that record gave no training document of {self._folder}; files are named "
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
        """Yield (step, whether it left the document out) for each step that read the document."""
        last = last_step(self._run)
        for span in self._spans:
            if (found := self._data(span)) is None:
                continue
            data, member = found
            end = span.sequence_at(span.until or max(last, span.after))
            for number in data.reader_of(member).sequences_of(origin):
                for index in data.sequences_with(member, number, end):
                    if index >= span.next:
                        step = span.after + (index - span.next) // span.batch + 1
                        yield step, span.leaves_out(data, step, index)


def last_step(run: Path) -> int:
    rows, _ = read_rows(run / "metrics.jsonl")
    return max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
