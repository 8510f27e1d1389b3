"""Which checkpoint a launch continues from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.folder import CheckpointFolder
from llmtrain.checkpoint.format import complete_checkpoints, read_trainer
from llmtrain.checkpoint.gather import whole
from llmtrain.checkpoint.listing import find_checkpoints
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.config.run import RunConfig
from llmtrain.engine.dist.control import from_all
from llmtrain.engine.dist.ranks import Ranks


def agreed_candidates(
    run: RunConfig, folder: RunDirectory, where: CheckpointFolder, ranks: Ranks
) -> tuple[list[Path], bool, dict[Path, str]]:
    """(`candidates`, own, what is not whole and why): the same on every rank, from what the leaders find.

    On a shared file system each rank looking for itself could see another newest one.
    """
    found: tuple[list[str], bool, str | None] = ([], False, None)
    if where.leads:
        try:
            paths, own = candidates(run, folder)
            found = ([str(path) for path in paths], own, None)
        except CheckpointError as error:
            found = ([], False, str(error))
    shares = from_all(ranks, found)
    refused = next((message for *_, message in shares if message), None)
    if refused:
        raise CheckpointError(refused)
    own = any(share[1] for share in shares)
    if where.split:
        mine = [Path(path) for path in found[0]] if found[1] == own else []
        good, rejected = whole(mine, where, ranks)
        return good, own, rejected
    return [Path(path) for path in shares[0][0]], own, {}


def candidates(run: RunConfig, folder: RunDirectory) -> tuple[list[Path], bool]:
    """Checkpoints to try, newest first, and whether they are this run's own.

    A launch that ended after its first checkpoint is continued by the same command line, whatever `resume` says of
    the beginning: with a path, the run folder's own checkpoints win if they began from that path.

    Raises:
        CheckpointError: the run folder holds what does not go together with `resume`.
    """
    own = complete_checkpoints(folder.checkpoints)
    if run.resume == "none":
        folder.refuse_old_checkpoints()
        return [], True
    if run.resume == "auto":
        return own, True
    meant = Path(run.resume).resolve()
    if meant in (folder.path.resolve(), folder.checkpoints.resolve()) and not run.resume_weights_only and own:
        return own, True  # the run's own folder: as auto
    if meant.parent == folder.checkpoints.resolve():
        if run.resume_weights_only:
            raise CheckpointError(
                f"resume: {run.resume} with resume_weights_only begins a new run, but the checkpoint lies in the run "
                f"folder {folder.path} itself. Give the new run a train.run_dir of its own."
            )
        folder.refuse_going_back(run.resume)
        return [Path(run.resume)], True
    if not own:
        return _named(Path(run.resume)), False
    if _began_from(own) != origin(run):
        raise CheckpointError(
            f"resume: {run.resume}, but {folder.path} holds {own[0].name} of a run that did not begin there. Use "
            "--resume auto to continue that run, or give the new one a train.run_dir of its own."
        )
    return own, True


def _named(path: Path) -> list[Path]:
    """The checkpoints that a path means, newest first: of a run's folder all that are whole, as for other commands."""
    try:
        return find_checkpoints(path)
    except CheckpointError:  # what it lacks is said when it is opened
        return [path]


def origin(run: RunConfig) -> dict[str, Any]:
    """What a run that starts at a path is begun from."""
    return {"path": str(Path(run.resume).resolve()), "weights_only": run.resume_weights_only}


def _began_from(own: list[Path]) -> dict[str, Any] | None:
    for folder in own:
        try:
            return read_trainer(folder).get("began_from")
        except CheckpointError:  # damaged; it will be said when it is looked at
            continue
    return None
