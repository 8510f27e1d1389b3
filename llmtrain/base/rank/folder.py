"""The folder that the ranks of a host share with their agent: heartbeats, stacks, the hosts of the job."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

from llmtrain.base import log, units
from llmtrain.base.files import replace_file
from llmtrain.base.rank import messages, processes

AGENT, JOB, RUN = "agent.json", "job.json", "run.json"
"""Files: the agent's address; the hosts of the job; facts about the run."""
RECORD_WANTED = "record.wanted"
"""Made when the agent wants every rank's excerpt of NCCL's flight recorder."""
STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its Python stacks into its file."""
LEAST_FREE = 1 << 20
"""Free bytes in /dev/shm below which another folder is taken. A rank takes 20 KiB, 16 of them for a stack."""
NAME = re.compile(r"llmtrain-watch-\d+-(?P<pid>\d+)-(?P<started>\d+)-.*")
"""The name that `make_folder` gives: id and start time of the launcher."""


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
    status = folder.lstat()
    if status.st_uid != os.getuid() or folder.is_symlink() or status.st_mode & 0o077:
        raise PermissionError(13, "another user's folder is in the way of the watch", str(folder))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file atomically. Raises OSError."""
    replace_file(path, json.dumps(value).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None without a valid one."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_error(folder: Path, rank: int, error: str, at: str, phase: str) -> None:
    """Record the exception that ends a rank. Raises OSError."""
    write_json(of_rank(folder, rank, "error"), {"error": error, "at": at, "phase": phase})


def write_refusal(folder: Path, rank: int, reason: str) -> None:
    """Record the user's mistake that ends a rank. Raises OSError."""
    write_json(of_rank(folder, rank, "refusal"), {"reason": reason})
