"""Retention: the checkpoints of a run to delete. No torch: the writer process calls it after each save."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain import features
from llmtrain.base import log
from llmtrain.base.errors import CheckpointError
from llmtrain.base.files import lock_folder
from llmtrain.checkpoint.durable import remove_tree
from llmtrain.checkpoint.format import Manifest, complete_checkpoints, problems, stale_folders, step_of
from llmtrain.checkpoint.trainer_state import TrainerState

if TYPE_CHECKING:
    from llmtrain.config.run import KeepBest


def looks_good(folder: Path) -> bool:
    """Return True if the manifest is valid and this host's files have their sizes. Reads only the manifest."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return False
    names = sorted(manifest.files.keys() - manifest.elsewhere(folder).keys())
    return not problems(folder, manifest, names, contents=False)


@dataclass(frozen=True, kw_only=True)
class Best:
    """Which checkpoints a run keeps as its best: `checkpoint.keep_best`."""

    metric: str
    keep: int
    mode: str
    """min or max."""

    @classmethod
    def chosen(cls, settings: KeepBest) -> Best | None:
        """Return the settings as a `Best`; None without `checkpoint.keep_best`."""
        if settings.metric is None:
            return None
        return cls(metric=settings.metric, keep=settings.keep, mode=settings.mode or "min")

    @classmethod
    def of(cls, trainer: TrainerState) -> Best | None:
        """Return what a checkpoint's run keeps, with every type checked; None: it keeps no best checkpoints."""
        saved = trainer.section("checkpoint").get("keep_best")
        if not isinstance(saved, dict) or not isinstance(saved.get("metric"), str):
            return None
        keep = saved.get("keep")
        mode = "max" if saved.get("mode") == "max" else "min"
        return cls(metric=saved["metric"], keep=keep if type(keep) is int and keep > 0 else 1, mode=mode)

    def figure(self, trainer: TrainerState) -> float | None:
        """Return the metric evaluated at the checkpoint's step; None if there was none, or if it is not finite."""
        evaluation = trainer.entries.get("evaluation")
        if not isinstance(evaluation, dict) or evaluation.get("step") != trainer.step:
            return None
        figures = evaluation.get("figures")
        value = figures.get(self.metric) if isinstance(figures, dict) else None
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def first(self, figures: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return the `keep` best of the (step, figure), best first; of equal figures the earlier step comes first."""
        sign = -1 if self.mode == "max" else 1
        return sorted(figures, key=lambda pair: (sign * pair[1], pair[0]))[: self.keep]


def best_of(checkpoints: Path, best: Best | None) -> dict[Path, float]:
    """Return the best checkpoints with their figures, best first."""
    if best is None:
        return {}
    with_figure = {}
    for folder in complete_checkpoints(checkpoints):
        with contextlib.suppress(CheckpointError):
            if (figure := best.figure(TrainerState.read(folder))) is not None and looks_good(folder):
                with_figure[step_of(folder) or 0] = (folder, figure)
    first = best.first((step, figure) for step, (_, figure) in with_figure.items())
    return {with_figure[step][0]: figure for step, figure in first}


def outdated(checkpoints: Path, keep: int, *, best: Best | None = None) -> list[Path]:
    """Return the checkpoints to delete, newest first: the complete ones that are older than the `keep` (at least 1)
    newest good ones, except the `best` and those that a feature keeps."""
    good = 0
    complete = complete_checkpoints(checkpoints)
    for index, folder in enumerate(complete):
        if looks_good(folder):
            good += 1
        if good >= max(1, keep):
            older = complete[index + 1 :]
            stays = [*best_of(checkpoints, best), *features.keeps(checkpoints)] if older else []
            return [folder for folder in older if folder not in stays]
    return []


def remove(folders: list[Path], complain: Callable[[str], None] = log.warn) -> list[Path]:
    """Delete folders, and return those that are gone. `complain` gets a message for each failure; nothing is raised."""
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
    """Rename damaged checkpoints, since retention would count them among the newest."""
    for folder in damaged:
        try:
            if folder.exists():
                folder.rename(folder.with_name(f"{folder.name}.damaged"))
        except OSError as error:
            log.warn(f"{folder} is damaged and could not be renamed to {folder.name}.damaged: {error.strerror}")


def keep_newest(
    checkpoints: Path, keep: int, complain: Callable[[str], None] = log.warn, *, best: Best | None = None
) -> list[Path]:
    """Delete all but the `keep` newest good checkpoints, newer ones and the best. Returns the deleted ones."""
    try:
        doomed = outdated(checkpoints, keep, best=best)
    except OSError as error:
        complain(f"{checkpoints} cannot be listed: {error.strerror}. No old checkpoint was deleted.")
        return []
    return remove(doomed, complain)


@contextlib.contextmanager
def leftovers(checkpoints: Path) -> Iterator[list[Path]]:
    """A context with the folders that killed saves, deletions and conversions left, which are locked until it ends."""
    with contextlib.ExitStack() as locks:
        yield [folder for folder in stale_folders(checkpoints) if lock(folder, locks)]


def tidy(checkpoints: Path) -> None:
    """Delete what failed saves and killed processes left. No other process may be writing there."""
    with leftovers(checkpoints) as leftover:
        remove(leftover)


def lock(folder: Path, locks: contextlib.ExitStack) -> bool:
    """Lock a folder until `locks` closes. Returns False if another process has the lock."""
    try:
        locks.callback(os.close, lock_folder(folder))
    except OSError:
        return False
    return True
