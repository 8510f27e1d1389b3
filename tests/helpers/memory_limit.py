"""Limits of resident memory at which the kernel kills: control groups, for root."""

from __future__ import annotations

import os
from pathlib import Path


class Limit:
    """A control group of processes, of either version."""

    def __init__(self, name: str) -> None:
        root = Path("/sys/fs/cgroup")
        first = (root / "memory").is_dir()
        self.folder = (root / "memory" if first else root) / name
        self._limit, self._used = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
        self._kills = self.folder / ("memory.oom_control" if first else "memory.events")

    def __enter__(self) -> Limit:
        self.folder.mkdir(exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.rmdir()

    def enter(self) -> None:
        """Put this process, and those that it starts, below the limit."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def used(self) -> int:
        return int((self.folder / f"memory.{self._used}").read_text())

    def set(self, size: int) -> None:
        (self.folder / f"memory.{self._limit}").write_text(str(size))

    @property
    def killed(self) -> bool:
        words = dict(line.split() for line in self._kills.read_text().splitlines())
        return int(words["oom_kill"]) > 0


def memory_limits_work() -> bool:
    try:
        with Limit(f"llmtrain-tried-{os.getpid()}") as limit:
            limit.set(1 << 40)
    except OSError:
        return False
    return True
