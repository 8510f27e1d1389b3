"""The interface of a run's engine.

A run calls `forward_backward` with the micro-batches of a step, then `update`; `evaluate` between steps. Readers and
writers of the optimizer's state use `state`, and call `refresh` after writing parameters.
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
    """Elements of the flat Hugging Face tensor."""
    own: slice
    """The part that this rank writes to checkpoints: replicas share the work, every element has one owner."""
    replica: tuple[int, int]
    """(index, of): the pieces with one index, over all ranks, make up the complete tensor."""
    dtype: torch.dtype
    device: torch.device
    open: Callable[[], AbstractContextManager[Tensor]]
    """A context with the live values, [region.numel]. Writing to them changes the optimizer."""
    write: Callable[[], AbstractContextManager[Tensor]] | None = None
    """For a quantized parameter, whose `open` gives copies: a context that takes all values and packs them."""
    on_disk: bool = False
    """`open` reads the values from a disk, and writes them there if they have changed."""

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
    """(index, of): the copies with one index, over all ranks, make up the complete tensor."""
    partition: bool
    """The parameter is gathered from the ranks before use (ZeRO 3)."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """Result of an optimizer step. Reading a tensor here waits for the device: do it at log points only."""

    is_late: ClassVar[bool] = False
    """The host does not know yet what the device makes of it. The same on all ranks."""
    skipped: bool
    """The parameters did not change: the gradient or the loss was not finite, no token counted, or `left_out`."""
    grad_norm: Tensor | float | None
    """Global gradient norm before clipping."""
    left_out: bool = False
    """The caller has left the update out."""


class LateUpdate(Update):
    """An update that the device skips if its gradient is not finite. `skipped` and `grad_norm` wait until the device
    has measured the norm, and not for what it has to do after it."""

    is_late = True

    def __init__(self, read: Callable[[], float]) -> None:
        """`read`: waits for the gradient norm, and returns it; not finite: the update is skipped."""
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
    """A piece of one parameter's gradient. Its memory is used again after the call that gets it."""

    name: str
    """Hugging Face name of the parameter."""
    region: Region
    """Elements of the flat Hugging Face tensor."""
    values: Tensor
    """[region.numel]."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the optimizer counts beside its moments."""

    optimizer_step: Tensor | int
    """Applied updates, without skipped ones, as in the bias correction. Reading a tensor waits for the device."""
    loss_scale: dict[str, float]
    """Numbers of fp16's dynamic loss scaler; empty in other precisions."""


class Engine(Protocol):
    """One rank's engine. All ranks call every method together, except for `state`, `copies`, `refresh` and `counters`.

    The forward pass reads copies of the parameters (`copies`), the optimizer keeps fp32 masters and moments (`state`).
    """

    module: LanguageModel
    device: torch.device
    forward_dtype: torch.dtype
    """The configured precision of the forward pass."""
    partitions_parameters: bool
    """The forward pass gathers its parameters from partitions on the ranks (ZeRO 3)."""
    layout_keys: tuple[str, ...]
    """Configured keys and values that change the layout of parameters in the engine: for messages."""
    is_pipeline: bool
    """Ranks wait for activations: an error on one rank leaves others waiting."""

    def forward_backward(
        self, micros: Sequence[MicroBatch], weight: Callable[[], int], objective: LossFunction = NEXT_TOKEN
    ) -> list[Tensor]:
        """Compute the gradient of the loss over a global batch.

        Args:
            micros: this rank's part of the batch.
            weight: returns the batch's weight by the objective; called after the first forward pass, so that the
                ranks' agreement overlaps with the pass.
            objective: the loss to minimise.

        Returns: sums of the objective for each micro-batch, fp32 [figures] on the device.
        """
        ...

    def update(self, lr_factor: float, leave_out: Callable[[float], bool] | None = None) -> Update:
        """Step the optimizer with peak learning rates x `lr_factor`.

        Args:
            leave_out: gets a finite gradient norm, and returns True, the same on all ranks, to drop the gradient. The
                host waits for the device.

        Raises:
            TrainingStopped: on all ranks: fp16 has no smaller loss scale left.
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
        """Compute a gradient that no update follows. It is kept nowhere: `take` gets one piece after another.

        Args:
            micros, objective: as in `forward_backward`; a rank with no share gives rows without a counted label.
            weight: divisor of the loss.
            take: gets each element on one rank, before clipping; nothing on all ranks if the gradient is not finite.
            alone: give the gradient of each micro-batch on this data-parallel rank alone instead, times fp16's loss
                scale: complete parameters, as the backward pass computes them. ZeRO 0 to 2, without a pipeline.

        Returns: sums of the objective for each micro-batch, as `forward_backward`.
        """
        ...

    def evaluate(
        self, micros: Iterable[MicroBatch], objective: LossFunction = NEXT_TOKEN
    ) -> tuple[dict[str, float], int]:
        """Return (the objective's figures, their weight) over all ranks, each with an equal number of micro-batches."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every parameter on any rank, by Hugging Face name."""
        ...

    def state(self) -> list[StateTensor]:
        """Return all pieces on this rank, in a fixed order. Moments exist before the first step."""
        ...

    def copies(self) -> Iterator[ForwardCopy]:
        """Yield the parameters of this rank's forward pass; quantized ones have values in `state` alone."""
        ...

    def reading_instead(
        self, names: Collection[str], values: Callable[[ForwardCopy], Tensor]
    ) -> AbstractContextManager[None]:
        """A context in which the forward pass reads other values for these parameters; masters and moments do not
        change. `values`: maps a copy to values, [region.numel]."""
        ...

    def refresh(self) -> None:
        """Copy the (rounded) fp32 masters into the parameters of the forward pass."""
        ...

    def counters(self) -> Counters:
        """Return what the optimizer counts."""
        ...

    def set_counters(self, counters: Counters) -> None:
        """Restore the numbers of `counters`."""
        ...

    def close(self) -> None:
        """Free the memory and remove the hooks."""
        ...
