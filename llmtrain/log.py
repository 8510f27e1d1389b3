"""Plain log lines: standard output on rank 0, warnings on standard error. Standard library only."""

from __future__ import annotations

import os
import sys

_said: set[str] = set()


def rank() -> int:
    """The global rank that the launcher gave this process; 0 outside a launch."""
    return int(os.environ.get("RANK", "0"))


def info(message: str) -> None:
    """One line on standard output, from rank 0 only."""
    if rank() == 0:
        print(message, flush=True)


def warn(message: str) -> None:
    """One line on standard error, from rank 0 only."""
    if rank() == 0:
        print(f"warning: {message}", file=sys.stderr, flush=True)


def warn_once(message: str) -> None:
    """`warn`, but a second call with the same text says nothing."""
    if message not in _said:
        _said.add(message)
        warn(message)
