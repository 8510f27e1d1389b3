"""Which data each step of a run reads (Course), and its batches for one rank.

TrainLoader reads ahead in a thread; validation_batches iterates once over a fixed set of sequences.

Every rank computes its sequences from the same integers. So all ranks have the same number of steps and micro-batches
by construction, and a global batch has the same sequences for any number of ranks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmtrain.base import log, units
from llmtrain.base.errors import DataError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.config.stages import Batch, Stages
from llmtrain.data.batches import MicroBatch
from llmtrain.data.kinds import RowKind
from llmtrain.data.sequences import TokenSequence
from llmtrain.data.stream.order import rows_of
from llmtrain.data.stream.train_data import TrainData

_STEPS_AHEAD = 4
_POLL_S = 0.05
_BEAT_S, _WARN_S = 1.0, 10.0
_FETCHED = 64
"""Sequences per request to a store during an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which data a step reads, and its batch."""

    stage: int
    data: TrainData
    index: int
    """Number of the step's first sequence in the order of the data."""
    batch: Batch


class Course:
    """Which data and sequences each step of a run reads. A step is named by the number of steps before it.

    A stage continues its data where an earlier stage or the checkpoint stopped. Later steps follow from the stages;
    earlier ones are in `record`, which a checkpoint holds.
    """

    def __init__(self, stages: Stages, data: Sequence[TrainData]) -> None:
        """`data`: the data of each stage; stages with the same data share one object."""
        assert len(stages) == len(data)
        self.stages, self.data = stages, tuple(data)
        self._sharing = [[other for other, each in enumerate(data) if each is own] for own in data]
        self._ahead = [0] * len(data)
        """Sequences by which a data set is ahead of what the stages say, by the number of its first stage."""
        self._since, self._before = 0, list[dict[str, Any]]()
        """The first step of this launch, and the record of the steps before it."""
        self.first_number = 0
        """Number of the first stage: above 0 in a run that continues another one with other data."""

    def at(self, step: int) -> Reading:
        stage = self.stages.number(step)
        return Reading(
            stage=stage, data=self.data[stage], index=self._index(stage, step), batch=self.stages[stage].batch
        )

    def done(self, step: int) -> Reading:
        """Return data and batch of the step before `step`; for step 0 those of step 0."""
        return self.at(max(0, step - 1))

    def seek(self, step: int, index: int) -> None:
        """Let `step` begin at sequence `index` of its stage's data."""
        stage = self.stages.number(step)
        self._ahead[self._sharing[stage][0]] += index - self._index(stage, step)

    def go_on(self, step: int, record: list[dict[str, Any]]) -> None:
        """Continue at `step` of a checkpoint, which holds `record`."""
        left = {entry["fingerprint"]: entry["next"] for entry in record}
        for first in {sharing[0] for sharing in self._sharing}:
            planned = self.stages.sequences(step, self._sharing[first])
            self._ahead[first] = left.get(self.data[first].fingerprint, 0) - planned
        if record:
            last, trained = record[-1], self.done(step)
            goes_on = last["fingerprint"] == trained.data.fingerprint
            self.first_number = last["stage"] - trained.stage if goes_on else last["stage"] + 1 - self.at(step).stage
        self._since, self._before = step, record

    def describe(self, stage: int) -> dict[str, Any]:
        batch, number = self.stages[stage].batch, self.first_number + stage
        first, exclude = max(self._since, self.stages[stage].first_step), self.stages[stage].data.exclude
        return {
            "stage": number,
            "from_step": next((entry["from_step"] for entry in self._before if entry["stage"] == number), first),
            "folders": self.stages[stage].data.folders,
            "fingerprint": self.data[stage].fingerprint,
            "sequence_length": batch.sequence_length,
            "global_batch": batch.global_batch,
            **({"rope": self.stages[stage].rope} if self.stages[stage].rope else {}),
            **({"exclude": list(exclude), "order": self.data[stage].order} if exclude else {}),
        }

    def record(self, step: int, index: int) -> list[dict[str, Any]]:
        """Return what was read before a step, for a checkpoint. `index`: the first sequence of the step."""
        found = [dict(entry) for entry in self._before]
        if step <= self._since:
            return found
        for number in range(self.stages.number(self._since), self.stages.number(step - 1) + 1):
            what = self.describe(number)
            end = self.stages[number + 1].first_step if number + 1 < len(self.stages) else step
            if found and found[-1]["stage"] == what["stage"]:
                found.pop()
            found.append({**what, "next": self._index(number, min(step, end))})
        for entry in reversed(found):
            if entry["fingerprint"] == self.at(step).data.fingerprint:
                entry["next"] = index
                break
        return found

    def _index(self, stage: int, step: int) -> int:
        sharing = self._sharing[stage]
        return self.stages.sequences(step, sharing) + self._ahead[sharing[0]]


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one rank in one optimizer step."""

    micro_batches: list[MicroBatch]
    first_index: int
    """Number of the step's first sequence, over all ranks."""
    sequences: int
    """Number of sequences of the step, over all ranks."""
    stage: int = 0
    """Number of the step's stage."""
    excluded: int = 0
    """Number of sequences in which no token counts (data.exclude, data.skip_steps), over all ranks."""

    @property
    def tokens(self) -> int:
        return (self.sequences - self.excluded) * self.micro_batches[0].inputs.shape[1]


