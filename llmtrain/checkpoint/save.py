"""Saves without stopping the training: copies at the step boundary, writes in another process, and commits when every
rank's file is durable.

A save passes through stages that all ranks enter together. Two numbers in the message that the ranks exchange at every
step (training/step.py) report their progress; a save adds one broadcast at its start and one gather at its end.

If hosts have separate folders, each host has a leader, which does there what rank 0 does in a common folder: the
checkpoint in its folder has the files of the host's ranks, trainer.json, and the manifest of all files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from llmtrain.base import log, units
from llmtrain.base.errors import CheckpointError
from llmtrain.base.rank.heartbeat import OTHERS, heart
from llmtrain.base.units import size
from llmtrain.checkpoint.durable import DurableFile, remove_tree
from llmtrain.checkpoint.format import HOSTS, MANIFEST, NOWHERE, FrozenSource, complete_checkpoints, step_folder
from llmtrain.checkpoint.retain import Best
from llmtrain.checkpoint.rundir import CheckpointFolder
from llmtrain.checkpoint.snapshot import (
    HostImage,
    RankFile,
    Snapshot,
    WriterDied,
    WriterProcess,
    boot_id,
    memory_available,
    write_piece,
    written,
)
from llmtrain.config.run import CheckpointConfig
from llmtrain.config.topology import Mix
from llmtrain.engine.api import Engine, StateTensor
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.optim.optimizers import PARAM

# Room on a disk for checkpoints, checked when a run begins and before each save.
_HEADROOM = 64 << 20  # bytes for headers, the manifest, and what else the run writes meanwhile


def lacks(checkpoints: Path, bytes_each: int) -> str | None:
    """Return why one more checkpoint has no room in the folder; None: it has. Raises OSError."""
    free = shutil.disk_usage(checkpoints).free
    if free >= bytes_each + _HEADROOM:
        return None
    old = complete_checkpoints(checkpoints)[1:]
    could = sum(file.stat().st_size for folder in old for file in folder.iterdir())
    remedy = (
        f"`llmtrain checkpoint prune {checkpoints.parent} --keep 1` would free {units.size(could)}"
        if old
        else "There is no older checkpoint that could go"
    )
    return (
        f"no space for a checkpoint in {checkpoints}: it takes {units.size(bytes_each)}, {units.size(_HEADROOM)} must "
        f"stay free for the run's logs and other files, and {units.size(free)} are free. {remedy}."
    )


def will_lack(checkpoints: Path, bytes_each: int, keep: int) -> str | None:
    """Return why space will run out later, when `keep` checkpoints stay while another is written; None: it will not."""
    try:
        free = shutil.disk_usage(checkpoints).free
        to_come = max(1, max(1, keep) + 1 - len(complete_checkpoints(checkpoints)))
    except OSError:  # the save will report it
        return None
    if free >= to_come * bytes_each + _HEADROOM:
        return None
    return (
        f"{checkpoints} will run out of space: this run writes {to_come} checkpoints of {units.size(bytes_each)} "
        f"before one is deleted (checkpoint.keep {keep}, and the one that is written), {units.size(_HEADROOM)} must "
        f"stay free for logs and whatever else the run writes, and {units.size(free)} are free. "
        "Make room, or set checkpoint.dir to a larger disk or checkpoint.keep lower."
    )


# The host memory for asynchronous saves and the process that writes it to disk, acquired while training begins.


class HostCopy:
    """The memory for a copy of a rank's file, and the process that writes it. A thread gets and page-locks the memory
    (seconds for 15 GB) and lives until `close`: when it ends, the kernel kills the writer (PR_SET_PDEATHSIG)."""

    def __init__(self, plan: RankFile, table: dict[str, Any], device: torch.device) -> None:
        """`table`: facts for the writer (`writer.perform`)."""
        self._plan, self._table, self._device = plan, table, device
        self._image: HostImage | None = None
        self._writer: WriterProcess | None = None
        self._problem: str | None = None
        self._done, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._acquire_memory, name="checkpoint-memory", daemon=True)
        self._thread.start()

    def _acquire_memory(self) -> None:
        cuda = self._device.type == "cuda"
        try:
            if cuda:
                torch.cuda.set_device(self._device)
            self._image = HostImage(self._plan, cuda=cuda)
            self._writer = WriterProcess(self._image, self._table)
        except Exception as problem:  # any error: the other ranks must hear of it
            self._problem = f"a copy takes {size(self._plan.bytes)} of host memory and a process: {problem}"
        finally:
            self._done.set()
        self._closing.wait()

    def problem(self) -> str | None:
        """Wait for the memory and the writer. Returns why one of them is missing; None: both are there."""
        self._done.wait()
        return self._problem

    @property
    def image(self) -> HostImage:
        assert self._image is not None
        return self._image

    def writer(self) -> WriterProcess:
        """Return the writer; after `drop_writer` a new one. Raises OSError."""
        if self._writer is None:
            self._writer = WriterProcess(self.image, self._table)
        return self._writer

    @property
    def writer_pid(self) -> int:
        return OTHERS if self._writer is None else self._writer.pid

    def answer(self) -> dict[str, Any] | None:
        return None if self._writer is None else self._writer.answer()

    def drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        self._done.wait()
        self.drop_writer()
        self._closing.set()
        self._thread.join()
        if self._image is not None:
            self._image.close()
            self._image = None


_POLL_S = 0.01


class _Stage(Enum):
    IDLE = 0
    WRITING = 1
    """Ranks copy and write their files."""
    ENDING = 2
    """The folder's leader commits the checkpoint, or removes a failed save."""
    TIDYING = 3
    """Only with several folders: the leaders delete old checkpoints if all have committed, else this one."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    step: int
    path: Path | None
    """The complete checkpoint, or None when the save failed."""
    error: str | None
    seconds: float
    """Seconds from the step boundary until the checkpoint was durable."""
    blocked_s: float
    """The part of these seconds in which training waited."""


class Saver:
    """Makes a run's saves. All ranks call every method together, except `before_update`. Use as a context manager."""

    def __init__(
        self,
        engine: Engine,
        folder: CheckpointFolder,
        settings: CheckpointConfig,
        mix: Mix,
        ranks: Ranks,
        frozen: FrozenSource = NOWHERE,
        more: Callable[[], list[StateTensor]] = list,
    ) -> None:
        """`mix`: recorded in the checkpoint. `frozen`: parameters that checkpoints name but do not hold. `more`:
        returns further tensors to save, which stay unchanged between a step and the next update."""
        self._engine, self._folder, self._ranks, self._frozen = engine, folder, ranks, frozen
        self._more, self._keep = more, settings.keep
        best = Best.chosen(settings.keep_best)
        self._best = None if best is None else asdict(best)
        self.asynchronous = settings.mode == "async"
        self._layout = {
            "world_size": ranks.world_size,
            "zero_stage": mix.zero_stage,
            "precision": mix.precision,
            **mix.moments,
            **{key: value for key, value in asdict(mix.degrees).items() if key != "data" and value > 1},
        }
        if folder.split:
            self._layout[HOSTS] = {self._file(rank): host for rank, host in enumerate(folder.hosts)}
        self._plan: RankFile | None = None
        self._copy: HostCopy | None = None
        self._has_copy = False
        """True once every rank has its copy."""
        self._snapshot = Snapshot(ranks.device)
        self._stage = _Stage.IDLE
        self._table: dict[str, Any] = {}
        """Facts for the writer: the pieces of this rank's file; on a leader also those of all files, and the shapes."""
        self._need_bytes = 0
        """Bytes of a checkpoint in this rank's folder."""
        self._answer: dict[str, Any] | None = None
        """Result of this rank's work in the stage: {"error"} or the writer's answer; None while it is under way."""
        self._trainer = ""
        self._errors: list[str] = []

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._snapshot.wait_before_update()
        self._release()

    def _release(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    @property
    def busy(self) -> bool:
        return self._stage is not _Stage.IDLE

    def prepare(self) -> None:
        """Lay out the files, and start to get the memory for asynchronous saves."""
        if self._plan is not None:
            return
        self._plan = RankFile(self._pieces())
        pieces = [piece.to_json() for piece in self._plan.pieces]
        mine = (self._file(self._ranks.rank), pieces, self._plan.bytes, boot_id())
        shares = self._ranks.gather(mine)
        frozen = self._ranks.first(self._frozen.to_json)  # hosts may have different paths, a manifest has one
        self._need_bytes = sum(shares[rank][2] for rank in self._folder.members)
        self._table = {"own": [(offset, dtype, piece.to_json()) for offset, dtype, piece in self._plan.layout]}
        if self._folder.leads:
            self._table["frozen"] = frozen
            self._table["pieces"] = {share[0]: share[1] for share in shares}
            self._table["tensors"] = {name: list(shape) for name, shape in self._engine.shapes().items()}
        if self.asynchronous:
            error, free = None, memory_available()
            if (wanted := sum(share[2] for share in shares if share[3] == boot_id())) > 0.9 * free:  # on this host
                error = f"a copy takes {units.size(wanted)} of host memory, {units.size(free)} are available"
            if any(piece.on_disk for piece in self._pieces()):
                error = "the optimizer's state is on a disk, because host memory is short"
            if not self._save_without_copy(self._ranks.gather(error)):
                self._copy = HostCopy(self._plan, self._table, self._ranks.device)

    def shortage(self, keep: int) -> str | None:
        """Return why a folder will have no room for `keep` checkpoints and the next one, or None. Call `prepare`
        before. Raises CheckpointError on every rank: when there is no room for a single one."""
        none = few = None
        if self._folder.leads:
            with contextlib.suppress(OSError):  # the save will report it
                none = lacks(self._folder.path, self._need_bytes)
            few = will_lack(self._folder.path, self._need_bytes, keep)
        reports = self._ranks.gather((none, few))
        if reason := next((none for none, _ in reports if none), None):
            raise CheckpointError(f"{reason} Make room, or set checkpoint.dir to a larger disk. Nothing was trained.")
        return next((few for _, few in reports if few), None)

    def begin(self, step: int, trainer: dict[str, Any]) -> None:
        """Start a save. Until the copy is made, `before_update` delays the next optimizer update. Raises
        CheckpointError on every rank: when there is no space, or the folder cannot be written."""
        assert not self.busy
        self._began_s = time.monotonic()
        self.prepare()
        if self._copy is not None and not self._has_copy:  # wait until every rank has one, or all save without
            self._has_copy = not self._save_without_copy(self._ranks.gather(self._copy.problem()))
        self._step, self._final = step, step_folder(self._folder.path, step)
        # A name for this save alone, so that late writes of a dead launch go elsewhere.
        name = f"{self._final.name}.{secrets.token_hex(4)}.tmp"
        name, self._trainer, error = self._ranks.first(
            lambda: (name, json.dumps(trainer, indent=1), self._make_folder(name))
        )
        self._partial = self._final.with_name(name)
        if self._folder.split and not error:
            leads_elsewhere = self._folder.leads and self._ranks.rank != 0
            errors = self._ranks.gather(self._make_folder(name) if leads_elsewhere else None)
            error = next(filter(None, errors), None)
            if error and self._folder.leads:
                remove_tree(self._partial)
        if error:
            raise CheckpointError(error)
        self._answer, self._errors = None, []
        self._stage = _Stage.WRITING
        path = self._partial / self._file(self._ranks.rank)
        pieces = self._pieces()
        assert self._plan is not None and self._plan.holds(pieces), "the optimizer's state has another layout now"
        if self.asynchronous:
            self._write_behind(path, pieces)
        else:
            self._answer = self._with_error(lambda: self._write_here(path, pieces))
        self._blocked_s = time.monotonic() - self._began_s

    def before_update(self) -> None:
        began_s = time.monotonic()
        self._snapshot.wait_before_update()
        if self.busy:
            self._blocked_s += time.monotonic() - began_s

    def status(self) -> tuple[bool, bool]:
        """Return (this rank's work in the stage has ended, it has failed), for the ranks' next message."""
        if self._stage is _Stage.IDLE:
            return False, False
        if self._answer is None:
            self._answer = self._answer_of_writer()
        return self._answer is not None, bool(self._answer and "error" in self._answer)

    def advance(self, ended: int, failed: int) -> Outcome | None:
        """Enter the next stage if all ranks have ended this one. `ended`, `failed`: sums of the ranks' `status`.
        Returns the outcome when the save has ended, else None."""
        if self._stage is _Stage.IDLE or ended < self._ranks.world_size:
            return None
        if self._stage is _Stage.WRITING:
            self._commit_or_discard(bool(failed))
            return None
        if self._stage is _Stage.ENDING and not self._errors:
            if failed:
                self._errors = self._complaints(f"complete {self._final}", self._ranks.gather(self._answer))
            if self._folder.split:
                self._delete_old()
                return None
        self._stage = _Stage.IDLE
        return Outcome(
            step=self._step,
            path=None if self._errors else self._final,
            error="; ".join(self._errors) or None,
            seconds=time.monotonic() - self._began_s,
            blocked_s=self._blocked_s + self._snapshot.device_wait_s(),
        )

    def drain(self) -> Outcome | None:
        self.before_update()
        outcome = None
        with heart.during("save"):
            while self.busy:
                awaited = OTHERS if self._answer is not None or self._copy is None else self._copy.writer_pid
                heart.awaits(awaited if self.asynchronous else os.getpid())
                sums = self._ranks.sum(torch.tensor(self.status(), dtype=torch.int64))
                outcome = self.advance(*sums.tolist())
                if self.busy and (self._stage is _Stage.WRITING or self._answer is None):
                    time.sleep(_POLL_S)
            heart.awaits(0)
        return outcome

    def _pieces(self) -> list[StateTensor]:
        return written((*self._engine.state(), *self._more()), self._frozen.parts)

    def check_shares(self) -> None:
        """Prove that the ranks' pieces of each parameter have all of its elements, which wrong pieces would not."""
        shapes = self._engine.shapes()
        elements = dict.fromkeys(sorted(shapes), 0)
        for piece in self._engine.state():
            elements[piece.name] += piece.own_region.numel if piece.kind == PARAM else 0
        total = self._ranks.sum(torch.tensor(list(elements.values()), dtype=torch.int64))
        wrong = {n: count for n, count in zip(elements, total.tolist(), strict=True) if count != math.prod(shapes[n])}
        assert not wrong, f"elements that the ranks together would write of a parameter: {wrong}"

    def _file(self, rank: int) -> str:
        return f"rank-{rank:05d}.safetensors"

    def _save_without_copy(self, errors: list[str | None]) -> bool:
        """If any rank has an error, save without a copy from now on and return True."""
        if not any(errors):
            return False
        log.warn(f"checkpoint.mode async: {next(e for e in errors if e)}. Saving without a copy: training waits.")
        self.asynchronous = False
        self._release()  # also on ranks that have a copy: host memory is short
        return True

    def _make_folder(self, name: str) -> str | None:
        """Make the folder of a save, on a leader. Returns the error, or None."""
        checkpoints = self._folder.path
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            if reason := lacks(checkpoints, self._need_bytes):
                return reason
            (checkpoints / name).mkdir()
        except OSError as problem:
            return f"cannot make {checkpoints / name}: {problem.strerror}"
        return None

    def _write_behind(self, path: Path, pieces: list[StateTensor]) -> None:
        assert self._copy is not None
        try:
            writer = self._copy.writer()
        except OSError as error:
            self._answer = self._replace_writer(error)
            return
        job = {"do": "write", "path": str(path)}
        try:
            self._snapshot.start(pieces, self._copy.image.slots, then=lambda: writer.send(job))
        except RuntimeError as error:
            self._answer = self._replace_writer(error)

    def _write_here(self, path: Path, pieces: list[StateTensor]) -> dict[str, Any]:
        """Write this rank's file now, a chunk at a time, without a copy of the state."""
        assert self._plan is not None
        sums = []
        with DurableFile(path) as file:
            file.write(memoryview(self._plan.header))
            for piece in pieces:
                sums.append(write_piece(file, piece))
            size, xxh3 = file.close()
        return {"bytes": size, "xxh3": xxh3, "checksums": sums}

    def _answer_of_writer(self) -> dict[str, Any] | None:
        if self._snapshot.error is not None:
            error, self._snapshot.error = self._snapshot.error, None
            return self._replace_writer(error)
        try:
            return None if self._copy is None else self._copy.answer()
        except WriterDied as error:
            return self._replace_writer(error)

    def _replace_writer(self, error: BaseException) -> dict[str, Any]:
        """Drop the writer, so that the next save starts a new one. Returns this rank's answer, whose "copy" asks to
        save without a copy after an `error` of the device."""
        if self._copy is not None:
            self._copy.drop_writer()
        if self._stage is _Stage.ENDING and not self._errors:
            if not self._partial.exists() and (self._final / MANIFEST).is_file():
                return {}  # the writer died after the last rename
            remove_tree(self._partial)
        return {"error": str(error), "copy": isinstance(error, RuntimeError)}

    def _with_error(self, work: Any) -> dict[str, Any]:
        try:
            return work()
        except OSError as error:
            return {"error": f"{error.strerror} ({error.filename or self._partial})"}
        except RuntimeError as error:  # of the device
            return {"error": str(error)}

    def _commit_or_discard(self, failed: bool) -> None:
        """Order the leaders to commit the checkpoint if all files are durable, else to remove it."""
        answers = self._ranks.gather(self._answer)
        self._answer = {}
        self._stage = _Stage.ENDING
        if failed:
            self._errors = self._complaints("write its file", answers)
            self._save_without_copy([a["error"] if a and a.get("copy") else None for a in answers])
            message: dict[str, Any] = {"do": "discard", "folder": str(self._partial)}
        else:
            message = {
                "do": "commit",
                "partial": str(self._partial),
                "final": str(self._final),
                "step": self._step,
                "layout": self._layout,
                "written": {self._file(rank): answer for rank, answer in enumerate(answers)},
                "trainer": self._trainer,
                "keep": None if self._folder.split else self._keep,
                "best": self._best,
            }
        self._order_leader(message)

    def _delete_old(self) -> None:
        """Order the leaders to delete old checkpoints if all have committed, else the new one."""
        self._answer = {}
        self._stage = _Stage.TIDYING
        if self._errors:
            self._order_leader({"do": "discard", "folder": str(self._final)})
        else:
            retention = {"keep": self._keep, "best": self._best}
            self._order_leader({"do": "keep", "checkpoints": str(self._folder.path), **retention})

    def _complaints(self, what: str, answers: list[dict[str, Any] | None]) -> list[str]:
        return [f"rank {rank} could not {what}: {a['error']}" for rank, a in enumerate(answers) if a and "error" in a]

    def _order_leader(self, message: dict[str, Any]) -> None:
        """Send an order to the writer of this folder's leader, or do it here without a writer."""
        if not self._folder.leads:
            return
        if not self.asynchronous:
            from llmtrain.checkpoint.writer import perform  # else in its own process

            self._answer = self._with_error(lambda: perform(message, self._table, None))
            return
        assert self._copy is not None
        self._answer = None
        try:
            self._copy.writer().send(message)
        except OSError as error:
            self._answer = self._replace_writer(error)
