"""Plain log lines on rank 0 (warnings on standard error), and a live line on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from typing import Any

from llmtrain.base import units
from llmtrain.base.untrusted import shown

_warned_of: set[str] = set()


def rank() -> int:
    """Return the global rank that the launcher gave this process; 0 without a launcher."""
    word = os.environ.get("RANK", "")
    return int(word) if word.isdecimal() else 0  # `number_in` refuses others


def info(message: str) -> None:
    """Print a line on standard output, on rank 0 only."""
    if rank() == 0:
        put(message)


def put(message: str) -> None:
    """Print a line on standard output. A closed pipe or a full disk raises no error."""
    try:
        reopen()
        print(shown(message, lines=True), flush=True)
    except BrokenPipeError:  # `| head` has read enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    except OSError:
        return


_kept: int | None = None
"""A second descriptor of standard output."""


def keep_output() -> None:
    """Keep standard output as it is now, for `reopen`."""
    global _kept
    if _kept is not None:
        os.close(_kept)
    try:
        _kept = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:  # it is closed already
        _kept = None


def reopen() -> bool:
    """Reopen standard output if a user's code has closed it or its descriptor; return True if so. Raises OSError."""
    try:
        os.fstat(1)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY) if _kept is None else _kept, 1)
    else:
        if sys.stdout is not None and not sys.stdout.closed:
            return False
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # until the process ends
    return True


def warn(message: str) -> None:
    """Print a warning on standard error, on rank 0 only. A closed descriptor or a full disk raises no error."""
    if rank() == 0:
        with contextlib.suppress(OSError, ValueError):
            print(f"warning: {shown(message, lines=True)}", file=sys.stderr, flush=True)


def warn_once(message: str) -> None:
    if message not in _warned_of:
        _warned_of.add(message)
        warn(message)


_SCREEN = threading.Lock()
"""Held while standard output is written. While rich shows a live line it replaces sys.stdout for a time, and text of
another thread would be erased with the line or go to a closed stream."""


def pass_on(text: str) -> None:
    """Write another process's lines above the live line. Any thread may call it. Raises OSError, ValueError."""
    with _SCREEN:
        sys.stdout.write(text)
        sys.stdout.flush()


class LiveLine:
    """A bar and a text at the bottom of the terminal, below the lines that `pass_on` and this thread print."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        words = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        columns = (BarColumn(bar_width=8), TextColumn("{task.description}", markup=False, table_column=words))
        self._bar = Progress(
            *columns, console=Console(file=sys.stdout), transient=True, expand=True, auto_refresh=False
        )
        self._task = self._bar.add_task("", total=1.0, visible=False)

    def show(self, text: str, share: float | None) -> None:
        """Show a text. `share`: completed share of the work, 0 to 1; None if unknown. An empty text hides the line."""
        with _SCREEN:
            if not text:
                self._bar.stop()
                return
            self._bar.start()
            total = None if share is None else 1.0
            text, done = shown(text), share or 0.0
            self._bar.update(self._task, description=text, completed=done, total=total, visible=True, refresh=True)


_LINE_EVERY_S = 10.0


class Progress:
    """Shows the progress of a long job: as a bar on a terminal, else as a line every 10 s.

    `advance` may be called from several threads.
    """

    def __init__(self, what: str, total: int, done: int = 0, *, unit: str = "byte") -> None:
        """`total`, `done`: numbers of `unit`s."""
        self._what = what
        self._total = total
        self._done = done
        self._unit = unit
        self._lock = threading.Lock()
        self._next_line = time.monotonic() + _LINE_EVERY_S
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar

            of_bytes = (DownloadColumn(), TransferSpeedColumn())
            counted = of_bytes if self._unit == "byte" else (MofNCompleteColumn(), TextColumn(f"{self._unit}s"))
            columns = (self._what, BarColumn(), *counted, TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        with self._lock:
            self.show(self._done + count)

    def show(self, done: int) -> None:
        self._done = done
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            if self._unit == "byte":
                info(f"{self._what} {units.size(done)} of {units.size(self._total)}")
            else:
                info(f"{self._what} {done:,} of {units.counted(self._total, self._unit)}")