def _micro_batch(
    kind: RowKind, read: Callable[[int], TokenSequence], indices: list[int], rows: int, pin_memory: bool
) -> MicroBatch:
    """Make a micro-batch with `rows` rows of the sequences `indices`; rows beyond them repeat one and do not count."""
    sequences = [read(index) for index in indices or [0]]
    sequences += sequences[-1:] * (rows - len(sequences))
    micro = kind.batch(sequences, indices)
    return micro.pinned() if pin_memory else micro


class TrainLoader:
    """Endless iterator over optimizer steps. Its state is `next_index`, the sequence where the next step begins.

    A step at sequence i covers [i, i + global_batch). Micro-batch m of rank r takes micro_batch sequences of the step
    from number (m * data_parallel + r) * micro_batch on; if ranks have unequal shares, those of `order.rows_of`. Data
    and batch are those of the step's stage. A daemon thread builds a few steps ahead; `next` raises its errors.
    """

    def __init__(
        self,
        course: Course,
        *,
        rank: int,
        start_index: int = 0,
        pin_memory: bool = False,
        sequences: Sequence[int] | None = None,
        step: int = 0,
    ) -> None:
        """`sequences`: each rank's number of sequences in a step; None: equal numbers. `step`: steps done before."""
        batch = course.at(step).batch
        assert batch.global_batch == batch.micro_batch * batch.accumulation * batch.data_parallel, batch
        assert 0 <= rank < batch.data_parallel and start_index >= 0, (rank, batch, start_index)
        self._course = course
        self._sequences = sequences
        self._rank = rank
        self._pin_memory = pin_memory
        self._step = step
        self._course.seek(step, start_index)
        self.next_index = start_index
        self.data_wait_s = 0.0
        """Seconds that `next` has waited for data since the start."""
        self._begin()

    def _begin(self) -> None:
        self._ready: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=_STEPS_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(self._step,), name="data", daemon=True)
        self._thread.start()

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> StepBatch:
        if self._closed.is_set():
            raise StopIteration
        waited_from = time.perf_counter()
        item = self._ready_item()
        self.data_wait_s += time.perf_counter() - waited_from
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._step += 1
        self.next_index = self._course.at(self._step).index
        return item

    def _ready_item(self) -> StepBatch | BaseException:
        """Wait for the next step. While a store does not answer, the rank continues to send heartbeats."""
        warned = False
        while True:
            try:
                return self._ready.get(timeout=_BEAT_S)
            except queue.Empty:
                from llmtrain.data.cache import waiting  # most sets are in no store

                wait = waiting()
            if wait is None:
                continue
            heart.beat()
            waited_s, store = wait
            if waited_s > _WARN_S and not warned:
                log.warn(f"{store}: has not answered for {units.duration(waited_s)}, and a step waits for its data")
                warned = True

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; later calls do nothing. `next` then raises StopIteration."""
        self._closed.set()
        self._thread.join()

    def seek(self, index: int, step: int | None = None) -> None:
        """Continue at sequence `index` with step number `step`; None: the next step's number."""
        step = self._step if step is None else step
        if (step, index) != (self._step, self.next_index):
            self.close()
            self._course.seek(step, index)
            self._step, self.next_index = step, index
            self._begin()

    @property
    def shares(self) -> list[int] | None:
        return None if self._sequences is None else list(self._sequences)

    def share(self, sequences: Sequence[int]) -> None:
        """Change how many sequences of a step each rank has, from the next step on. Steps read ahead are made again."""
        self.close()
        self._sequences = sequences
        self._begin()

    def build(self, step: int) -> StepBatch:
        reading = self._course.at(step)
        batch, micro_batches = reading.batch, []
        shares = self._sequences or (batch.micro_batch * batch.accumulation,) * batch.data_parallel
        rows = [rows_of(shares, batch.accumulation, m, self._rank) for m in range(batch.accumulation)]
        reading.data.fetch([reading.index + row for each in rows for row in each])
        read, excluded = self._reader(step, reading)
        for each in rows:
            indices = [reading.index + row for row in each]
            micro_batches.append(_micro_batch(reading.data.kind, read, indices, len(indices), self._pin_memory))
        return StepBatch(micro_batches, reading.index, batch.global_batch, stage=reading.stage, excluded=excluded)

    def _reader(self, step: int, reading: Reading) -> tuple[Callable[[int], TokenSequence], int]:
        """Return the function that reads a step's sequences, and in how many of them no token counts."""
        config = self._course.stages[reading.stage].data
        if not (config.exclude or config.skip_steps):
            return reading.data.sequence_at, 0
        data, all_of_step = reading.data, step + 1 in (config.skip_steps or ())
        sequences = range(reading.index, reading.index + reading.batch.global_batch)
        left_out = {index for index in sequences if all_of_step or data.place_of(index) in data.excluded}

        def read(index: int) -> TokenSequence:
            sequence = data.sequence_at(index)
            return sequence.emptied(data.separator_id) if index in left_out else sequence

        return read, len(left_out)

    def row(self, step: int, index: int | None) -> MicroBatch:
        """Return a micro-batch of sequence `index` of a step; None: of a sequence without a counted token."""
        reading = self._course.at(step)
        read, indices = self._reader(step, reading)[0], [] if index is None else [index]
        return _micro_batch(reading.data.kind, read, indices, 1, self._pin_memory)

    def _read_ahead(self, step: int) -> None:
        item: StepBatch | BaseException
        while not self._closed.is_set():
            try:
                item = self.build(step)
            except BaseException as error:  # the consumer raises it: a dead thread would let it wait for ever
                item = error
            while not self._closed.is_set():
                try:
                    self._ready.put(item, timeout=_POLL_S)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            step += 1


