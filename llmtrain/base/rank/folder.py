"""The folder that the ranks of a host share with their agent: heartbeats, stacks, the hosts of the job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from llmtrain.base import log, units
from llmtrain.base.files import lock_folder, replace_file
from llmtrain.base.rank import messages, processes
from llmtrain.base.rank.heartbeat import read
from llmtrain.base.rank.processes import Process

AGENT, JOB, RUN = "agent.json", "job.json", "run.json"
"""Files: the agent's address; the hosts of the job; facts about the run."""
RECORD_WANTED = "record.wanted"
"""Made when the agent wants every rank's excerpt of NCCL's flight recorder."""
STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its Python stacks into its file."""
_STALE_S = 600.0
LEAST_FREE = 1 << 20
"""Free bytes in /dev/shm below which another folder is taken. A rank takes 20 KiB, 16 of them for a stack."""
_NAME = re.compile(r"llmtrain-watch-\d+-(?P<pid>\d+)-(?P<started>\d+)-.*")


def make_folder() -> Path:
    """Create the folder for this launcher and port, shared by a host's ranks. Its name ends with the launch's mark, for
    launch/job.py. Raises OSError."""
    parent = processes.stat(os.getppid())
    started, port = parent.started if parent else 0, os.environ.get("MASTER_PORT", "0")
    mark = os.environ.get(messages.LAUNCH, "")
    launch = mark if mark.isalnum() else "byhand"
    name = f"llmtrain-watch-{os.getuid()}-{os.getppid()}-{started}-{port}-{launch}"
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK | os.X_OK):
        base = Path(tempfile.gettempdir())
    elif not (base / name).exists() and (free := shutil.disk_usage(base).free) < LEAST_FREE:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            log.warn(
                f"{base} of {socket.gethostname()} is full ({units.size(free)} free): the watch keeps its files in "
                f"{tempfile.gettempdir()}, and others that need it will fail (NCCL between the GPUs of a host). Look "
                f"with `ls -la {base}` and delete unused files, or mount -o remount,size=50% {base}"
            )
        base = Path(tempfile.gettempdir())
    folder = base / name
    own(folder)
    return folder


def of_rank(folder: Path, rank: int, what: str) -> Path:
    """A rank's file: `what` is beat, stack, ask, error, refusal, record or stderr."""
    return folder / f"rank-{rank:05d}.{what}"


def own(folder: Path) -> None:
    """Create the folder if missing. Raises OSError, also if other users can use the folder."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or folder.is_symlink() or found.st_mode & 0o077:
        raise PermissionError(13, "another user's folder is in the way of the watch", str(folder))


def sweep(this: Path) -> None:
    """Remove the folders of killed agents: launcher and ranks are dead, and no process holds the lock. Ranks may
    outlive an agent, and containers that share /dev/shm do not see each other's processes."""
    for folder in this.parent.glob(f"llmtrain-watch-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if folder == this or time.time() - folder.stat().st_mtime <= _STALE_S:
                continue
            launcher = _NAME.fullmatch(folder.name)
            beats = [beat for path in folder.glob("rank-*.beat") if (beat := read(path)) is not None]
            users = [Process(beat.pid, beat.started) for beat in beats]
            users += [Process(int(launcher["pid"]), int(launcher["started"]))] if launcher else []
            if not any(user.alive() for user in users):
                os.close(lock_folder(folder))
                shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file atomically. Raises OSError."""
    replace_file(path, json.dumps(value).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None without a valid one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_error(folder: Path, rank: int, error: str, at: str, phase: str) -> None:
    """Record the exception that ends a rank. Raises OSError."""
    write_json(of_rank(folder, rank, "error"), {"error": error, "at": at, "phase": phase})


def write_refusal(folder: Path, rank: int, reason: str) -> None:
    """Record the user's mistake that ends a rank. Raises OSError."""
    write_json(of_rank(folder, rank, "refusal"), {"reason": reason})
