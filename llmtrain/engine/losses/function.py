"""Contract of what a run minimises or measures over micro-batches; engines and sessions know no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from torch import Tensor

from llmtrain.data.stream.loader import MicroBatch
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE


class LossFunction(Protocol):
    """Maps a micro-batch to a summed loss and its weight: the loss of a step is the sum over all micro-batches of all
    ranks, divided by their summed weight."""

    figures: tuple[str, ...]
    """Names of what is summed, divided by the same weight and reported: "loss" first, whose gradient is taken."""

    def weight(self, micro: MicroBatch) -> int:
        """Share of a micro-batch in the divisor: counted tokens, rows, pairs. Its tensors are on the host."""
        ...

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """The figures of a micro-batch of complete rows: fp32 [figures]; ranks that share rows add them up. In a
        pipeline the last stage calls it, under ZeRO 3 it runs inside the head's forward. `hidden`: [B, T, H], the
        decoder's output; under sequence parallelism this rank's columns."""
        ...


class PerToken:
    """Base of a loss function whose divisor is the counted tokens."""

    figures: tuple[str, ...] = ("loss",)

    def weight(self, micro: MicroBatch) -> int:
        """Labels that count."""
        return int((micro.labels != IGNORE).sum())


Evaluate = Callable[[Iterable[MicroBatch], LossFunction], tuple[dict[str, float], int]]
"""An engine's `evaluate`: a loss function's figures over all ranks, and their weight. All ranks call it together."""


@runtime_checkable
class LooksAhead(Protocol):
    """A loss function whose value for one row depends on the other rows of the global batch."""

    def look(self, micros: list[MicroBatch], evaluate: Evaluate) -> None:
        """Learn what it needs of a global batch, without a gradient, before `sums` is asked. `micros`: this rank's."""
        ...
