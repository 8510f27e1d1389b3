"""The check for another launch in a run's folder: made at once, before anything slow begins.

The lock is flock on the folder itself (checkpoint/rundir.py).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from llmtrain.base import untrusted
from llmtrain.base.errors import ConfigError
from llmtrain.base.files import lock_folder


def refuse_if_in_use(run_dir: str) -> None:
    """Raises ConfigError when a launch holds the run's folder. It makes and keeps nothing."""
    with contextlib.suppress(OSError):  # it is not there, or has no locks: whoever takes it will tell
        try:
            os.close(lock_folder(Path(run_dir), shared=True))
        except BlockingIOError:
            raise ConfigError(in_use(Path(run_dir), "train.run_dir")) from None


def in_use(folder: Path, key: str) -> str:
    """The message for a second launch; `key`: the option that names the folder."""
    return (
        f"{key}: {folder} is in use by another launch{_holder(folder)}. "
        f"Wait for it, stop it, or give this run another {key}."
    )


def _holder(run_dir: Path) -> str:
    try:
        environment = untrusted.loads((run_dir / "environment.json").read_bytes())
        return f" (process {environment['pid']} on {environment['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