def check_validation(data: TrainData) -> None:
    """Raise DataError when the data has no validation sequence."""
    if data.validation_sequences == 0:
        raise DataError(
            f"{data.name}: its validation split does not fill one sequence of data.sequence_length "
            f"{data.sequence_length}; prepare it with a larger --validation-fraction or with --validation-source FILE, "
            "or set train.eval to off"
        )


def validation_batches(
    data: TrainData, *, sequences: int, micro_batch: int, rank: int, data_parallel: int, pin_memory: bool = False
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of the first `sequences` validation sequences (all, if there are fewer).

    Every rank gets the same number of micro-batches of the same shape: under ZeRO 3 a rank with one fewer would leave
    the others waiting in a collective. Raises DataError when the data has no validation sequence.
    """
    assert sequences >= 1 and 0 <= rank < data_parallel, (sequences, rank, data_parallel)
    check_validation(data)
    total = min(sequences, data.validation_sequences)
    read, fetch = data.validation_sequence_at, data.fetch_validation
    return batches_of(data.kind, read, total, micro_batch, Dealt(rank, data_parallel, pin_memory), fetch)


class Dealt(NamedTuple):
    """Which of the micro-batches are this rank's, and whether to put them into page-locked memory."""

    rank: int = 0
    data_parallel: int = 1
    pin_memory: bool = False


def batches_of(
    kind: RowKind,
    read: Callable[[int], TokenSequence],
    total: int,
    micro_batch: int,
    to: Dealt,
    fetch: Callable[[Sequence[int]], None] = lambda _: None,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank that cover sequences 0 to `total` - 1 once, as in `validation_batches`.

    `fetch` is called with the numbers of the next sequences before they are read.
    """
    firsts = [start + to.rank * micro_batch for start in range(0, total, micro_batch * to.data_parallel)]
    dealt = [list(range(first, min(first + micro_batch, total))) for first in firsts]
    each = max(1, _FETCHED // micro_batch)
    for number, indices in enumerate(dealt):
        if number % each == 0:
            fetch([index for own in dealt[number : number + each] for index in own])
        yield _micro_batch(kind, read, indices, micro_batch, to.pin_memory)
