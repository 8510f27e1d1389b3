"""A folder that one process holds; a small file that is whole or not there. Standard library only."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_folder(folder: Path) -> int:
    """Hold a folder until the returned descriptor is closed or this process ends: flock, so no lock can go stale.

    Raises BlockingIOError while another process holds it, and any other OSError when it cannot be opened or locked.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def replace_file(path: Path, data: bytes) -> None:
    """Write, fsync, rename: after a crash there is the old file or the new one. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
