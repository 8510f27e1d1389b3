"""The run's folder, which only one live launch may use, and its cleanup after a killed launch."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.base.errors import CheckpointError
from llmtrain.base.files import in_use, lock_folder
from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.checkpoint.retain import tidy
from llmtrain.config.run import RunConfig
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.storage.addresses import is_url


class RunDirectory:
    """A run's paths, and the lock on its folder (flock, which ends with the process). Only rank 0 enters it."""

    def __init__(self, path: str | Path, checkpoints: str | Path | None = None) -> None:
        """`checkpoints`: the folder for checkpoints outside of the run's folder, which then has a link to it."""
        self.path = Path(path)
        self.checkpoints = Path(checkpoints) if checkpoints else self.path / "checkpoints"
        self.export = self.path / "export"
        self._locks = contextlib.ExitStack()

    def __enter__(self) -> RunDirectory:
        """Lock the folder and clean it up. Raises CheckpointError: when another launch has it, or it cannot be made."""
        with contextlib.ExitStack() as locks:
            claim(self.path, "train.run_dir", locks)
            try:
                self._link_checkpoints()
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

    def _link_checkpoints(self) -> None:
        """Make `checkpoints` in the run's folder a link to their folder. Raises CheckpointError, OSError."""
        link = self.path / "checkpoints"
        if self.checkpoints == link or (link.exists() and self.checkpoints.resolve() == link.resolve()):
            return
        if complete_checkpoints(link):
            raise CheckpointError(
                f"checkpoint.dir: {self.checkpoints}, but the checkpoints of this run are in {link.resolve()}. Move "
                "them there on every host, or set checkpoint.dir as it was."
            )
        if link.is_symlink():
            link.unlink()
        elif link.is_dir():
            link.rmdir()
        link.symlink_to(self.checkpoints.absolute())

    def refuse_old_checkpoints(self) -> None:
        """For `--resume none`: raise CheckpointError if the folder holds a run already."""
        checkpoints = complete_checkpoints(self.checkpoints)
        if checkpoints:
            raise CheckpointError(
                f"resume: none, but {self.path} holds {checkpoints[0].name}. Use --resume auto to continue it, "
                "or give a new train.run_dir; a run is never overwritten."
            )

    def refuse_going_back(self, chosen: str) -> None:
        """For `--resume PATH`: raise CheckpointError if the path is a checkpoint of this run other than its newest."""
        newest = next(iter(complete_checkpoints(self.checkpoints)), None)
        of_this_run = Path(chosen).resolve().parent == self.checkpoints.resolve()
        if newest is not None and of_this_run and newest.resolve() != Path(chosen).resolve() and Path(chosen).exists():
            raise CheckpointError(
                f"resume: {chosen} is older than {newest.name} of the same run, and its steps would be mixed "
                "with the later ones. Give the branch a train.run_dir of its own, or delete the newer checkpoints."
            )


