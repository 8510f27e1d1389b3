"""What Linux tells of processes in /proc, read without psutil: the watch does it twice a second for every rank."""

from __future__ import annotations

import os
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat that we use."""

    state: str
    """R running, S sleeping, D waiting for a disk or a file server, T stopped, t traced, Z ended, X going."""
    parent: int
    cpu_s: float
    """Processor time of all its threads."""
    started: int
    """Clock ticks after the boot: with the process id, the identity of a process."""
    resident: int
    """Bytes of memory that it holds."""
    exit_status: int
    """As waitpid gives it, of a process that has ended and was not waited for yet."""


def stat(pid: int) -> Stat | None:
    """None when there is no such process."""
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
    """Bytes that a process has read and written, caches included; 0 where that cannot be read."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            lines = file.read().split(b"\n")
        return int(lines[0].split()[1]) + int(lines[1].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def pids() -> list[int]:
    """Processes that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def words(pid: int) -> list[str]:
    """The command line; empty for a process that has ended or that is another user's."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with this environment variable (ours only: the kernel guards others')."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{name}={value}".encode() in file.read().split(b"\0")
    except OSError:
        return False


def descendants(roots: set[int]) -> set[int]:
    """All processes below the given ones, without them."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        found = stat(pid)
        if found is not None:
            children.setdefault(found.parent, []).append(pid)
    below: set[int] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in below and child not in roots:
                below.add(child)
                queue.append(child)
    return below


def oom_kills() -> int:
    """Processes that the kernel has ended on this machine because memory ran out; 0 where it does not count them."""
    try:
        with open("/proc/vmstat", "rb") as file:
            for line in file:
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def waits_in(pid: int) -> str:
    """The kernel function in which a process waits, where the kernel tells; else ""."""
    try:
        with open(f"/proc/{pid}/wchan") as file:
            found = file.read().strip()
    except OSError:
        return ""
    return "" if found == "0" else found
