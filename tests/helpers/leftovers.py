"""What runs leave in places that all processes of a machine share."""

from __future__ import annotations

import os
import time
from pathlib import Path


def unused_shared_memory() -> set[str]:
    """Entries of /dev/shm that no process maps or has open, after a moment: other jobs have theirs, too."""
    before = _unused()
    time.sleep(0.5)  # one that is being made, or removed
    return before & _unused()


def _unused() -> set[str]:
    there = set(os.listdir("/dev/shm"))
    return there - {name for name in there if name.startswith("sem.mp-")} - _used()


def _used() -> set[str]:
    """First parts of the paths below /dev/shm that living processes use."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            paths = [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
            paths += [os.readlink(each) for each in (process / "fd").iterdir()]
        except OSError:  # it has ended
            continue
        found |= {path.split("/")[3].strip() for path in paths if path.startswith("/dev/shm/")}
    return found
