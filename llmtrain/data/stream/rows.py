"""Windows of conversations: complete rows, by best fit, isolated from each other and from the padding at the end."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from llmtrain.base.errors import DataError
from llmtrain.config.run import DataConfig
from llmtrain.data.manifest import ChatFigures
from llmtrain.data.shards import TokenStream
from llmtrain.data.stream.windows import IGNORED, Window

if TYPE_CHECKING:
    from llmtrain.data.origins import Origin, Origins
    from llmtrain.data.stream.columns import Taught


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack complete records into windows: best fit, longest first, the same on every machine.

    Method: best-fit decreasing (D. S. Johnson et al., SIAM J. Comput. 3, 1974), done at once for all records of a
    length and all windows with the same room: a million records take a fraction of a second, so every rank does it for
    itself. Returns (records in the order of the windows, int64 [records]; each window's beginning in that order, int64
    [windows + 1]).

    Args:
        lengths: int [records], each from 1 to `capacity`.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes, starts = np.unique(-lengths[order].astype(np.int64), return_index=True)
    window_of = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # ascending room left in windows
    windows: dict[int, np.ndarray] = {}
    made = 0

    def put_back(some: np.ndarray, room: int) -> None:
        if room and len(some):
            if room not in windows:
                insort(rooms, room)
            windows[room] = np.concatenate([windows.get(room, some[:0]), some])

    for size, records in zip((-sizes).tolist(), np.split(order, starts)[1:], strict=True):
        while len(records):
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms.pop(at)
                free = windows.pop(room)
            else:
                room, new = capacity, -(-len(records) // (capacity // size))
                free = np.arange(made, made + new)
                made += new
            each = room // size
            taken = min(len(free), -(-len(records) // each))
            count = min(len(records), taken * each)
            window_of[records[:count]] = np.repeat(free[:taken], each)[:count]
            put_back(free[: taken - 1], room - each * size)
            put_back(free[taken - 1 : taken], room - (count - (taken - 1) * each) * size)
            put_back(free[taken:], room)
            records = records[count:]
    in_windows = np.argsort(window_of, kind="stable")
    return in_windows, np.searchsorted(window_of[in_windows], np.arange(made + 1))


class Conversations:
    """Windows of complete rows, padded with the separator."""

    together = 1
    """Rows that share a window."""
    taught: Taught | None = None
    context: list[Any] | None = None

    def __init__(self, stream: TokenStream, config: DataConfig, separator_id: int) -> None:
        self.stream, self._length, self._separator_id = stream, config.sequence_length, separator_id
        self._lengths = stream.row_lengths()
        self._starts = np.cumsum(self._lengths) - self._lengths
        order, first = best_fit(self._sizes(), self._length)
        self._order = (order[:, None] * self.together + np.arange(self.together)).reshape(-1)
        self._first = first * self.together
        self.count = len(first) - 1

    def _sizes(self) -> np.ndarray:
        """Tokens of each group of rows that share a window."""
        return self._lengths.reshape(-1, self.together).sum(1)

    def _rows(self, index: int) -> np.ndarray:
        return self._order[self._first[index] : self._first[index + 1]]

    def fetch(self, indices: Iterable[int]) -> None:
        rows = (row for index in indices for own in self._rows(index).tolist() for row in self._read_for(own))
        self.stream.fetch((int(self._starts[row]), int(self._lengths[row])) for row in rows)

    def begin(self, index: int) -> int:
        return int(self._starts[self._rows(index)[0]])

    def _read_for(self, row: int) -> list[int]:
        """The rows whose tokens a window with this row reads."""
        return [row]

    def origins(self, index: int, known: Origins) -> Iterator[Origin]:
        return known.of_rows(self._rows(index).tolist())

    def windows_with(self, origin: Origin) -> range:
        window = int(np.searchsorted(self._first, np.flatnonzero(self._order == origin.index)[0], "right")) - 1
        return range(window, window + 1)

    def read(self, index: int) -> Window:
        return self._window(map(self._row, self._rows(index)))

    @cached_property
    def _places(self) -> np.ndarray:
        from llmtrain.data.stream.columns import row_places

        return row_places(self.stream, self._lengths)

    @property
    def place_count(self) -> int:
        return int(self._places[-1])

    def places(self, index: int, _: Window) -> np.ndarray:
        rows = self._rows(index)
        return np.concatenate([np.arange(self._places[row], self._places[row + 1]) for row in rows])

    def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, whether each is counted)"""
        start, length = int(self._starts[row]), int(self._lengths[row])
        counted = self.stream.counted(start, length)
        assert counted is not None
        return self.stream.read(start, length), counted

    def _window(self, rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> Window:
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
        return Window(inputs, labels, positions)


class Preferences(Conversations):
    """Windows of complete pairs: both answers are in one micro-batch."""

    together = 2
    reference: np.ndarray | None = None
    """fp32 [rows]."""

    def read(self, index: int) -> Window:
        rows = self._rows(index)
        return (
            super().read(index)._replace(rows=rows, reference=None if self.reference is None else self.reference[rows])
        )


def partners(prompts: np.ndarray) -> np.ndarray | None:
    """Pair each prompt with an answer to another prompt; every answer is used once. int64 [rows].

    `prompts`: hashes [rows]. None: more than half of the rows have the same prompt.
    """
    order = np.argsort(prompts, kind="stable")
    _, counts = np.unique(prompts, return_counts=True)
    most = int(counts.max(initial=0))
    if 2 * most > len(prompts):
        return None
    found = np.empty(len(prompts), dtype=np.int64)
    found[order] = np.roll(order, -most)  # rows of a prompt are neighbours in `order`, and no prompt has more of them
    return found


class Unpaired(Conversations):
    """Windows of answers judged alone, each with a window of the same prompts with answers to others."""

    reference: np.ndarray | None = None
    """fp32 [2 rows]."""

    def _sizes(self) -> np.ndarray:
        judged = self.stream.judged()
        self._begins, self._desirable = judged["begin"].astype(np.int64), judged["desirable"].astype(bool)
        found = partners(judged["prompt"])
        if found is None:
            raise DataError(
                f"{self.stream.name}: more than half of its {len(judged)} records have the same prompt, and each "
                "has to meet the answer to another one; prepare more prompts"
            )
        self._partners = found
        sizes = self._begins + (self._lengths - self._begins)[found]
        if (longest := int(sizes.max(initial=0))) > self._length:
            raise DataError(
                f"{self.stream.name}: a prompt with the answer to another one has {longest} tokens; raise "
                f"data.sequence_length to that, or prepare the data with less than --max-tokens {self._length}"
            )
        return np.maximum(sizes, self._lengths)

    def _mismatched(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The row's prompt with its partner's answer."""
        partner, begin = int(self._partners[row]), int(self._begins[row])
        (prompt, _), (answer, counted), at = self._row(row), self._row(partner), int(self._begins[partner])
        return np.concatenate([prompt[:begin], answer[at:]]), np.concatenate([np.zeros(begin, bool), counted[at:]])

    def _read_for(self, row: int) -> list[int]:
        return [row, int(self._partners[row])]

    def read(self, index: int) -> Window:
        rows = self._rows(index)
        after = rows + len(self._lengths)
        known = self.reference
        mismatched = self._window(map(self._mismatched, rows))
        return (
            super()
            .read(index)
            ._replace(
                rows=rows,
                reference=None if known is None else known[rows],
                desirable=self._desirable[rows],
                mismatched=mismatched._replace(rows=after, reference=None if known is None else known[after]),
            )
        )


def kind_of(chat: ChatFigures) -> type[Conversations]:
    return Preferences if chat.pairs else Unpaired if chat.unpaired else Conversations
