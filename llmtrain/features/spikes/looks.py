"""The part of a replay (`llmtrain replay`) that records steps and measures them before they are trained.

Before a step it computes the step's gradient and the largest values of each module, then the loss of each sequence
without dropout, and the gradients of the sequences with the largest losses. All of these are dropped, and the step
itself runs as in the run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmtrain.base import untrusted
from llmtrain.base.rank.heartbeat import heart
from llmtrain.data.batches import MicroBatch
from llmtrain.engine.api import Engine, GradientPiece
from llmtrain.engine.losses.function import LooksAhead, LossFunction
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.spikes.record import Record
from llmtrain.features.spikes.steps import LOOKS, REPLAYED
from llmtrain.models import compiler
from llmtrain.models.head import Head
from llmtrain.models.routing import unwatched
from llmtrain.models.structure.calls import tensors_of
from llmtrain.optim.optimizers import norm_of
from llmtrain.storage.region import Region
from llmtrain.tracking.local import to_json
from llmtrain.training.guards import SkippedSteps
from llmtrain.training.parts import Done, Launch
from llmtrain.training.step import Position, Request

_AT_ONCE = 2**24
"""Elements of a gradient that are widened to float64 at a time."""
GradientCopy = dict[tuple[str, Region], Tensor]
"""This rank's pieces of a gradient, fp32, by (parameter, region)."""


class Collected:
    """A loss function that keeps the sums of each micro-batch."""

    def __init__(self, inner: LossFunction) -> None:
        self.figures, self._inner = inner.figures, inner
        self.losses: list[Tensor] = []

    def weight(self, micro: MicroBatch) -> int:
        return self._inner.weight(micro)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        sums = self._inner.sums(head, hidden, micro)
        self.losses.append(sums[0].detach())
        return sums


class Replay(Record):
    """Measures steps before they are trained. All ranks call every method together."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        task = untrusted.loads(os.environ[REPLAYED].encode())
        self._first, self._last = task["first"], task["last"]
        self._most = task["rows"]
        """How many sequences of a step get a gradient norm; 0: the steps are trained without measurements."""
        self._saves = set(task["saves"])
        self._launch, self._place = launch, self._setup.mesh.place
        self._step = launch.start.position.step
        self._largest: list[float] = []
        """Losses of the sequences that got a gradient norm, largest first."""
        config, zero = self._setup.run.config, self._setup.run.mix.zero_stage > 0
        self._has_gradients = norm_of(config.optim.name, zero=zero) == "gradient"
        """False for Muon under ZeRO, where computing the norm would change the optimizer's momentum."""

    def begin(self, position: Position) -> None:
        super().begin(position)
        self._launch.part(SkippedSteps).refuses_untrained = False  # all of a few steps may have been skipped

    def request(self) -> Request:
        step = self._step + 1
        if self._most and self._first <= step <= self._last:
            with heart.during("evaluate"):
                look = self._look_at_step()
            if self._ranks.rank == 0:
                with open(self._launch.folder.path / LOOKS, "a", encoding="utf-8") as file:
                    file.write(json.dumps(to_json({"step": step, **look})) + "\n")
        if step == self._last:
            self._launch.requests.stop_reason = "the replay is done"
        return Request(stop=step == self._last, save=step in self._saves)

    def after_step(self, done: Done) -> None:
        super().after_step(done)
        self._step = done.position.step

    def _look_at_step(self) -> dict[str, Any]:
        session, engine, loader = self._launch.session, self._setup.engine, self._launch.loader
        objective, batch = session.objective, loader.build(self._step)
        counted = sum(map(objective.weight, batch.micro_batches)) if self._place.leads else 0
        weight = int(self._ranks.sum(torch.tensor([counted], dtype=torch.float64))[0])
        if not weight:
            return {"rows": [], "largest": {}, "norm": math.nan}
        norm, gradient = math.nan, GradientCopy()
        largest: dict[str, list[Tensor]] = {}
        if self._has_gradients:
            if isinstance(objective, LooksAhead):
                objective.look(batch.micro_batches, engine.evaluate)
            session.seed()
            with compiler.uncompiled(), largest_values(engine.module.hf) as largest:
                norm, _ = gradient_norm(engine, self._ranks, batch.micro_batches, weight, objective, copy_into=gradient)
        rows = range(batch.first_index, batch.first_index + batch.sequences)
        mine = [index for micro in batch.micro_batches for index in micro.sequences]
        losses = self._losses(rows, mine, objective)
        measured = []
        for index, (loss, row_weight) in zip(rows, losses, strict=True):
            if row_weight:
                row: dict[str, Any] = {"sequence": index, "loss": loss / row_weight, "weight": int(row_weight)}
                measured.append(row)
        measured.sort(key=lambda row: -row["loss"] if row["loss"] == row["loss"] else -math.inf)
        for row in measured[: self._most] if self._has_gradients else []:
            if len(self._largest) >= self._most and row["loss"] <= self._largest[self._most - 1]:
                break
            micro = loader.row(self._step, row["sequence"] if row["sequence"] in mine else None)
            session.seed()
            with unwatched(engine.module):  # the balancing loss of experts belongs to a batch, not to its rows
                row["norm"], product = gradient_norm(engine, self._ranks, [micro], weight, objective, times=gradient)
            row["share"] = product / (norm * norm or math.nan)
            self._largest = sorted([*self._largest, row["loss"]], reverse=True)
        gradient.clear()  # the step that follows has no room for it
        session.routing()  # drop the routing of the looks, which is not the step's
        merged: dict[str, Any] = {}
        for share in self._ranks.gather({name: list(map(float, values)) for name, values in largest.items()}):
            for name, values in share.items():
                merged[name] = np.maximum(merged.get(name, values), values).tolist()  # NaN stays
        return {"norm": norm, "rows": measured, "largest": merged}

    def _losses(self, rows: range, mine: list[int], objective: LossFunction) -> list[list[float]]:
        """Return (sum of the loss, weight) of each sequence, from a forward pass with this sequence alone."""
        loader, collected = self._launch.loader, Collected(objective)
        most = max(self._ranks.gather(len(mine)))
        micros = [loader.row(self._step, index) for index in mine]
        micros += [loader.row(self._step, None) for _ in range(most - len(mine))]
        if isinstance(objective, LooksAhead):  # once for all rows, whose gradients follow: as in the step
            objective.look([*micros, loader.row(self._step, None)], self._setup.engine.evaluate)
        self._setup.engine.evaluate(micros, collected)
        table = torch.zeros(len(rows), 2, dtype=torch.float64)
        for place, index in enumerate(mine):
            if collected.losses and self._place.tensor == 0:
                table[index - rows.start, 0] = float(collected.losses[place])
            if self._place.leads:
                table[index - rows.start, 1] = objective.weight(micros[place])
        losses: list[list[float]] = self._ranks.sum(table).tolist()
        return losses


