"""A run's ranks of unequal speed: who measures, who decides, and what a decision changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from llmtrain.base import log
from llmtrain.config.batch import Batch
from llmtrain.config.topology import Degrees
from llmtrain.data.stream.loader import TrainLoader
from llmtrain.engine.api import Engine
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.training.balance import Balance
from llmtrain.training.pace import Pace, pace_of


class Shares:
    """Which part of each step this launch's ranks take. All ranks call every method together."""

    def __init__(
        self, engine: Engine, ranks: Ranks, batch: Batch, degrees: Degrees, *, at_once: bool, kept: Any
    ) -> None:
        """
        Args:
            engine: whose computing is measured.
            ranks: of the run.
            batch: equal shares.
            degrees: of the run.
            at_once: as `Balance` has it.
            kept: what another launch's `to_json` gave.
        """
        self.pace: Pace = pace_of(engine.module, ranks.device, gathers=engine.partitions_parameters)
        """Of this rank, which shares follow."""
        self._balance = Balance(
            [degrees.place(rank).data for rank in range(ranks.world_size)],
            global_batch=batch.global_batch,
            accumulation=batch.accumulation,
            at_once=at_once,
            kept=kept,
        )

    @property
    def sequences(self) -> tuple[int, ...] | None:
        """Of a step, by data-parallel group; None: equally many."""
        return self._balance.sequences

    def to_json(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None: nothing."""
        return self._balance.to_json()

    def after_step(self, step: int, paces: Sequence[int], loader: TrainLoader, tell: Callable[..., None]) -> None:
        """Take other shares from the next step on, if it is worth it.

        Args:
            step: optimizer steps done.
            paces: what the ranks have said of their speeds in this step.
            loader: reads this rank's share.
            tell: takes the kind of an event and its fields.
        """
        if (change := self._balance.heard(paces)) is None:
            return
        self.pace.forget()
        loader.share(change.after)
        tell("shares", step=step, **asdict(change))
        log.info(f"step {step}: {change}")
