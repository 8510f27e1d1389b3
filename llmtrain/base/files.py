"""A folder that one process holds; a small file that is whole or not there. Standard library only."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_folder(folder: Path, *, wait: bool = False, shared: bool = False) -> int:
    """Hold a folder until the returned descriptor is closed or this process ends: flock, so no lock can go stale.

    `shared`: beside others that ask for no more. Raises BlockingIOError while another process holds it, unless it is to
    `wait` for that, and any other OSError when it cannot be opened or locked.
    """
    return _locked(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), wait, shared)


def lock_file(path: Path) -> int:
    """Wait until a file, made where it is missing, is held as `lock_folder` holds a folder. Raises OSError.

    Linux passes locks of files on to an NFS server, those of folders not: all hosts that share one wait for each other.
    """
    return _locked(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), wait=True)


def _locked(handle: int, wait: bool, shared: bool = False) -> int:
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
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
