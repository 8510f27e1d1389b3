"""The environment of a child process that runs a module of llmtrain."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment and `more`, with llmtrain on PYTHONPATH: installed or not, the child finds it."""
    search = (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, search))}
