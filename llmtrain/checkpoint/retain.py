"""Retention: the checkpoints of a run that may go. No torch: the writer process calls it after each save."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from llmtrain.base import log
from llmtrain.base.errors import CheckpointError
from llmtrain.base.files import lock_folder
from llmtrain.checkpoint.durable import remove_tree
from llmtrain.checkpoint.format import Manifest, complete_checkpoints, problems, stale_folders


def looks_good(folder: Path) -> bool:
    """True if the manifest is whole and every file of this host is there at its size. Reads the manifest only."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return False
    names = sorted(manifest.files.keys() - manifest.elsewhere(folder).keys())
    return not problems(folder, manifest, names, contents=False)


def outdated(checkpoints: Path, keep: int, good: Callable[[Path], bool] = looks_good) -> list[Path]:
    """The complete checkpoints that are older than the `keep` (at least 1) newest good ones, newest first.

    A checkpoint that is not good does not count among the `keep`: the newest good one never stands in the answer.
    """
    kept = 0
    found = complete_checkpoints(checkpoints)
    for index, folder in enumerate(found):
        if good(folder):
            kept += 1
        if kept >= max(1, keep):
            return found[index + 1 :]
    return []


def remove(folders: list[Path], complain: Callable[[str], None] = log.warn) -> list[Path]:
    """Delete checkpoints; returns those that are gone. What cannot be deleted is told to `complain`, never raised."""
    gone = []
    for folder in folders:
        problem = "not all of it could be deleted"
        try:
            remove_tree(folder)
        except OSError as error:
            problem = error.strerror or str(error)
        if folder.exists() or folder.with_name(folder.name + ".trash").exists():
            complain(f"{folder} cannot be deleted: {problem}. Delete it by hand, or its space stays taken.")
        else:
            gone.append(folder)
    return gone


def set_aside(damaged: list[Path]) -> None:
    """Give damaged checkpoints another name, or retention would count them as the newest."""
    for folder in damaged:
        try:
            if folder.exists():
                folder.rename(folder.with_name(f"{folder.name}.damaged"))
        except OSError as error:
            log.warn(f"{folder} is damaged and could not be renamed to {folder.name}.damaged: {error.strerror}")


def keep_newest(checkpoints: Path, keep: int, complain: Callable[[str], None] = log.warn) -> list[Path]:
    """Delete all but the `keep` newest good checkpoints and what is newer than them; returns those that are gone."""
    try:
        doomed = outdated(checkpoints, keep)
    except OSError as error:
        complain(f"{checkpoints} cannot be listed: {error.strerror}. No old checkpoint was deleted.")
        return []
    return remove(doomed, complain)


@contextlib.contextmanager
def leftovers(checkpoints: Path) -> Iterator[list[Path]]:
    """Folders that killed saves, deletions and conversions left; locked until this context ends."""
    with contextlib.ExitStack() as locks:
        yield [folder for folder in stale_folders(checkpoints) if lock(folder, locks)]


def lock(folder: Path, locks: contextlib.ExitStack) -> bool:
    """Take the lock of a folder for as long as `locks` is open. False: another process has it."""
    try:
        locks.callback(os.close, lock_folder(folder))
    except OSError:
        return False
    return True
