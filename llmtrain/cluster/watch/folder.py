"""The folder in which the ranks of a host and their watch meet: heartbeats, stacks, who is in the job."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from llmtrain.cluster.watch import proc

AGENT, JOB, RUN = "agent.json", "job.json", "run.json"
"""How to reach this host's watch; who is in the job; what the job runs."""
_STALE_S = 600.0


def make_folder() -> Path:
    """One for each launcher process and port of this host; its ranks come to the same one. Raises OSError."""
    parent = proc.stat(os.getppid())
    started, port = parent.started if parent else 0, os.environ.get("MASTER_PORT", "0")
    name = f"llmtrain-watch-{os.getuid()}-{os.getppid()}-{started}-{port}"
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK | os.X_OK):
        base = Path(tempfile.gettempdir())
    folder = base / name
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or folder.is_symlink() or found.st_mode & 0o077:
        raise PermissionError(13, "another user's folder is in the way of the watch", str(folder))
    return folder


def sweep(own: Path) -> None:
    """Remove the folders of watches that were killed: nobody holds their lock, and nobody is about to.

    A launcher's process id would not tell: containers that share /dev/shm do not see each other's processes.
    """
    for folder in own.parent.glob(f"llmtrain-watch-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if folder != own and time.time() - folder.stat().st_mtime > _STALE_S:
                os.close(lock(folder))
                shutil.rmtree(folder, ignore_errors=True)


def lock(folder: Path) -> int:
    """Hold a folder until the descriptor is closed or this process ends. Raises OSError when it is held."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or no object in it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
