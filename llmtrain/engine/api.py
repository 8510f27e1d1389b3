"""The engine of a run: it computes, updates, and shows its state. No engine is named here.

A run drives it in this order: `forward_backward` with the micro-batches of one step, `update`, and so on;
`evaluate` between steps. Whatever reads or writes the optimizer's state (checkpoints, initial weights, comparison of
replicas) goes through `state`, and calls `refresh` after writing parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.data.stream.loader import MicroBatch
from llmtrain.engine.losses.function import NEXT_TOKEN, LossFunction
from llmtrain.models.experts import RoutingFigures
from llmtrain.models.language import LanguageModel
from llmtrain.storage.region import Region


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """A piece of one tensor of the optimizer's state that this rank holds."""

    name: str
    """Hugging Face name of the parameter."""
    kind: str
    """PARAM, or the optimizer's name of a moment."""
    region: Region
    """Elements of the flat Hugging Face tensor."""
    own: slice
    """The part of the piece that this rank writes to checkpoints: replicas share the work, every element has one
    owner."""
    replica: tuple[int, int]
    """(index, of): the pieces with one index, over all ranks, are the whole tensor."""
    dtype: torch.dtype
    device: torch.device
    open: Callable[[], AbstractContextManager[Tensor]]
    """A context that gives the live values, [region.numel]. Writing into them changes the optimizer."""
    write: Callable[[], AbstractContextManager[Tensor]] | None = None
    """For a quantized parameter, whose `open` gives copies: a context that takes all of its values and packs them."""

    @property
    def own_region(self) -> Region:
        """Elements of the flat tensor that this rank writes."""
        return self.region.part(self.own.start, self.own.stop)


@dataclass(frozen=True, kw_only=True)
class ForwardCopy:
    """A parameter that the forward pass reads on this rank, or its partition."""

    name: str
    """Hugging Face name of the parameter."""
    region: Region
    """Elements of the flat Hugging Face tensor."""
    values: Tensor
    """[region.numel]."""
    replica: tuple[int, int]
    """(index, of): the copies with one index, over all ranks, are the whole tensor."""
    partition: bool
    """It is gathered from the ranks before it is used (ZeRO 3)."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """Result of an optimizer step. Reading a tensor here waits for the device: do it at log points only."""

    skipped: bool
    """The gradient (or the loss) was not finite, or nothing counted: the parameters were left alone."""
    grad_norm: Tensor | float | None
    """Global gradient norm before clipping."""


class Engine(Protocol):
    """One rank's engine. All ranks call every method together, but for `state`, `copies`, `refresh` and the counters.

    The forward pass reads copies of the parameters (`copies`), the optimizer keeps fp32 masters and moments (`state`).
    """

    module: LanguageModel
    device: torch.device
    forward_dtype: torch.dtype
    """The precision that the configuration gives the forward pass."""
    partitions_parameters: bool
    """The forward pass gathers its parameters from partitions that the ranks hold (ZeRO 3)."""
    layout_keys: tuple[str, ...]
    """Keys of the configuration, with their values, that change where the engine keeps parameters: for messages."""
    stages: bool
    """Ranks wait for activations of other ranks: an error on one of them leaves others waiting."""

    def forward_backward(
        self, micros: Sequence[MicroBatch], weight: Callable[[], int], objective: LossFunction = NEXT_TOKEN
    ) -> list[Tensor]:
        """The gradient of the loss over a global batch.

        Args:
            micros: this rank's micro-batches of it.
            weight: of the global batch, by the objective; asked for after the first forward pass, so that the ranks'
                agreement overlaps with it.
            objective: what is minimised.

        Returns: its sums of each micro-batch, fp32 [figures] on the device.
        """
        ...

    def update(self, lr_factor: float) -> Update:
        """The optimizer step with peak learning rates x `lr_factor`.

        Raises:
            TrainingStopped: fp16 has no smaller loss scale left; on all ranks alike.
        """
        ...

    def evaluate(
        self, micros: Iterable[MicroBatch], objective: LossFunction = NEXT_TOKEN
    ) -> tuple[dict[str, float], int]:
        """(the objective's figures, their weight) over all ranks. Every rank must get equally many micro-batches."""
        ...

    def means(self, sums: Tensor, weight: int) -> list[float]:
        """Means over all ranks of their sums [figures], for a global batch of that weight. Waits for the device."""
        ...

    def routing(self) -> RoutingFigures | None:
        """Statistics of the routers of a mixture of experts since the last call; None without experts."""
        ...

    def check_head(self, inputs: Tensor) -> None:
        """Prove on `inputs` [1, T] that the loss is the one of transformers' own logits. Raises ModelError."""
        ...

    def check_isolation(self, inputs: Tensor) -> None:
        """Prove on `inputs` [1, T], as two documents, that nothing of one reaches the other. Raises ModelError."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every parameter by Hugging Face name; also of those that other ranks hold."""
        ...

    def state(self) -> list[StateTensor]:
        """All of this rank's pieces, in an order that stays. Moments are there before the first step."""
        ...

    def copies(self) -> Iterator[ForwardCopy]:
        """Yield what the forward pass reads on this rank; quantized parameters have their values in `state` alone."""
        ...

    def reading_instead(
        self, names: Collection[str], values: Callable[[ForwardCopy], Tensor]
    ) -> AbstractContextManager[None]:
        """A context in which the forward pass reads other values of these parameters; masters and moments do not
        change. `values`: from a copy to its values, [region.numel]. All ranks call it together."""
        ...

    def refresh(self) -> None:
        """Make what the forward pass reads equal to the (rounded) fp32 masters."""
        ...

    def optimizer_step(self) -> int:
        """Applied optimizer steps (skipped ones do not count), as the optimizer's bias correction knows them."""
        ...

    def set_optimizer_step(self, step: int) -> None:
        """Set every step counter of the optimizer."""
        ...

    def loss_scale(self) -> dict[str, float]:
        """The dynamic loss scaler's numbers (fp16); empty in other precisions."""
        ...

    def set_loss_scale(self, numbers: dict[str, float]) -> None:
        """Restore what `loss_scale` gave."""
        ...

    def close(self) -> None:
        """Give its memory and hooks back."""
        ...
