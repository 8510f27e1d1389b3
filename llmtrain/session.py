"""One step of a training after another: what the ranks agree on, random numbers, learning rate, gradient, update.

What happens between steps (logs, evaluation, checkpoints, an outer optimizer) is its caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.config.run import ResolvedRun
from llmtrain.data.loader import StepBatch
from llmtrain.dist.control import Agree, Agreement
from llmtrain.dist.ranks import Ranks
from llmtrain.engine.api import Engine, Update
from llmtrain.objectives.next_token import NEXT_TOKEN
from llmtrain.objectives.objective import Objective
from llmtrain.schedule import learning_rate_factor, seed_step


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What this rank has to tell the others, once a step."""

    stop: bool = False
    """It was asked to stop."""
    time_up: bool = False
    """The run's time limit is reached."""
    save: bool = False
    """It was asked to save, or the time for a checkpoint has come."""
    save_status: tuple[bool, bool] = (False, False)
    """Whether its part of the save under way has ended, and whether it failed."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is done. Reading a tensor here waits for the device: do it at log points only."""

    batch: StepBatch
    agreed: Agreement
    sums: list[Tensor]
    """The objective's of each of this rank's micro-batches, fp32 [figures]."""
    lr_factor: float
    """On the peak learning rates."""
    update: Update


class Session:
    """The steps of a run with an engine whose parameters have their values. All ranks call it together."""

    def __init__(
        self, engine: Engine, resolved: ResolvedRun, ranks: Ranks, *, objective: Objective = NEXT_TOKEN, step: int = 0
    ) -> None:
        """`step`: optimizer steps done before, skipped ones included."""
        self.engine, self.objective = engine, objective
        self.step_number = step
        self._resolved, self._agree = resolved, Agree(ranks)
        self._place = resolved.degrees.place(ranks.rank)
        self._seeded_as = ranks.rank // resolved.degrees.tensor

    def step(
        self,
        batch: StepBatch,
        requests: Requests = Requests(),  # frozen
        before_update: Callable[[], None] = lambda: None,
    ) -> Step:
        """Train on this rank's part of a global batch.

        Args:
            batch: the part.
            requests: what the ranks learn of each other with this step.
            before_update: called when the gradients are there and the optimizer has not written yet.

        Raises:
            TrainingStopped: fp16 has no smaller loss scale left; on all ranks alike.
        """
        resolved = self._resolved
        agreement = self._agree.start(
            weight=sum(map(self.objective.weight, batch.micro_batches)) if self._place.leads else 0,
            stop=requests.stop,
            time_up=requests.time_up,
            save=requests.save,
            save_status=requests.save_status,
        )
        seed_step(resolved.run.train.seed, self.step_number, self._seeded_as)
        lr_factor = learning_rate_factor(resolved.run.schedule, self.step_number, resolved.max_steps)
        sums = self.engine.forward_backward(batch.micro_batches, lambda: agreement().weight, self.objective)
        before_update()
        update = self.engine.update(lr_factor)
        self.step_number += 1
        return Step(batch=batch, agreed=agreement(), sums=sums, lr_factor=lr_factor, update=update)

    def figures(self, step: Step) -> dict[str, float]:
        """The objective's, over the global batch of a step. Waits for the device; every rank must call it."""
        means = self.engine.means(torch.stack(step.sums).sum(0), step.agreed.weight)
        return dict(zip(self.objective.figures, means, strict=True))
