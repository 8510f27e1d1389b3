"""metrics.jsonl and events.jsonl: one JSON object a line, only complete lines, always valid JSON.

A line is one write() to a file opened for appending, so a kill can only leave the last line torn; it is cut off when
the file is opened again. JSON has no NaN and infinities: they are written as the strings "NaN", "Infinity" and
"-Infinity" (the proto3 JSON mapping), which Python's float() reads back.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.base import log, untrusted
from llmtrain.base.files import content_of, replace_file
from llmtrain.base.redact import redact
from llmtrain.tracking.sink import Sink

RUN_FILES = ("config.yaml", "deepspeed.json", "environment.json")
"""Files that are written once, at the start."""


def to_json(value: Any) -> Any:
    """Return `value` in JSON types: non-finite floats as strings, NumPy and torch scalars as numbers."""
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if callable(item := getattr(value, "item", None)):
        return to_json(item())
    return str(value)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = untrusted.loads(line)
    except ValueError:  # UnicodeDecodeError included
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path, size: int = -1) -> tuple[list[dict[str, Any]], int]:
    """Return (the objects in a JSON-lines file or its first `size` bytes, the number of unreadable lines).

    ([], 0) if there is no file.
    """
    try:
        lines = content_of(path, size).splitlines()
    except FileNotFoundError:
        return [], 0
    rows = [_parse(line) for line in lines if line.strip()]
    good = [row for row in rows if row is not None]
    return good, len(rows) - len(good)


def rows_after(metrics: Path, size: int, step: int) -> list[dict[str, Any]]:
    """Return the rows in the first `size` bytes of metrics.jsonl whose step is above `step`, merged per step."""
    merged: dict[int, dict[str, Any]] = {}
    for row in read_rows(metrics, size)[0]:
        if isinstance(at := row.get("step"), int) and at > step:
            merged[at] = {**merged.get(at, {}), **{key: _number(value) for key, value in row.items()}}
    return [merged[at] for at in sorted(merged)]


def _number(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def repair(path: Path) -> None:
    """Cut off a last line that a kill or a full disk has torn; end a complete one with a newline. Raises OSError."""
    if not path.is_file():
        return
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    tail = data[complete:]
    if not tail:
        return
    if _parse(tail) is not None:
        with open(path, "ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, complete)


def truncate_after(path: Path, step: int) -> int:
    """Drop the rows whose `step` is above `step`, atomically. Returns their number. Raises OSError."""
    if not path.is_file():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    remaining = []
    for line in lines:
        row = _parse(line)
        at = row.get("step") if row is not None else None
        if row is None or not isinstance(at, (int, float)) or at <= step:
            remaining.append(line)
    if len(remaining) < len(lines):
        replace_file(path, b"".join(remaining))
    return len(lines) - len(remaining)


class HeldFile:
    """An open file that can be restored completely if another process removes it."""

    def __init__(self, path: Path) -> None:
        """Create the file if it is missing. Raises OSError."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)

    def put_back(self) -> bool:
        """Write the file again if it was removed. Returns True if so. Raises OSError."""
        if os.fstat(self.fd).st_nlink:
            return False
        replacement, done, size = HeldFile(self.path), 0, os.fstat(self.fd).st_size
        try:
            while done < size:  # a call may move fewer bytes
                done += os.write(replacement.fd, os.pread(self.fd, min(size - done, 1 << 20), done))
        except OSError:
            os.close(replacement.fd)
            self.path.unlink(missing_ok=True)  # the next write tries again, from the complete file
            raise
        os.close(self.fd)
        self.fd = replacement.fd
        return True


class AppendedFile:
    """A file to which complete rows are added. A failure is reported once and never raised: training continues."""

    lost = "its rows are lost until there is room"

    def __init__(self, path: Path, repair: Callable[[Path], None]) -> None:
        """`repair`: called first, to cut off what an earlier launch has left torn; raises OSError."""
        self._path = path
        self._file: HeldFile | None = None
        try:
            repair(path)
            self._file = HeldFile(path)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        log.warn_once(
            f"{self._path} cannot be written ({error.strerror}): training continues, {self.lost}. Free disk space or "
            "check the permissions."
        )

    def add(self, rows: bytes) -> None:
        if self._file is None:
            return
        try:
            if self._file.put_back():
                log.warn_once(f"{self._path} was removed by something outside the run, and is written again")
            written = os.write(self._file.fd, rows)
            if written < len(rows):
                # The disk filled up within a row: remove the torn row.
                os.ftruncate(self._file.fd, os.fstat(self._file.fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Flush to the disk and close. May be called twice."""
        if self._file is None:
            return
        fd, self._file = self._file.fd, None
        try:
            os.fsync(fd)
        except OSError as error:
            # EINVAL: pipes and character devices have nothing to flush.
            if error.errno != errno.EINVAL:
                self._warn(error)
        finally:
            os.close(fd)


class JsonLines(AppendedFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, repair)

    def write(self, row: dict[str, Any]) -> None:
        self.add(json.dumps(to_json(row), allow_nan=False, separators=(",", ":")).encode() + b"\n")


def write_event(run_dir: Path, kind: str, event: dict[str, Any]) -> None:
    """Add a line to the run's events, from a process that is not a rank."""
    events = JsonLines(run_dir / "events.jsonl")
    events.write({"time_unix_s": time.time(), "kind": kind, **redact(event)})
    events.close()


class LocalFiles(Sink):
    """Writes metrics.jsonl and events.jsonl in the run's folder, and restores removed files of the folder."""

    def __init__(self, run_dir: Path, *, start_step: int) -> None:
        """`start_step`: step of the resumed checkpoint (0: a new run); rows of later steps are dropped."""
        metrics = run_dir / "metrics.jsonl"
        self.dropped_rows = 0
        try:
            # A run without a checkpoint repeats its step 0 as well.
            self.dropped_rows = truncate_after(metrics, start_step if start_step > 0 else -1)
        except OSError as error:
            log.warn(f"{metrics} keeps rows after step {start_step} that this launch repeats ({error.strerror}).")
        self._metrics = JsonLines(metrics)
        self._events = JsonLines(run_dir / "events.jsonl")
        self._held = [HeldFile(run_dir / name) for name in RUN_FILES if (run_dir / name).exists()]

    def log(self, row: dict[str, Any], *, more: bool) -> None:
        self._put_back(row.get("step"))
        self._metrics.write(row)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self._events.write({"time_unix_s": time.time(), "kind": kind, **fields})

    def end_steps(self) -> None:
        """Does nothing: rows of the last evaluation may follow."""

    def close(self, *, exit_code: int) -> None:
        self._put_back(None)
        for file in self._held:
            os.close(file.fd)
        self._metrics.close()
        self._events.close()

    def _put_back(self, step: Any) -> None:
        with contextlib.suppress(OSError):  # metrics.jsonl reports it
            if gone := [file.path.name for file in self._held if file.put_back()]:
                log.warn(
                    f"{self._held[0].path.parent}: something outside the run has removed {', '.join(gone)}, which are "
                    "written again; checkpoints that were removed with them are gone until the next save"
                )
                self.event("removed", {"step": step, "files": gone})