def gradient_norm(
    engine: Engine,
    ranks: Ranks,
    micros: Sequence[MicroBatch],
    weight: int,
    objective: LossFunction,
    *,
    copy_into: GradientCopy | None = None,
    times: GradientCopy | None = None,
) -> tuple[float, float]:
    """Return the norm of a loss's gradient and its product with another one. All ranks call it.

    Args:
        micros, weight, objective: as in `Engine.gradients`.
        copy_into: receives the gradient's pieces, 4 bytes a parameter over all ranks.
        times: pieces of an earlier call, with which the product is taken; None: with the gradient itself.

    Returns (inf, nan) if the gradient is not finite.
    """
    # On the device: square of the gradient, its product with the other one, number of pieces.
    sums, taken = torch.zeros(2, dtype=torch.float64, device=ranks.device), 0

    def look(piece: GradientPiece) -> None:
        nonlocal taken
        taken += 1
        place = piece.name, piece.region
        if copy_into is not None:
            copy_into[place] = piece.values.to(torch.float32, copy=True)
        other = (times or {}).get(place, piece.values)  # none of a gradient that overflowed
        for part, other_part in zip(piece.values.split(_AT_ONCE), other.split(_AT_ONCE), strict=True):
            sums[0] += torch.linalg.vector_norm(part, dtype=torch.float64).square()
            sums[1] += (part.double() * other_part).sum()

    engine.gradients(micros, weight, look, objective)
    totals = ranks.sum(torch.cat([sums.cpu(), torch.tensor([taken], dtype=torch.float64)]))
    return (math.sqrt(totals[0]), float(totals[1])) if totals[2] else (math.inf, math.nan)


@contextlib.contextmanager
def largest_values(hf: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Measure the largest absolute output, and gradient of it, of each module with parameters, in forward order."""
    largest_of: dict[str, list[Tensor]] = {}

    def take(name: str, kind: int, tensor: Tensor) -> None:
        largest = tensor.detach().abs().amax().float()
        values = largest_of.setdefault(name, [torch.zeros_like(largest)] * 2)
        values[kind] = torch.maximum(values[kind], largest)  # NaN stays

    def after(name: str, _module: nn.Module, _given: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.is_floating_point() and tensor.numel():
                take(name, 0, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(take, name, 1))

    with contextlib.ExitStack() as hooks:
        for name, module in hf.named_modules():
            # The head gives the loss; shared experts give rows that no token has, with whatever was in that memory.
            left_out = isinstance(module, Head) or name.endswith("experts")
            if not left_out and any(True for _ in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_hook(functools.partial(after, name)))
        yield largest_of
