"""The run's folder: one live launch at a time, and nothing left of a killed one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.checkpoint.retain import leftovers, remove
from llmtrain.errors import CheckpointError


class RunDirectory:
    """Paths of a run and the lock on its folder. Only rank 0 opens it; use as a context manager.

    The lock is flock on the folder itself: the kernel drops it with the process, so no lock file can go stale.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self._handle: int | None = None

    def __enter__(self) -> RunDirectory:
        """Raises CheckpointError when another launch holds the folder, or it cannot be made."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.access(self.checkpoints, os.W_OK):
                raise OSError(errno.EROFS, "nothing can be written in it")
        except BlockingIOError:
            raise CheckpointError(
                f"train.run_dir: {self.path} is in use by another launch{self._holder()}. "
                "Wait for it, stop it, or give this run another train.run_dir."
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"train.run_dir: {self.path} cannot be used: {error.strerror}. Give another folder."
            ) from error
        with leftovers(self.checkpoints) as found:
            remove(found)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def refuse_old_checkpoints(self) -> None:
        """For `--resume none`. Raises CheckpointError when the folder holds a run already."""
        found = complete_checkpoints(self.checkpoints)
        if found:
            raise CheckpointError(
                f"resume: none, but {self.path} holds {found[0].name}. Use --resume auto to continue it, "
                "or give a new train.run_dir; a run is never overwritten."
            )

    def refuse_going_back(self, chosen: str) -> None:
        """For `--resume PATH`. Raises CheckpointError when the path is this run's own, but not its newest."""
        newest = next(iter(complete_checkpoints(self.checkpoints)), None)
        ours = Path(chosen).resolve().parent == self.checkpoints.resolve()
        if newest is not None and ours and newest.resolve() != Path(chosen).resolve():
            raise CheckpointError(
                f"resume: {chosen} is older than {newest.name} of the same run, and what follows would be mixed up "
                "with it. Give the branch a train.run_dir of its own, or delete the newer checkpoints."
            )

    def _holder(self) -> str:
        try:
            environment = json.loads((self.path / "environment.json").read_text())
            return f" (process {environment['pid']} on {environment['host']})"
        except (OSError, ValueError, KeyError):
            return ""
