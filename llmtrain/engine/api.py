"""The interface of a run's engine.

For each step a run calls `forward_backward` with the micro-batches and then `update`; it calls `evaluate` between
steps. Code that reads or writes the optimizer's state uses `state`, and calls `refresh` after writing parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from llmtrain.data.batches import MicroBatch
from llmtrain.engine.losses.function import NEXT_TOKEN, LossFunction
from llmtrain.models.language import LanguageModel
from llmtrain.storage.region import Region


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """A piece of one tensor of the optimizer's state that this rank holds."""

    name: str
    """Hugging Face name of the parameter."""
    kind: str
    """PARAM, or the optimizer's name for a moment."""
    region: Region
    """The elements of the flat Hugging Face tensor that this piece holds."""
    own: slice
    """The part of the piece that this rank writes to checkpoints: replicas share the work, each element has one
    owner."""
    replica: tuple[int, int]
    """(index, number of replicas): the pieces with the same index, over all ranks, make up one complete tensor."""
    dtype: torch.dtype
    device: torch.device
    open: Callable[[], AbstractContextManager[Tensor]]
    """A context with the live values, [region.numel]. Writing to them changes the optimizer."""
    write: Callable[[], AbstractContextManager[Tensor]] | None = None
    """Only for a quantized parameter, whose `open` gives copies: a context for new values, which are packed at its
    end."""
    on_disk: bool = False
    """The state is on a disk: `open` reads the values from there, and writes them back if they have changed."""

    @property
    def own_region(self) -> Region:
        """Return the elements of the flat tensor that this rank writes to checkpoints."""
        return self.region.part(self.own.start, self.own.stop)


@dataclass(frozen=True, kw_only=True)
class ForwardCopy:
    """A parameter, or this rank's partition of it, that the forward pass reads."""

    name: str
    """Hugging Face name of the parameter."""
    region: Region
    """The elements of the flat Hugging Face tensor that the copy holds."""
    values: Tensor
    """[region.numel]."""
    replica: tuple[int, int]
    """(index, number of replicas): the copies with the same index, over all ranks, make up one complete tensor."""
    partition: bool
    """True for a partition, from which the parameter is gathered before use (ZeRO 3)."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """Result of an optimizer step. Reading a tensor here waits for the device: do it at log points only."""

    is_late: ClassVar[bool] = False
    """True if the host does not know yet whether the device will apply the update. The same on all ranks."""
    skipped: bool
    """The parameters did not change: gradient or loss were not finite, no token counted, or `left_out` is True."""
    grad_norm: Tensor | float | None
    """Global gradient norm before clipping."""
    left_out: bool = False
    """The function `leave_out` of `Engine.update` dropped the gradient."""


class LateUpdate(Update):
    """An update that the device skips if its gradient is not finite. Reading `skipped` or `grad_norm` waits until the
    device has measured the norm, but not for the work behind it."""

    is_late = True

    def __init__(self, read: Callable[[], float]) -> None:
        """`read`: waits for the gradient norm and returns it. If the norm is not finite, the update is skipped."""
        object.__setattr__(self, "_read", functools.cache(read))

    @property
    def grad_norm(self) -> float:
        norm: float = self._read()  # type: ignore[attr-defined]
        return norm if math.isfinite(norm) else math.inf

    @property
    def skipped(self) -> bool:
        return not math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class GradientPiece:
    """A piece of one parameter's gradient. Its memory is reused after the call that receives it."""

    name: str
    """Hugging Face name of the parameter."""
    region: Region
    """The elements of the flat Hugging Face tensor that the piece holds."""
    values: Tensor
    """[region.numel]."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The optimizer's counters, which a checkpoint keeps beside the moments."""

    optimizer_step: Tensor | int
    """Number of applied updates, without skipped ones, as in the bias correction. Reading a tensor waits for the
    device."""
    loss_scale: dict[str, float]
    """State of fp16's loss scaler; empty in other precisions."""


