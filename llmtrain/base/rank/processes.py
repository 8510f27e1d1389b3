"""Linux processes: facts from /proc, read without psutil since the agent reads them twice a second for every rank.

A process is identified by its id and start time, so that a reused id is not taken for it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat that the watch uses."""

    state: str
    """R running, S sleeping, D waiting for a disk or a file server, T stopped, t traced, Z zombie, X dead."""
    parent: int
    cpu_s: float
    """Processor time of all its threads."""
    started: int
    """Start time in clock ticks since the boot; with the process id it identifies the process."""
    resident: int
    """Bytes of resident memory."""
    exit_status: int
    """Exit status as waitpid gives it, of a zombie."""


def stat(pid: int) -> Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    try:
        return Stat(
            state=fields[0].decode(),
            parent=int(fields[1]),
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
            started=int(fields[19]),
            resident=int(fields[21]) * _PAGE,
            exit_status=int(fields[49]),
        )
    except (IndexError, ValueError):
        return None


def bytes_moved(pid: int) -> int:
    """Return the bytes that a process has read and written, caches included; 0 if unreadable."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            lines = file.read().split(b"\n")
        return int(lines[0].split()[1]) + int(lines[1].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def words(pid: int) -> list[str]:
    """Return the command line; empty if the process has ended or is another user's."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


MARK = "LLMTRAIN_WATCH"
"""Environment variable of every process of a job: the heartbeat folder on this host."""


@dataclass(frozen=True)
class Process:
    """A process, identified by id and start time, so that a reused id is not taken for it."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Return True if the process runs; a zombie does not."""
        current = stat(self.pid)
        return current is not None and current.started == self.started and current.state not in "ZX"

    def send(self, number: int) -> None:
        if self.alive():
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


def identify(pid: int) -> Process | None:
    current = stat(pid)
    return None if current is None else Process(pid, current.started)
