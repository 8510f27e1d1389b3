"""Compares what several ranks should hold alike, and the optimizer's masters with what the forward pass reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from llmtrain.base.errors import TrainingStopped
from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.data.stream.loader import StepBatch
from llmtrain.engine.replicas import Difference, Replicas, describe, tensor_hash
from llmtrain.engine.weights import Apart, apart
from llmtrain.training.parts import Done, Part
from llmtrain.training.step import is_due

if TYPE_CHECKING:
    from llmtrain.tracking.tracker import Tracker
    from llmtrain.training.saving import Saving
    from llmtrain.training.setup import Setup


class ReplicasDiffer(TrainingStopped):
    """Replicas have diverged. Restartable: most bit flips are transient, and the newest checkpoint is of ranks that
    agreed."""

    passing = True


class MastersDiffer(TrainingStopped):
    """The optimizer keeps other values than the forward pass reads: a checkpoint would hold what nobody trained."""


class ReplicaCheck(Part):
    """Compares the ranks every `fault.check_every` steps and before each checkpoint, and each time the optimizer's
    masters with what the forward pass reads; that before a launch's first checkpoint in any case."""

    def __init__(self, setup: Setup, tracker: Tracker, saving: Saving) -> None:
        """`saving`: decides when a checkpoint follows."""
        run, exact = setup.run, setup.resolved.deepspeed
        self._every = run.fault.check_every
        self._engine, self._ranks, self._tracker, self._saving = setup.engine, setup.ranks, tracker, saving
        self._degrees = setup.resolved.degrees
        self._replicas = Replicas(self._engine, self._ranks)
        settings = json.dumps({"run": asdict(run), "json": exact}, sort_keys=True)
        configuration = hashlib.sha256(settings.encode()).hexdigest()[:16]
        self._constant = {"data fingerprint": setup.data.fingerprint, "configuration": configuration}
        self._agreed_step: int | None = None
        self._compares_ranks = self._ranks.world_size > 1 and self._every > 0

    def after_step(self, done: Done) -> None:
        """Check if it is due. Raises as `check`."""
        saves = done.last or self._saving.is_due(done)
        due = self._compares_ranks and (saves or is_due(self._every, done.steps))
        if due or (saves and self._agreed_step is None):
            with heart.during("compare"):
                self.check(asdict(done.position), done.batch)

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
        """Facts that are the same on all ranks."""
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
        """Facts that are the same on the ranks that work on the same sequences."""
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
