"""How the lab starts its own helpers, and finds what runs on a host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]


def python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A helper of the standard library only, in its own session: a Ctrl-C at the terminal is not for it."""
    command = [sys.executable, "-E", "-S", "-m", module, *arguments]
    return subprocess.Popen(command, cwd=REPO, text=True, start_new_session=True, **options)


def entering(pid: int, argv: Sequence[str], cwd: str) -> list[str]:
    """The command line that runs argv in the namespaces of a process."""
    return [sys.executable, "-E", "-S", "-m", "tools.lab.enter", str(pid), cwd, *argv]


def default_environment() -> dict[str, str]:
    """The caller's, with this interpreter's tools first and without what a launcher gave the caller."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', os.defpath)}"
    return env


def child_of(pid: int) -> int:
    """The one child of a process. Raises ProcessLookupError if there is none."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not text:
        raise ProcessLookupError(pid)
    return int(text[0])


def namespace_of(pid: int) -> str:
    """Which process id namespace a process lives in; empty if it has gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def living_in(namespace: str) -> list[psutil.Process]:
    """All processes of a process id namespace, by id; zombies are not there any more."""
    found = []
    for pid in psutil.pids():
        if namespace_of(pid) == namespace:
            try:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
    return found
