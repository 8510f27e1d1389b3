"""Runs training steps: what the ranks agree on, random numbers, learning rate, gradient, update.

Work between steps (logs, evaluation, checkpoints, an outer optimizer) is done by the parts of a run (parts.py).

A `step` is a number of completed optimizer steps. The metrics, checkpoint and messages of a step have the number after
it, so the first step is 1. Its learning rate, stage, random numbers and sequences belong to the number before it, so
for them the first step is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmtrain.base.rank.heartbeat import heart
from llmtrain.config.topology import Degrees
from llmtrain.data.batches import MicroBatch
from llmtrain.data.stream.loader import StepBatch
from llmtrain.engine.api import Engine, Update
from llmtrain.engine.losses.function import NEXT_TOKEN, LooksAhead, LossFunction
from llmtrain.engine.losses.with_metrics import quotients
from llmtrain.engine.ranks.ranks import Ranks

if TYPE_CHECKING:
    from llmtrain.models.routing import RoutingFigures


@dataclass(frozen=True, kw_only=True)
class Position:
    """The counters of a run; a checkpoint needs nothing else but parameters and moments."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    tokens: int = 0
    """Training tokens read by all ranks."""
    sample_index: int = 0
    """Global index of the next sequence."""
    skipped_steps: int = 0
    """Steps without an update. Neither this counter nor `optimizer_step` includes `newest`."""
    optimizer_step: int = 0
    """Updates that the optimizer has applied; after a foreign checkpoint this may be more than the run has steps.
    Counted here, since the optimizer's counter is a tensor on a GPU, and reading it waits for the step."""
    newest: Update | None = None
    """The last step's update, as long as the host does not know whether the device has skipped it."""

    def after(self, update: Update, sample_index: int, tokens: int) -> Position:
        """Return the position after a step. Waits for the previous step's update on the device."""
        position = replace(
            self.settled(),
            step=self.step + 1,
            tokens=self.tokens + tokens,
            sample_index=sample_index,
            newest=update,
        )
        return position if update.is_late else position.settled()

    def settled(self) -> Position:
        """Return the position with `newest` counted, after waiting for the device to make that update."""
        if self.newest is None:
            return self
        skipped = int(self.newest.skipped)
        return replace(
            self,
            skipped_steps=self.skipped_steps + skipped,
            optimizer_step=self.optimizer_step + 1 - skipped,
            newest=None,
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A rank's message to the others, once a step. `|` joins the requests of two parts."""

    stop: bool = False
    """The rank was asked to stop."""
    save: bool = False
    """The rank was asked to save, or a checkpoint is due by its clock."""
    sums: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name -> numbers of a part, which are summed over the ranks. In a step all ranks give the same names with equally
    many numbers. To send one number per rank, a part gives a list of world_size numbers: its own, and 0 elsewhere."""

    def __or__(self, other: Request) -> Request:
        return Request(stop=self.stop or other.stop, save=self.save or other.save, sums={**self.sums, **other.sums})


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The sums over all ranks for one step."""

    weight: int
    """Divisor of the global batch's summed loss."""
    stop: bool
    """A rank was asked to stop."""
    save: bool
    """A rank was asked to save now, or the time for a checkpoint has come."""
    sums: Mapping[str, Sequence[int]]
    """Sums of the numbers in the ranks' requests."""


class Agree:
    """One small all-reduce a step, on the host, started early and read late, without a device synchronisation."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def start(self, weight: int, asks: Request) -> Callable[[], Agreement]:
        """Send this rank's numbers. The returned function waits for the sums."""
        sums = self._ranks.agree(weight, [asks.stop, asks.save, *chain.from_iterable(asks.sums.values())])

        def result() -> Agreement:
            weights, (stops, saves, *others) = sums()
            numbers = iter(others)
            of_parts = {name: list(islice(numbers, len(own))) for name, own in asks.sums.items()}
            return Agreement(weight=weights, stop=stops > 0, save=saves > 0, sums=of_parts)

        return result


@dataclass(kw_only=True)
class Passes:
    """The forward and backward passes of a step, for parts that wrap them."""

    micro_batches: Sequence[MicroBatch]
    """Micro-batches of this rank."""
    sums: list[Tensor] = field(default_factory=list)
    """After the passes: sums of the objective for each micro-batch, fp32 [figures] on the device."""
    weight: int = 0
    """After the passes: divisor of the global batch's summed loss."""
    leave_out: Callable[[float], bool] | None = None
    """Set after the passes: the argument `leave_out` of `Engine.update`."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A completed step. Reading a tensor here waits for the device: do it at log points only."""

    number: int
    """Optimizer steps before this one, skipped ones included."""
    batch: StepBatch
    agreed: Agreement
    sums: list[Tensor]
    """Sums of the objective for each micro-batch on this rank, fp32 [figures]."""
    lr_factor: float
    """Factor on the peak learning rates."""
    update: Update


class Session:
    """The steps of a run, for an engine with initialised parameters. All ranks call each method together."""

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        degrees: Degrees,
        rate: Callable[[int], float],
        *,
        seed: int,
        objective: LossFunction = NEXT_TOKEN,
    ) -> None:
        """`rate`: step number (0 is the first) -> factor on the peak learning rates. `seed`: for dropout."""
        self.engine, self.objective = engine, objective
        self.step_number = 0
        """Optimizer steps done, skipped ones included."""
        self.rate, self._seed, self._agree = rate, seed, Agree(ranks)
        self._ranks, self._place = ranks, degrees.place(ranks.rank)
        self._seeded_as = ranks.rank // degrees.tensor

    def step(
        self,
        batch: StepBatch,
        request: Request = Request(),  # frozen
        before_update: Callable[[], None] = lambda: None,
        around: Callable[[Passes], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> Step:
        """Train one step. `around`: makes a context around the passes; a step without a counted token has no passes.

        Raises TrainingStopped, on all ranks: when the loss scale of fp16 cannot become smaller."""
        if isinstance(self.objective, LooksAhead):
            with heart.during("reference"):
                self.objective.look(batch.micro_batches, self.engine.evaluate)
        counted = sum(map(self.objective.weight, batch.micro_batches))
        agreement = self._agree.start(counted if self._place.leads else 0, request)
        self.seed()
        lr_factor = self.rate(self.step_number)
        if not counted and not agreement().weight:  # on no rank: momentum alone would move the weights
            before_update()
            nothing, update = (
                torch.zeros(len(self.objective.figures), device=self.engine.device),
                Update(skipped=True, grad_norm=torch.nan),
            )
            sums = [nothing] * len(batch.micro_batches)
        else:
            passes = Passes(micro_batches=batch.micro_batches)
            with around(passes):
                sums = self.engine.forward_backward(batch.micro_batches, lambda: agreement().weight, self.objective)
                passes.sums, passes.weight = sums, agreement().weight
            before_update()
            update = self.engine.update(lr_factor, passes.leave_out)
        number, self.step_number = self.step_number, self.step_number + 1
        return Step(number=number, batch=batch, agreed=agreement(), sums=sums, lr_factor=lr_factor, update=update)

    def seed(self) -> None:
        """Seed the random numbers of the next step."""
        seed_step(self._seed, self.step_number, self._seeded_as)

    def figures(self, step: Step) -> dict[str, float]:
        """Return the objective's figures over the global batch. Waits for the device."""
        # The ranks of a tensor-parallel group have the same sums.
        mine = torch.stack(step.sums).sum(0).double().cpu() * (self._place.tensor == 0)
        means = [each / (step.agreed.weight or torch.nan) for each in self._ranks.sum(mine).tolist()]
        return quotients(dict(zip(self.objective.figures, means, strict=True)))

    def routing(self) -> RoutingFigures | None:
        """Return the routers' statistics since the last call; None without experts. Waits for the device."""
        routing = self.engine.module.routing
        return None if routing is None else routing.take(self._ranks.sum, counts=self._place.tensor == 0)


def is_due(every: int | None, steps: range) -> bool:
    """True if any of `steps` is a multiple of `every` (None, 0: never)."""
    return every is not None and every > 0 and any(step % every == 0 for step in steps)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch from (seed, step, rank) alone, so that a resume needs no generator state. The ranks of a
    tensor-parallel group give the same `rank`; Span gives their own heads and features different random numbers."""
    number = ((seed * 1_000_003 + step) * 65_537 + rank) % 2**64  # torch's seeds have 64 bits
    # torch.manual_seed writes stack traces for devices that are not there: 0.2 ms.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(number)
