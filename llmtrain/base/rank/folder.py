"""The folder that a host's ranks share with their agent: heartbeats, stacks, the hosts of the job."""

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
"""The agent makes this file when it wants every rank's excerpt of NCCL's flight recorder."""
STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its Python stack into its file."""
LEAST_FREE = 1 << 20
"""If /dev/shm has fewer free bytes, another folder is used. A rank takes 20 KiB, 16 of them for a stack."""
NAME = re.compile(r"llmtrain-watch-\d+-(?P<pid>\d+)-(?P<started>\d+)-.*")
"""The form of a name from `make_folder`, with the launcher's id and start time."""


def make_folder() -> Path:
    """Create the folder that a host's ranks share, for this launcher and port. Its name ends with the launch's mark, by
    which launch/job.py finds it. Raises OSError."""
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
                f"{base} on {socket.gethostname()} is full ({units.size(free)} free). The watch uses "
                f"{tempfile.gettempdir()} instead, but NCCL between the GPUs of a host will fail. List {base} with "
                f"`ls -la {base}`, then delete unused files or enlarge it: mount -o remount,size=50% {base}"
            )
        base = Path(tempfile.gettempdir())
    folder = base / name
    own(folder)
    return folder


def of_rank(folder: Path, rank: int, what: str) -> Path:
    """Return a rank's file. `what`: beat, stack, ask, error, refusal, record or stderr."""
    return folder / f"rank-{rank:05d}.{what}"


def own(folder: Path) -> None:
    """Create the folder if it is missing. Raises OSError, also if other users can use the folder."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or folder.is_symlink() or status.st_mode & 0o077:
        raise PermissionError(13, "the watch cannot use a folder that is another user's or open to others", str(folder))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file atomically. Raises OSError."""
    replace_file(path, json.dumps(value).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing or not valid."""
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
