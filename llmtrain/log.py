"""Plain log lines: standard output on rank 0, warnings on standard error. Standard library only."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from llmtrain import units

_said: set[str] = set()


def rank() -> int:
    """The global rank that the launcher gave this process; 0 outside a launch."""
    return int(os.environ.get("RANK", "0"))


def info(message: str) -> None:
    """One line on standard output, from rank 0 only."""
    if rank() == 0:
        print(message, flush=True)


def warn(message: str) -> None:
    """One line on standard error, from rank 0 only."""
    if rank() == 0:
        print(f"warning: {message}", file=sys.stderr, flush=True)


def warn_once(message: str) -> None:
    """`warn`, but a second call with the same text says nothing."""
    if message not in _said:
        _said.add(message)
        warn(message)


_LINE_EVERY_S = 10.0


class Progress:
    """How many bytes of a long job are done: a bar on a terminal, a plain line now and then elsewhere.

    Safe to advance from several threads. Use as a context manager.
    """

    def __init__(self, what: str, total_bytes: int, done_bytes: int = 0) -> None:
        self._what = what
        self._total = total_bytes
        self._done = done_bytes
        self._lock = threading.Lock()
        self._next_line = time.monotonic() + _LINE_EVERY_S
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (self._what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self.show(self._done + count)

    def show(self, done_bytes: int) -> None:
        """So many bytes are done in all."""
        self._done = done_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            info(f"{self._what} {units.size(done_bytes)} of {units.size(self._total)}")