def claim(folder: Path, key: str, locks: contextlib.ExitStack) -> None:
    """Make a folder if need be, and lock it until `locks` closes. `key`: for messages. Raises CheckpointError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = lock_folder(folder)
        except BlockingIOError:
            time.sleep(0.2)  # a launch that only looks (`refuse_if_in_use`) may hold it for a moment
            handle = lock_folder(folder)
        locks.callback(os.close, handle)
    except BlockingIOError:
        raise CheckpointError(in_use(folder, key)) from None
    except OSError as error:
        raise CheckpointError(f"{key}: {folder} cannot be used: {error.strerror}. Give another folder.") from error


_APPEARS_S = 5.0
"""Seconds to wait for a file, which a file server may show to other hosts a moment later."""
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    path: Path
    leaders: tuple[int, ...]
    """For each rank, the rank that makes, completes and deletes checkpoints in its folder."""
    hosts: tuple[str, ...]
    """For each rank, the name of its host."""
    rank: int

    @property
    def split(self) -> bool:
        """True if ranks see different folders, each with the files of its own ranks."""
        return len(set(self.leaders)) > 1

    @property
    def leads(self) -> bool:
        return self.leaders[self.rank] == self.rank

    @property
    def members(self) -> list[int]:
        mine = self.leaders[self.rank]
        return [rank for rank, leader in enumerate(self.leaders) if leader == mine]


@contextlib.contextmanager
def open_checkpoints(folder: RunDirectory, config: RunConfig, ranks: Ranks) -> Iterator[CheckpointFolder]:
    """The folder for checkpoints, locked by its leaders. All ranks enter together; all raise a CheckpointError."""
    shared = find_folder(folder.checkpoints, ranks, own=config.checkpoint.dir is not None)
    with contextlib.ExitStack() as locks:
        with ranks.together():
            if shared.leads and ranks.rank != 0:  # rank 0 locks its own with the run's folder
                claim(shared.path, "checkpoint.dir", locks)
                tidy(shared.path)
        yield shared


def find_folder(path: Path, ranks: Ranks, *, own: bool = False) -> CheckpointFolder:
    """Make the folder at `path` if it is missing, and find which ranks share it.

    `own`: True if each host may have a folder of its own there. All ranks call it together, and raise the same
    CheckpointError.
    """
    hosts = tuple(seat.host for seat in ranks.seats) or ("this host",) * ranks.world_size
    mark = path / ranks.first(lambda: f".seen-{secrets.token_hex(8)}")
    error = _leave(mark, 0) if ranks.rank == 0 else None
    ranks.meet()  # rank 0 leads the folder that it sees
    if ranks.rank != 0 and own:
        error = _leave(mark, ranks.rank)
    shares: list[Any] = ranks.gather(error)
    leader = None if error or (shares[0] and not own) else _read(mark)
    if not any(shares):
        shares = ranks.gather(leader)
    if leader == ranks.rank:
        with contextlib.suppress(OSError):
            mark.unlink()
    errors = [f"{host}: {answer}" for host, answer in zip(hosts, shares, strict=True) if isinstance(answer, str)]
    if errors:
        raise CheckpointError("; ".join(dict.fromkeys(errors)))
    if None in shares:
        blind = dict.fromkeys(host for host, answer in zip(hosts, shares, strict=True) if answer is None)
        raise CheckpointError(
            f"train.run_dir: {path} on {', '.join(blind)} is not the folder that {hosts[0]} sees there, so the ranks "
            "cannot save together. Mount the shared file system, put train.run_dir on one, or set checkpoint.dir to a "
            "folder on each host's own disk."
        )
    return CheckpointFolder(path=path, leaders=tuple(shares), hosts=hosts, rank=ranks.rank)


def _leave(mark: Path, rank: int) -> str | None:
    """Mark this rank as the leader if it is the first in the folder. Returns the error, or None."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        with open(mark, "x") as file:
            file.write(f"{rank}\n")
    except FileExistsError:
        return None
    except OSError as error:
        return f"{mark.parent} cannot be used: {error.strerror}. Give another folder."
    return None


def _read(mark: Path) -> int | None:
    """Return the rank that leads the folder; None if the mark does not appear."""
    until = time.monotonic() + _APPEARS_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):  # a file server may show it before its contents
            return int(mark.read_text())
        time.sleep(_POLL_S)
    return None


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The checkpoints that a launch may resume from. False if there are none, so that a run begins."""

    paths: list[Path]
    """Newest first."""
    own: bool
    """True if the checkpoints are of this run, not of another."""
    incomplete: dict[Path, str] = field(default_factory=dict)
    """Checkpoint -> why it is incomplete: of some of its files no host has a copy."""

    def __bool__(self) -> bool:
        return bool(self.paths or self.incomplete)


def origin(config: RunConfig) -> dict[str, Any]:
    path = config.resume if is_url(config.resume) else str(Path(config.resume).resolve())
    return {"path": path, "weights_only": config.resume_weights_only}
