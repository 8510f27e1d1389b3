"""When a run compares what its ranks hold, its masters with what it trains, its data with the checksums of its
manifests; how a difference ends it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from llmtrain.base.errors import DataError, TrainingStopped
from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.config.run import RunConfig
from llmtrain.config.topology import Degrees
from llmtrain.data.shards import FileSum
from llmtrain.data.stream.loader import StepBatch
from llmtrain.engine.api import Engine
from llmtrain.engine.dist.control import from_all
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.engine.replicas import Difference, Replicas, describe, tensor_hash
from llmtrain.engine.weights import Apart, apart
from llmtrain.training.step import is_due

if TYPE_CHECKING:
    from llmtrain.tracking.tracker import Tracker

_BEAT_S = 1.0


class ReplicasDiffer(TrainingStopped):
    """What several ranks should hold alike differs. Another start may do better: most bits are lost once, and the
    newest checkpoint is of ranks that agreed."""

    passing = True


class MastersDiffer(TrainingStopped):
    """The optimizer keeps other values than the forward pass reads: a checkpoint would hold what nobody trained."""


class Consistency:
    """Compares the ranks every `fault.check_every` steps and before each checkpoint, and each time what the optimizer
    keeps with what the forward pass reads; that before a launch's first checkpoint in any case. All ranks call it
    together."""

    def __init__(
        self,
        run: RunConfig,
        exact: dict[str, Any],
        degrees: Degrees,
        engine: Engine,
        ranks: Ranks,
        tracker: Tracker,
        data: str,
    ) -> None:
        """`exact`: the dict that the engine is built from; `data`: the fingerprint of what this rank reads."""
        self._every = run.fault.check_every
        self._engine, self._ranks, self._tracker = engine, ranks, tracker
        self._degrees = degrees
        self._replicas = Replicas(engine, ranks)
        settings = json.dumps({"run": asdict(run), "json": exact}, sort_keys=True)
        self._constant = {"data fingerprint": data, "configuration": hashlib.sha256(settings.encode()).hexdigest()[:16]}
        self._agreed_step: int | None = None
        self._compares_ranks = ranks.world_size > 1 and self._every > 0

    def is_due(self, steps: range, *, saving: bool) -> bool:
        """Return True if `check` is to be called after these steps; `saving`: a checkpoint follows."""
        if saving and self._agreed_step is None:
            return True
        return self._compares_ranks and (saving or is_due(self._every, steps))

    def check(self, position: Mapping[str, int], batch: StepBatch) -> None:
        """Compare the ranks after a step, and the masters with what the forward pass reads.

        Args:
            position: the run's counters after it.
            batch: what this rank trained on.

        Raises:
            ReplicasDiffer: ranks differ. On all ranks, with the same words.
            MastersDiffer: masters do. Likewise.
        """
        step = position["step"]
        if self._compares_ranks:
            found = self._replicas.differences(self._facts(position, batch), self._facts_of_row(batch))
            if found:
                self._end(step, found)
        if masters := apart(self._engine, self._ranks):
            self._end_masters(step, masters)
        self._agreed_step = step

    def _end_masters(self, step: int, found: Apart) -> None:
        text = f"after step {step}: {found.told(self._engine, self._ranks)}"
        if self._agreed_step is not None:
            text += f" At step {self._agreed_step} they were the same: memory of that host is another cause."
        self._tell(step, "masters differ", found.ranks, found.names, text)
        raise MastersDiffer(text)

    def _facts(self, position: Mapping[str, int], batch: StepBatch) -> dict[str, Any]:
        """What is the same on all ranks."""
        share = self._ranks.rank // self._degrees.tensor  # as the loop seeds a step
        seeds = [torch.initial_seed()]
        if self._ranks.device.type == "cuda":
            seeds.append(torch.cuda.initial_seed())
        return {
            **{f"{name.replace('_', ' ')} of the run": value for name, value in position.items()},
            "first sample of the step": batch.first_index,
            "random seed of the step": [(seed - share) % 2**64 for seed in seeds],
            "steps of the optimizer": self._engine.optimizer_step(),
            "loss scale": self._engine.loss_scale(),
            **self._constant,
        }

    def _facts_of_row(self, batch: StepBatch) -> dict[str, Any]:
        """What is the same on the ranks that work on the same sequences."""
        row = self._degrees.place(self._ranks.rank).data
        micros = batch.micro_batches
        tokens = torch.stack([tensor_hash(each) for micro in micros for each in (micro.inputs, micro.labels)])
        return {
            f"samples of data-parallel group {row}": [index for micro in micros for index in micro.sample_indices],
            f"tokens of data-parallel group {row}": int(tensor_hash(tokens)),
        }

    def _end(self, step: int, found: list[Difference]) -> None:
        ranks = sorted({rank for each in found for rank in each.odd})
        before = "" if self._agreed_step is None else f" At step {self._agreed_step} they agreed."
        text = (
            f"after step {step}: {describe(found, self._ranks.seats)}.{before} What has changed it is no part of the "
            "training: memory, a link or a kernel of that host, or code that runs on one rank only. Checkpoints are "
            "made of ranks that agreed: the same command continues from the newest, on other hosts if one is suspect."
        )
        self._tell(step, "ranks differ", ranks, [each.name for each in found], text)
        raise ReplicasDiffer(text)

    def _tell(self, step: int, what: str, ranks: Sequence[int], names: Sequence[str], text: str) -> None:
        self._tracker.event(
            "fault",
            step=step,
            what=what,
            ranks=list(ranks),
            hosts=sorted({self._ranks.seats[rank].host for rank in ranks} if self._ranks.seats else []),
            names=list(names[:20]),
            agreed_step=self._agreed_step,
            text=text,
        )


class DataChanged(TrainingStopped):
    """The prepared data is not what its manifest says."""

    exit_code = DataError.exit_code


class DataCheck:
    """Compares the data's files with their checksums beside a run's first steps, on a thread of each rank.

    Ranks that see the same files share them. A difference ends the run before its first save. All ranks call its
    methods together.
    """

    def __init__(self, files: list[FileSum], ranks: Ranks) -> None:
        self._ranks, self._closed, self._error = ranks, False, ""
        everyone = from_all(ranks, _seen(files))  # copies of a file on two hosts have other numbers and times
        group = [rank for rank, seen in enumerate(everyone) if seen == everyone[ranks.rank]]
        mine = files[group.index(ranks.rank) :: len(group)]
        self._thread = threading.Thread(target=self._compare, args=(mine,), name="data-check", daemon=True)
        self.settled = False
        """All files have been compared, and none differs."""
        self.bytes = sum(file.path.stat().st_size for file in files if file.path.is_file())
        """Size of all files."""
        self._thread.start()

    def look(self, *, wait: bool) -> None:
        """See how far the ranks are; `wait`: until all are through. Raises DataChanged, on all ranks."""
        while wait and self._thread.is_alive():
            self._thread.join(_BEAT_S)
            heart.beat()
        told = from_all(self._ranks, (self._thread.is_alive(), self._error))
        if wrong := next((error for _, error in told if error), None):
            raise DataChanged(f"{wrong}. The run ends before it saves what it has trained on it")
        self.settled = not any(alive for alive, _ in told)

    def close(self) -> None:
        """End the thread, whatever it has found."""
        self._closed = True
        self._thread.join()

    def _compare(self, files: list[FileSum]) -> None:
        with contextlib.suppress(OSError):  # the steps go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            for file in files:
                file.compare(lambda: not self._closed)
        except DataError as error:
            self._error = str(error)
        except Exception as error:
            self._error = f"the data could not be compared with its checksums: {error!r}"


def _seen(files: list[FileSum]) -> str:
    """Hash of the files' inode numbers and change times: equal on hosts that share the files, different for copies."""
    stats = [os.stat(file.path) for file in files if file.path.is_file()]
    return hashlib.sha256(repr([(stat.st_ino, stat.st_ctime_ns) for stat in stats]).encode()).hexdigest()
