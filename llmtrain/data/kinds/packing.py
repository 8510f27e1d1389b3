"""Pack complete rows into sequences by best fit; rows do not attend to each other or to the padding at the end."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from llmtrain.config.run import DataConfig
from llmtrain.data.sequences import IGNORED, AnswerSequence, TokenSequence
from llmtrain.data.token_stream import TokenStream

if TYPE_CHECKING:
    from llmtrain.data.origins import Origin, Origins

_AT_ONCE = 1 << 22
"""Tokens whose counted bits are read at once."""


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack complete rows into sequences: best fit, longest first, the same on every machine.

    Method: best-fit decreasing (D. S. Johnson et al., SIAM J. Comput. 3, 1974), done at once for all rows of a
    length and all sequences with the same room: a million rows take a fraction of a second, so every rank does it for
    itself. Returns (rows in the order of the sequences, int64 [rows]; each sequence's beginning in that order, int64
    [sequences + 1]).

    Args:
        lengths: int [rows], each from 1 to `capacity`.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes, starts = np.unique(-lengths[order].astype(np.int64), return_index=True)
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # tokens left in sequences, ascending
    with_room: dict[int, np.ndarray] = {}
    made = 0

    def put_back(some: np.ndarray, room: int) -> None:
        if room and len(some):
            if room not in with_room:
                insort(rooms, room)
            with_room[room] = np.concatenate([with_room.get(room, some[:0]), some])

    for size, records in zip((-sizes).tolist(), np.split(order, starts)[1:], strict=True):
        while len(records):
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms.pop(at)
                free = with_room.pop(room)
            else:
                room, new = capacity, -(-len(records) // (capacity // size))
                free = np.arange(made, made + new)
                made += new
            each = room // size
            taken = min(len(free), -(-len(records) // each))
            count = min(len(records), taken * each)
            sequence_of[records[:count]] = np.repeat(free[:taken], each)[:count]
            put_back(free[: taken - 1], room - each * size)
            put_back(free[taken - 1 : taken], room - (count - (taken - 1) * each) * size)
            put_back(free[taken:], room)
            records = records[count:]
    by_sequence = np.argsort(sequence_of, kind="stable")
    return by_sequence, np.searchsorted(sequence_of[by_sequence], np.arange(made + 1))


class RowReader:
    """Sequences of complete rows, padded with the separator."""

    taught: Any = None
    """The teacher's column of the split (`Taught`), if the run has one."""
    context: list[Any] | None = None

    def __init__(self, stream: TokenStream, config: DataConfig, separator_id: int, together: int = 1) -> None:
        """`together`: number of rows of a record, which are put into the same sequence."""
        self.stream, self._length, self._separator_id = stream, config.sequence_length, separator_id
        self._lengths = stream.row_lengths()
        self._starts = np.cumsum(self._lengths) - self._lengths
        sizes = self._sizes(together)
        order, first = (
            best_fit(sizes, self._length) if config.pack else (np.arange(len(sizes)), np.arange(len(sizes) + 1))
        )
        self._order = (order[:, None] * together + np.arange(together)).reshape(-1)
        self._first = first * together
        self.count = len(first) - 1

    def _sizes(self, together: int) -> np.ndarray:
        """Return the tokens of each record's rows together."""
        return self._lengths.reshape(-1, together).sum(1)

    def _rows(self, index: int) -> np.ndarray:
        return self._order[self._first[index] : self._first[index + 1]]

    def fetch(self, indices: Iterable[int]) -> None:
        """Read these sequences from a store concurrently. Raises DataError."""
        rows = (row for index in indices for packed in self._rows(index).tolist() for row in self._read_for(packed))
        self.stream.fetch((int(self._starts[row]), int(self._lengths[row])) for row in rows)

    def begin(self, index: int) -> int:
        return int(self._starts[self._rows(index)[0]])

    def _read_for(self, row: int) -> list[int]:
        """Return the rows whose tokens are read for this row."""
        return [row]

    def origins(self, index: int, known: Origins) -> Iterator[Origin]:
        return known.of_rows(self._rows(index).tolist())

    def sequences_of(self, origin: Origin) -> range:
        sequence = int(np.searchsorted(self._first, np.flatnonzero(self._order == origin.index)[0], "right")) - 1
        return range(sequence, sequence + 1)

    def read(self, index: int) -> TokenSequence:
        return TokenSequence(**self._packed(map(self._row, self._rows(index))))

    @cached_property
    def _places(self) -> np.ndarray:
        """Place of each row's first token in a teacher's column, and the column's end: int64 [rows + 1]."""
        ends = np.cumsum(self._lengths)
        counts, row = [np.zeros(1, dtype=np.int64)], 0
        while row < len(ends):
            last = max(row + 1, int(np.searchsorted(ends, self._starts[row] + _AT_ONCE, side="right")))
            begin = int(self._starts[row])
            counted = self.stream.counted(begin, int(ends[last - 1]) - begin)
            assert counted is not None
            counted[self._starts[row:last] - begin] = False  # no token predicts a row's first one
            counts.append(np.add.reduceat(counted, self._starts[row:last] - begin, dtype=np.int64))
            row = last
        return np.cumsum(np.concatenate(counts))

    @property
    def place_count(self) -> int:
        return int(self._places[-1])

    def places(self, index: int, _: TokenSequence) -> np.ndarray:
        rows = self._rows(index)
        return np.concatenate([np.arange(self._places[row], self._places[row + 1]) for row in rows])

    def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row's ids and which of them count."""
        start, length = int(self._starts[row]), int(self._lengths[row])
        counted = self.stream.counted(start, length)
        assert counted is not None
        return self.stream.read(start, length), counted

    def _packed(self, rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
        """Return the fields of a `TokenSequence` with these rows, by name."""
        inputs = np.full(self._length, self._separator_id, dtype=np.int64)
        labels = np.full(self._length, IGNORED, dtype=np.int64)
        positions = np.arange(self._length)
        at = 0
        for ids, counted in rows:
            end = at + len(ids)
            inputs[at:end] = ids
            labels[at : end - 1] = np.where(counted[1:], inputs[at + 1 : end], IGNORED)
            positions[end:] -= end - at
            at = end
        return {"inputs": inputs, "labels": labels, "positions": positions}


class AnswerReader(RowReader):
    """Sequences of answers that an objective compares. All answers of a record are in one sequence."""

    reference: np.ndarray | None = None
    """The reference's column of the split, fp32."""

    def read(self, index: int) -> AnswerSequence:
        return self._answers(self._rows(index), map(self._row, self._rows(index)))

    def _answers(
        self, numbers: np.ndarray, rows: Iterable[tuple[np.ndarray, np.ndarray]], **more: Any
    ) -> AnswerSequence:
        """Make a sequence of answers. `numbers`: where the rows are in the reference's column."""
        reference = None if self.reference is None else self.reference[numbers]
        return AnswerSequence(**self._packed(rows), rows=numbers, reference=reference, **more)
