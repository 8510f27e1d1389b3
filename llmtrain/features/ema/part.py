"""The part of a run that keeps an exponential moving average of its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmtrain.base import log, units
from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.format import OUTER
from llmtrain.checkpoint.load import compare_checksums
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.engine.api import StateTensor
from llmtrain.features.ema import EmaConfig
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.checksum import checksum_part
from llmtrain.training.parts import Done, Part
from llmtrain.training.step import Position, is_due

if TYPE_CHECKING:
    from llmtrain.training.setup import Setup

EMA = OUTER + "ema"
"""Kind of the means in a checkpoint."""
_CHUNK = 1 << 22
"""Elements that are exchanged at a time."""


class Ema(Part):
    """After every `ema.every` optimizer steps mean = decay x mean + (1 - decay) x parameter. The means are fp32 and
    sharded as the masters are; checkpoints hold them under the parameter's name."""

    key = "ema"

    def __init__(self, setup: Setup) -> None:
        """The means begin with the current parameters."""
        self._engine, self._ranks, self._settings = setup.engine, setup.ranks, setup.run.config.section(EmaConfig)
        self._pieces = [
            piece for piece in setup.engine.state() if piece.kind == PARAM and piece.name not in setup.spec.frozen
        ]
        assert all(piece.dtype == torch.float32 and piece.write is None for piece in self._pieces)
        self._means: list[Tensor] = []
        self._restored = False
        for piece in self._pieces:
            with piece.open() as live:
                self._means.append(live.detach().clone())

    def begin(self, position: Position) -> None:
        if self._ranks.rank == 0:
            size = units.size(sum(4 * mean.numel() for mean in self._means))
            since = (
                f", from step {position.step} on: the checkpoint has none"
                if position.step and not self._restored
                else ""
            )
            log.info(f"ema: a mean of the parameters, {size} of memory on this rank{since}")

    @torch.no_grad()
    def after_step(self, done: Done) -> None:
        assert self._settings.decay is not None
        if not is_due(self._settings.every, done.steps) or done.update.skipped:
            return
        for piece, mean in zip(self._pieces, self._means, strict=True):
            with piece.open() as live:
                mean.lerp_(live, 1 - self._settings.decay)

    def variants(self) -> dict[str, Callable[[], contextlib.AbstractContextManager[None]]]:
        return {"ema": self.in_place}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model uses the averaged weights."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    @torch.no_grad()
    def _swap_weights(self) -> None:
        for piece, mean in zip(self._pieces, self._means, strict=True):
            with piece.open() as live:
                for low in range(0, mean.numel(), _CHUNK):
                    average, current = mean[low : low + _CHUNK], live[low : low + _CHUNK]
                    former = current.clone()
                    current.copy_(average)
                    average.copy_(former)
        self._engine.refresh()

    def state(self) -> list[StateTensor]:
        return [
            replace(piece, kind=EMA, open=lambda mean=mean: contextlib.nullcontext(mean))  # type: ignore[misc]
            for piece, mean in zip(self._pieces, self._means, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """A resume reads only the entry's presence."""
        return {"decay": self._settings.decay, "every": self._settings.every}

    @torch.no_grad()
    def restore(self, saved: Any, folder: Path) -> None:
        """Raises AgreedError: a mean is missing or damaged."""
        mine: dict[str, int] = {}
        with self._ranks.together(), contextlib.closing(CheckpointReader(folder)) as reader:
            if lost := sorted({piece.name for piece in self._pieces} - {n for k, n in reader.tensors() if k == EMA}):
                raise CheckpointError(
                    f"{folder}: it holds no mean (ema) of {lost[0]}, which this run trains. Train the same parameters, "
                    "or begin a new run (resume_weights_only)."
                )
            for piece, mean in zip(self._pieces, self._means, strict=True):
                values = reader.read_kind_region(EMA, piece.name, piece.region)
                value = checksum_part(values[piece.own], piece.own_region)
                mine[piece.name] = (mine.get(piece.name, 0) + value) % 2**64
                mean.copy_(values)
            expected = {name: value for (kind, name), value in reader.manifest.checksums().items() if kind == EMA}
        self._restored = True
        compare_checksums(folder, mine, expected, self._ranks, "mean (ema) of ")
