"""Calls in separate threads, and the number of cores that a process may use."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Start a call in a thread, and return its future. Unlike an executor's, this thread never keeps the process
    alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use: the smaller of its affinity (taskset, Slurm) and its
    container's limit."""
    cores = len(os.sched_getaffinity(0))
    for version in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # microseconds for each period
        with contextlib.suppress(OSError, ValueError):  # another version's files, or "max": no limit
            quota, period = (int(word) for name in version for word in (cgroups / name).read_text().split())
            cores = min(cores, max(1, quota // period)) if quota > 0 else cores
    return cores
