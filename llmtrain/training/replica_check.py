"""The part of a run that compares its ranks, and the optimizer's masters with the forward pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from llmtrain.base.errors import TrainingStopped
from llmtrain.base.rank.heartbeat import heart
from llmtrain.config.plugins import hashes
from llmtrain.config.run import same_command
from llmtrain.data.stream.loader import StepBatch
from llmtrain.engine.weights import masters_apart
from llmtrain.training.parts import Done, Launch, Part
from llmtrain.training.saving import Saving
from llmtrain.training.step import is_due

if TYPE_CHECKING:
    from llmtrain.training.replicas import Difference, Replicas


class MastersDiffer(TrainingStopped):
    """The optimizer's masters differ from the forward pass: a checkpoint would hold untrained values."""


class ReplicaCheck(Part):
    """Compares the ranks with each other, and the optimizer's masters with the forward pass, every `fault.check_every`
    steps and before each checkpoint. Before a launch's first checkpoint the masters are compared in any case."""

    def __init__(self, launch: Launch) -> None:
        self._launch, setup = launch, launch.setup
        config, exact = setup.run.config, setup.run.deepspeed
        self._every, self._command = config.fault.check_every, same_command(config)
        self._engine, self._ranks, self._tracker = setup.engine, setup.ranks, launch.tracker
        self._degrees = setup.run.mix.degrees
        self._replicas: Replicas | None = None
        settings = json.dumps({"run": asdict(config), "json": exact}, sort_keys=True)
        configuration = hashlib.sha256(settings.encode()).hexdigest()[:16]
        data = " ".join(dict.fromkeys(each.fingerprint for each in setup.course.data))
        self._constant = {"data fingerprint": data, "configuration": configuration}
        self._agreed_step: int | None = None
        self._compares_ranks = self._ranks.world_size > 1 and self._every > 0

    def after_step(self, done: Done) -> None:
        saves = done.last or self._launch.part(Saving).is_due(done)
        due = self._compares_ranks and (saves or is_due(self._every, done.steps))
        if due or (saves and self._agreed_step is None):
            with heart.during("compare"):
                self.check(asdict(done.position), done.batch, done.lr_factor)

    def check(self, position: Mapping[str, int], batch: StepBatch, lr_factor: float) -> None:
        """Compare now. `position`: the run's counters. Raises ReplicasDiffer or MastersDiffer, on all ranks."""
        step = position["step"]
        if self._compares_ranks:
            self._compare_ranks(position, batch, lr_factor)
        if masters := masters_apart(self._engine, self._ranks):
            text = f"after step {step}: {masters.message(self._engine, self._ranks)}"
            if self._agreed_step is not None:
                text += f" They were the same at step {self._agreed_step}, so the memory of that host may be at fault."
            self.tell(step, "masters differ", masters.ranks, masters.names, text)
            raise MastersDiffer(text)
        self._agreed_step = step

    def _compare_ranks(self, position: Mapping[str, int], batch: StepBatch, lr_factor: float) -> None:
        from llmtrain.training.replicas import Replicas, tensor_hash  # one rank has no replicas

        self._replicas = self._replicas or Replicas(self._engine, self._ranks)
        # The ranks of a data-parallel group work on the same sequences.
        row, micros = self._degrees.place(self._ranks.rank).data, batch.micro_batches
        tokens = torch.stack([tensor_hash(each) for micro in micros for each in (micro.inputs, micro.labels)])
        own = {
            f"sequences of data-parallel group {row}": [index for micro in micros for index in micro.sequences],
            f"tokens of data-parallel group {row}": int(tensor_hash(tokens)),
        }
        if differences := self._replicas.differences(self._facts(position, batch, lr_factor), own):
            self._end(position["step"], differences)

    def _facts(self, position: Mapping[str, int], batch: StepBatch, lr_factor: float) -> dict[str, Any]:
        """Return the facts that must be the same on all ranks."""
        share = self._ranks.rank // self._degrees.tensor  # as the loop seeds a step
        counters, seeds = self._engine.counters(), [torch.initial_seed()]
        if self._ranks.device.type == "cuda":
            seeds.append(torch.cuda.initial_seed())
        return {
            **{f"{name.replace('_', ' ')} of the run": value for name, value in position.items()},
            "first sequence of the step": batch.first_index,
            "random seed of the step": [(seed - share) % 2**64 for seed in seeds],
            "learning-rate factor of the step": lr_factor,
            "steps of the optimizer": int(counters.optimizer_step),
            "loss scale": counters.loss_scale,
            **self._constant,
        }

    def _end(self, step: int, found: list[Difference]) -> None:
        from llmtrain.training.replicas import ReplicasDiffer, describe

        ranks = sorted({rank for difference in found for rank in difference.odd})
        before = "" if self._agreed_step is None else f" At step {self._agreed_step} they agreed."
        code = f", such as that of the plugin {' or '.join(hashes())}" if hashes() else ""
        text = (
            f"after step {step}: {describe(found, self._ranks.seats)}.{before} Training alone cannot cause it: suspect "
            f"the memory, a link or a kernel of that host, or code that runs on one rank only{code}. In all "
            f"checkpoints the ranks agree: {self._command} continues from the newest, on other hosts if need be."
        )
        self.tell(step, "ranks differ", ranks, [difference.name for difference in found], text)
        raise ReplicasDiffer(text)

    def tell(self, step: int, what: str, ranks: Sequence[int], names: Sequence[str], text: str) -> None:
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
