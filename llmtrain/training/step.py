"""One step of a training after another: what the ranks agree on, random numbers, learning rate, gradient, update.

What happens between steps (logs, evaluation, checkpoints, an outer optimizer) is its caller's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from llmtrain.config.topology import Degrees
from llmtrain.data.stream.loader import StepBatch
from llmtrain.engine.api import Engine, Update
from llmtrain.engine.dist.control import Agree, Agreement
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.objectives.next_token import NEXT_TOKEN
from llmtrain.objectives.objective import LooksAhead, Objective

if TYPE_CHECKING:
    from llmtrain.training.pace import Pace


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands; with the parameters and moments it is all that a checkpoint needs."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    tokens: int = 0
    """Training tokens read by all ranks."""
    sample_index: int = 0
    """Global index of the next sequence."""
    skipped_steps: int = 0


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


class Outer(Protocol):
    """What changes the parameters between steps, and says where the data goes on. All ranks call it together."""

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint's trainer.json keeps of it."""
        ...

    def begin(self, step: int, sample_index: int, limit_s: float, stop_asked: Callable[[], bool]) -> tuple[int, int]:
        """Before the first step: (optimizer steps done, index of the next sequence) to go on with. Raises StopAsked
        where `stop_asked` is true of a rank meanwhile."""
        ...

    def after_update(self, step: int, *, complete: bool) -> tuple[int, int]:
        """After each step: (optimizer steps done, index of the next sequence) to go on with. `complete`: no step
        follows."""
        ...


class Session:
    """The steps of a run with an engine whose parameters have their values. All ranks call it together."""

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        degrees: Degrees,
        rate: Callable[[int], float],
        *,
        seed: int,
        objective: Objective = NEXT_TOKEN,
        step: int = 0,
        pace: Pace | None = None,
    ) -> None:
        """`rate`: from a step's number (0 is the first) to the factor on the peak learning rates. `seed`: of dropout.
        `step`: optimizer steps done before, skipped ones included. `pace`: of this rank, for the others to hear."""
        self.engine, self.objective = engine, objective
        self.step_number = step
        self._rate, self._seed, self._agree = rate, seed, Agree(ranks)
        self._leads = degrees.place(ranks.rank).leads
        self._seeded_as = ranks.rank // degrees.tensor
        self._pace = pace

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
        if isinstance(self.objective, LooksAhead):
            self.objective.look(batch.micro_batches, self.engine.evaluate)
        agreement = self._agree.start(
            weight=sum(map(self.objective.weight, batch.micro_batches)) if self._leads else 0,
            stop=requests.stop,
            time_up=requests.time_up,
            save=requests.save,
            save_status=requests.save_status,
            pace=None if self._pace is None else self._pace.take(),
        )
        seed_step(self._seed, self.step_number, self._seeded_as)
        lr_factor = self._rate(self.step_number)
        with contextlib.nullcontext() if self._pace is None else self._pace.measured(batch.micro_batches):
            sums = self.engine.forward_backward(batch.micro_batches, lambda: agreement().weight, self.objective)
        before_update()
        update = self.engine.update(lr_factor)
        self.step_number += 1
        return Step(batch=batch, agreed=agreement(), sums=sums, lr_factor=lr_factor, update=update)

    def figures(self, step: Step) -> dict[str, float]:
        """The objective's, over the global batch of a step. Waits for the device; every rank must call it."""
        means = self.engine.means(torch.stack(step.sums).sum(0), step.agreed.weight)
        return dict(zip(self.objective.figures, means, strict=True))


def is_due(every: int | None, steps: range) -> bool:
    """Whether what happens every so many steps (None, 0: never) happens after these, of which a site may skip some."""
    return every is not None and every > 0 and any(step % every == 0 for step in steps)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout of a step is a pure function of (seed, step, rank): resume needs no saved generator state.

    The ranks of a tensor-parallel group give the same `rank`: what they all compute, they drop alike (Span of
    models/parallel/tensor_layers.py lets them differ where each has its own heads or features).
    """
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**64)  # torch takes no more bits
