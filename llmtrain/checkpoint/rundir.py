"""The run's folder: one live launch at a time, and nothing left of a killed one."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from llmtrain.base.errors import CheckpointError
from llmtrain.base.files import lock_folder
from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.checkpoint.retain import leftovers, remove
from llmtrain.config.in_use import in_use


class RunDirectory:
    """Paths of a run and the lock on its folder. Only rank 0 opens it; use as a context manager.

    The lock is flock on the folder itself: the kernel drops it with the process, so no lock file can go stale.
    """

    def __init__(self, path: str | Path, checkpoints: str | Path | None = None) -> None:
        """`checkpoints`: where they lie instead of in this folder, which then has a link to them."""
        self.path = Path(path)
        self.checkpoints = Path(checkpoints) if checkpoints else self.path / "checkpoints"
        self.export = self.path / "export"
        self._locks = contextlib.ExitStack()

    def __enter__(self) -> RunDirectory:
        """Raises CheckpointError when another launch holds the folder, or it cannot be made."""
        with contextlib.ExitStack() as locks:
            claim(self.path, "train.run_dir", locks)
            try:
                self._link()
                if self.checkpoints.parent != self.path:
                    claim(self.checkpoints, "checkpoint.dir", locks)
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                if not os.access(self.checkpoints, os.W_OK):
                    raise OSError(errno.EROFS, "nothing can be written in it")
            except OSError as error:
                raise CheckpointError(
                    f"train.run_dir: {self.path} cannot be used: {error.strerror}. Give another folder."
                ) from error
            tidy(self.checkpoints)
            self._locks = locks.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def _link(self) -> None:
        """`checkpoints` in the run's folder leads to them, wherever they lie. Raises CheckpointError, OSError."""
        link = self.path / "checkpoints"
        if self.checkpoints == link or (link.exists() and self.checkpoints.resolve() == link.resolve()):
            return
        if complete_checkpoints(link):
            raise CheckpointError(
                f"checkpoint.dir: {self.checkpoints}, but the checkpoints of this run lie in {link.resolve()}. Move "
                "them there on every host, or set checkpoint.dir as it was."
            )
        if link.is_symlink():
            link.unlink()
        elif link.is_dir():
            link.rmdir()
        link.symlink_to(self.checkpoints.absolute())

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


def claim(folder: Path, key: str, locks: contextlib.ExitStack) -> None:
    """Make a folder if need be and keep other launches out of it for as long as `locks` is open.

    Raises CheckpointError; `key` is the option that names the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = lock_folder(folder)
        except BlockingIOError:
            time.sleep(0.2)  # a launch that only looks (`refuse_if_in_use`) holds it for a moment
            handle = lock_folder(folder)
        locks.callback(os.close, handle)
    except BlockingIOError:
        raise CheckpointError(in_use(folder, key)) from None
    except OSError as error:
        raise CheckpointError(f"{key}: {folder} cannot be used: {error.strerror}. Give another folder.") from error


def tidy(checkpoints: Path) -> None:
    """Delete what killed saves and deletions left."""
    with leftovers(checkpoints) as found:
        remove(found)
