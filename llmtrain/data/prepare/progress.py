"""How far `llmtrain prepare` is."""

from __future__ import annotations

from llmtrain.base import log
from llmtrain.data.prepare.sources import Unit


class Progress(log.Progress):
    """Counts input bytes. Workers report bytes of text, which for compressed input are more than the file's: they
    are capped at the unit's size until the unit is done."""

    def __init__(self, total_bytes: int, done_bytes: int) -> None:
        super().__init__("tokenizing", total_bytes, done_bytes)
        self._finished = done_bytes
        self._under_way: dict[int, int] = {}

    def under_way(self, unit: Unit, text_bytes: int) -> None:
        self._under_way[unit.index] = min(unit.bytes, self._under_way.get(unit.index, 0) + text_bytes)
        self.show(self._finished + sum(self._under_way.values()))

    def finish(self, unit: Unit) -> None:
        self._under_way.pop(unit.index, None)
        self._finished += unit.bytes
        self.show(self._finished + sum(self._under_way.values()))
