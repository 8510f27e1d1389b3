"""`llmtrain checkpoint prune`: delete a run's old checkpoints by hand. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmtrain.base import units
from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.format import FrozenSource, Manifest, complete_checkpoints
from llmtrain.checkpoint.listing import best_wanted, checkpoints_of, folder_bytes
from llmtrain.checkpoint.retain import leftovers, lock, outdated, remove
from llmtrain.checkpoint.verify import verify, verify_frozen


@dataclass(frozen=True)
class Pruned:
    lines: list[str]
    failed: bool
    """Something could not be deleted."""


def prune(run: Path, keep: int, dry_run: bool) -> Pruned:
    """Delete all but the `keep` newest good checkpoints, those of checkpoint.keep_best, the newest that verifies, and,
    while its frozen parameters are gone, those with another source; also unlocked leftovers. Raises CheckpointError: no
    checkpoint verifies, or `keep` is below 1."""
    if keep < 1:
        raise CheckpointError(f"--keep {keep}: at least one checkpoint stays. Give 1 or more.")
    checkpoints = checkpoints_of(run)
    lines = []
    for newest in complete_checkpoints(checkpoints):
        damage = verify(newest, whole=False)
        if not damage:
            break
        lines.append(f"damaged  {newest}  {damage[0]}")
    else:
        listed = "; ".join(lines) or "it holds no complete checkpoint"
        raise CheckpointError(f"{run}: no checkpoint verifies, so nothing was deleted. {listed}.")
    best = best_wanted(checkpoints)
    doomed = [folder for folder in outdated(checkpoints, keep, best=best) if folder != newest]
    if changed := verify_frozen(newest):
        lines.append(f"intact, without its frozen parameters  {newest}  {changed[0]}")
        doomed = [folder for folder in doomed if _frozen_of(folder) in (None, _frozen_of(newest))]
    problems: list[str] = []
    with _leftovers(checkpoints) as leftovers:
        total = 0
        for folder in [*doomed, *leftovers]:
            size = folder_bytes(folder)
            if not dry_run and not remove([folder], problems.append):
                continue
            total += size
            lines.append(f"{'would delete' if dry_run else 'deleted'}  {folder}  {units.size(size)}")
    kept = [folder for folder in complete_checkpoints(checkpoints) if folder not in doomed]
    lines += [f"could not delete  {problem}" for problem in problems]
    lines.append(
        f"{units.size(total)} {'would be ' if dry_run else ''}freed, {len(kept)} checkpoints kept, "
        f"{newest.name} verified"
    )
    return Pruned(lines, bool(problems))


def _frozen_of(folder: Path) -> FrozenSource | None:
    try:
        return Manifest.read(folder).frozen
    except CheckpointError:
        return None


@contextlib.contextmanager
def _leftovers(checkpoints: Path) -> Iterator[list[Path]]:
    """Folders that killed processes left, if no live launch may be writing there."""
    with contextlib.ExitStack() as locks:
        free = lock(checkpoints.parent, locks) and lock(checkpoints, locks)
        yield locks.enter_context(leftovers(checkpoints)) if free else []
