"""Free host memory."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUP = Path("/sys/fs/cgroup")


def memory_available() -> int:
    """Bytes that this process may still take: of the machine, and of its container (cgroup 2)."""
    free = psutil.virtual_memory().available
    try:
        limit = int((_GROUP / "memory.max").read_text())  # "max" is no number: no limit
        used = int((_GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(stat["file"]) - int(stat["shmem"]))  # the page cache gives way
    except (OSError, ValueError, KeyError):
        return free


def boot_id() -> str:
    """An id that all processes on this host share, and those of no other host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