class Engine(Protocol):
    """One rank's engine. All ranks call every method together, except for `state`, `copies`, `refresh` and `counters`.
    The forward pass reads copies of the parameters (`copies`), the optimizer keeps fp32 masters and moments
    (`state`)."""

    module: LanguageModel
    device: torch.device
    forward_dtype: torch.dtype
    """The configured precision of the forward pass."""
    partitions_parameters: bool
    """True if the forward pass gathers its parameters from partitions on the ranks (ZeRO 3)."""
    layout_keys: tuple[str, ...]
    """Keys of the DeepSpeed JSON, with values, that change the layout of parameters in the engine: for messages."""
    is_pipeline: bool
    """True if ranks wait for each other's activations, so that an error on one rank leaves others waiting."""

    def forward_backward(
        self, micros: Sequence[MicroBatch], weight: Callable[[], int], objective: LossFunction = NEXT_TOKEN
    ) -> list[Tensor]:
        """Compute the gradient of the loss over a global batch.

        Args:
            micros: this rank's micro-batches of the global batch.
            weight: returns the divisor of the loss for the global batch (`LossFunction.weight`, over all ranks). It is
                called after the first forward pass, so that the ranks add it up during that pass.
            objective: the loss to minimise.

        Returns: the sums of `objective.figures` for each micro-batch, fp32 [figures] on the device.
        """
        ...

    def update(self, lr_factor: float, leave_out: Callable[[float], bool] | None = None) -> Update:
        """Step the optimizer with the peak learning rates times `lr_factor`.

        Args:
            leave_out: receives the gradient norm if it is finite, and returns True to drop the gradient, the same on
                all ranks. With it the host waits for the device.

        Raises:
            TrainingStopped: on all ranks, when fp16 has no smaller loss scale left.
        """
        ...

    def gradients(
        self,
        micros: Sequence[MicroBatch],
        weight: int,
        take: Callable[[GradientPiece], None],
        objective: LossFunction = NEXT_TOKEN,
        *,
        alone: bool = False,
    ) -> list[Tensor]:
        """Compute a gradient that no update follows. The gradient is not kept: `take` receives one piece after another.

        Args:
            micros, objective: as in `forward_backward`; a rank without a share passes micro-batches without a counted
                label.
            weight: divisor of the loss.
            take: receives each element on one rank, before clipping. It is not called on any rank if the gradient is
                not finite.
            alone: compute instead the gradient of each micro-batch on this data-parallel rank, without a reduction:
                complete parameters, as the backward pass computes them, times fp16's loss scale. ZeRO 0 to 2, without a
                pipeline.

        Returns: the sums for each micro-batch, as `forward_backward`.
        """
        ...

    def evaluate(
        self, micros: Iterable[MicroBatch], objective: LossFunction = NEXT_TOKEN
    ) -> tuple[dict[str, float], int]:
        """Return (figure -> its mean over all ranks, the divisor). Each rank passes equally many micro-batches."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every parameter of the model, also of those on other ranks, by Hugging Face name."""
        ...

    def state(self) -> list[StateTensor]:
        """Return all pieces of optimizer state on this rank, in a fixed order. Moments exist before the first step."""
        ...

    def copies(self) -> Iterator[ForwardCopy]:
        """Yield the parameters that this rank's forward pass reads, except quantized ones, which only `state` has."""
        ...

    def reading_instead(
        self, names: Collection[str], values: Callable[[ForwardCopy], Tensor]
    ) -> AbstractContextManager[None]:
        """A context in which the forward pass uses other values for the parameters `names`; masters and moments do not
        change. `values`: returns the values that replace a forward copy, [region.numel]."""
        ...

    def refresh(self) -> None:
        """Copy the (rounded) fp32 masters into the parameters of the forward pass."""
        ...

    def counters(self) -> Counters: ...

    def set_counters(self, counters: Counters) -> None:
        """Set the optimizer's counters."""
        ...

    def close(self) -> None:
        """Free the memory and remove the hooks."""
        ...
