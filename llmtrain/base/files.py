"""Locks on folders, the refusal of a run folder in use, atomic writes, and the cache folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmtrain.base import untrusted
from llmtrain.base.errors import ConfigError


def lock_folder(folder: Path, *, wait: bool = False, shared: bool = False) -> int:
    """Lock a folder until the returned descriptor is closed or this process ends (flock, so that no lock becomes
    stale).

    `shared`: other shared locks are allowed. Raises BlockingIOError if another process has the lock, unless `wait`, and
    any other OSError.
    """
    return _locked(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), wait, shared)


def lock_file(path: Path) -> int:
    """Wait until this process has the lock of a file, which is created if missing. Returns a descriptor as
    `lock_folder` does. Raises OSError.

    Linux passes locks of files, but not of folders, on to an NFS server: so all hosts that share the file wait for each
    other.
    """
    return _locked(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), wait=True)


def _locked(handle: int, wait: bool, shared: bool = False) -> int:
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        raise
    return handle


_SCRATCH, _UNLOCKED = "llmtrain-scratch-", "llmtrain-unlocked-"
_LOCKED_WITHIN_S = 60.0


@contextlib.contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """Yield a temporary folder, with `what` in its name, that is locked while this process lives. Removes folders that
    killed processes of this user left."""
    base = Path(tempfile.gettempdir())
    for old in (*base.glob(f"{_SCRATCH}*"), *base.glob(f"{_UNLOCKED}*")):
        with contextlib.suppress(OSError):
            status = old.lstat()
            young = old.name.startswith(_UNLOCKED) and time.time() - status.st_mtime < _LOCKED_WITHIN_S
            if status.st_uid == os.getuid() and not young:
                os.close(lock_folder(old))
                shutil.rmtree(old)
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED))
    lock = lock_folder(made)
    folder = made.rename(base / made.name.replace(_UNLOCKED, f"{_SCRATCH}{what}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def cache_folder() -> Path:
    """Return this user's folder for copies of remote files."""
    folder = os.environ.get("LLMTRAIN_CACHE")
    return Path(folder or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llmtrain").expanduser().absolute()


def open_regular(path: Path, more: int = 0) -> int:
    """Open a regular file for reading, without waiting if it is a pipe. `more`: further flags. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | more)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def content_of(path: Path, size: int = -1) -> bytes:
    """Return the first `size` bytes of a regular file, or all. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        return file.read(size)


def replace_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace a file by write, fsync and rename: after a crash there is the old file or the new one. Raises OSError."""
    # A random name: another process may be replacing the file, too.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; files that are deleted meanwhile count as 0."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def refuse_if_in_use(run_dir: str, key: str = "train.run_dir") -> None:
    """Raise ConfigError if a launch holds the run's folder. `key`: the option that names the folder."""
    with contextlib.suppress(OSError):  # missing, or without locks: the launch reports it when it takes the folder
        try:
            os.close(lock_folder(Path(run_dir), shared=True))
        except BlockingIOError:
            raise ConfigError(in_use(Path(run_dir), key)) from None


def in_use(folder: Path, key: str) -> str:
    """Return the message for a second launch. `key`: the option that names the folder."""
    holder = ""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        environment = untrusted.loads((folder / "environment.json").read_bytes())
        holder = f" (process {environment['pid']} on {environment['host']})"
    return f"{key}: {folder} is in use by another launch{holder}. Wait for it, stop it, or give this run another {key}."
