"""How far `llmtrain prepare` is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from llmtrain import log, units
from llmtrain.data.sources import Unit

_LINE_EVERY_S = 10.0


class Progress:
    """Counts input bytes. Workers report bytes of text, which for compressed input are more than the file's: they
    are capped at the unit's size until the unit is done."""

    def __init__(self, total_bytes: int, done_bytes: int) -> None:
        self._total = total_bytes
        self._done = done_bytes
        self._under_way: dict[int, int] = {}
        self._next_line = time.monotonic() + _LINE_EVERY_S
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = ("tokenizing", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, unit: Unit, text_bytes: int) -> None:
        self._under_way[unit.index] = min(unit.bytes, self._under_way.get(unit.index, 0) + text_bytes)
        self._show()

    def finish(self, unit: Unit) -> None:
        self._under_way.pop(unit.index, None)
        self._done += unit.bytes
        self._show()

    def _show(self) -> None:
        now = self._done + sum(self._under_way.values())
        if self._bar is not None:
            self._bar.update(self._task, completed=now)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            log.info(f"tokenized {units.size(now)} of {units.size(self._total)}")
