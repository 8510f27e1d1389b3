"""The lock for builds of DeepSpeed's ops, and the processes that have a file open.

Doctor pipes this file into a host's Python, before probe.py: standard library only, Python 3.8 on.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os

BUILD_LOCK = "llmtrain-build.lock"
"""llmtrain's lock file for builds of ops (engine/deepspeed/optimizers.py), in torch's extensions folder."""


def users_of(path: str) -> list[int]:
    """Return the ids of the processes that have a file open, as a running build has its lock."""
    wanted = os.stat(path)
    users = []
    for folder in glob.glob("/proc/[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for link in os.scandir(folder):
                with contextlib.suppress(OSError):
                    status = os.stat(link.path)
                    if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
                        users.append(int(folder.split("/")[2]))
    return users


def is_held(folder: str) -> bool:
    """Return True if llmtrain is building an op in the folder, even in a container or on another host that shares
    it."""
    try:
        handle = os.open(os.path.join(folder, BUILD_LOCK), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
