"""The sharded maps of a tensor-parallel group: DeepSpeed's AutoTP layers, with forwards of our own.

DeepSpeed 0.19.8's own forwards (module_inject/layers.py) reduce the gradient of a common input once for each map that
reads it (three times for query, key and value), lose that sum when the gradient is not contiguous, and under ZeRO 3
keep every gathered weight alive until the backward pass (a transposed view of it is saved for it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from torch import Tensor, nn

from llmtrain.models.parallel.deepspeed_private import overrides


class Span:
    """The stretch of a layer in which each rank of the group has its own shard of the activations.

    It begins where a column map reads the replicated activation and ends where the next row map sums what the ranks
    have. Maps that read the same activation share one sum of its gradient. Dropout within the stretch draws from a
    stream of random numbers of its own on each rank, outside of it all ranks draw the same.
    """

    def __init__(self, group: Any, *, dropout: bool) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.degree = dist.get_world_size(group)
        self._dropout = dropout
        self._read: tuple[Tensor, Tensor] | None = None
        self._outside: Any = None

    def enter(self, replicated: Tensor, *, training: bool) -> Tensor:
        """The activation for a map whose output is this rank's shard."""
        if self._dropout and training and self._outside is None:
            self._outside = _own_stream(replicated.device, self.rank)
        if not (torch.is_grad_enabled() and replicated.requires_grad):
            return replicated
        if self._read is None or self._read[0] is not replicated:
            self._read = replicated, copied(replicated, self.group)
        return self._read[1]

    def leave(self) -> None:
        """Sum the ranks' outputs, so that what follows is replicated again."""
        self._read = None
        if self._outside is not None:
            _common_stream(self._outside)
            self._outside = None


def copied(replicated: Tensor, group: Any) -> Tensor:
    """Identity forward; sums the ranks' gradients, each a part of the whole one, backward."""
    return _Copied.apply(replicated, group)


def summed(parts: Tensor, group: Any) -> Tensor:
    """The sum over the group, in place; its gradient is the same on all ranks."""
    return _Summed.apply(parts, group)


def gathered(shard: Tensor, group: Any, dim: int) -> Tensor:
    """All shards side by side along `dim`, for a computation of which each rank then uses its own part."""
    return _Gathered.apply(shard, group, dim)


class Column(LinearLayer):
    """A linear map of which this rank computes some outputs. The weight is [outputs, inputs], or [inputs, outputs]."""

    def __init__(self, linear: nn.Module, span: Span, *, transposed: bool, inside: bool, name: str) -> None:
        super().__init__(linear, span.group, skip_partition=True, name=name)
        self._span = span
        self._transposed = transposed
        self._inside = inside  # the gradient of its input is summed elsewhere

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] replicated -> [..., outputs / degree]."""
        if not self._inside:
            input = self._span.enter(input, training=self.training)
        return _linear(input, self.weight, self.bias, self._transposed)

    @overrides(LinearLayer)
    def _mark_uc_metadata(self) -> None:
        """Our checkpoints know shards as regions (storage/region.py)."""


class Row(LinearAllreduce):
    """A linear map of which this rank has some inputs. The bias is added once, to the sum."""

    def __init__(self, linear: nn.Module, span: Span, *, transposed: bool, name: str) -> None:
        super().__init__(linear, span.group, name=name)
        self._span = span
        self._transposed = transposed

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs / degree] -> [..., outputs] replicated."""
        self._span.leave()
        output = summed(_linear(input, self.weight, None, self._transposed), self._span.group)
        return output if self.bias is None else output + self.bias

    @overrides(LinearAllreduce)
    def _tp_partition(self, params_list: Sequence[Any]) -> None:
        """The parameter is a shard already."""

    @overrides(LinearAllreduce)
    def _mark_uc_metadata(self) -> None:
        """See Column."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Saves the parameter itself for the backward pass, no view of it: ZeRO 3 frees what the parameter holds."""
    if not transposed:
        return F.linear(input, weight, bias)  # under ZeRO 3 DeepSpeed's, which keeps no view either
    flat = input.reshape(-1, input.shape[-1])
    output = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
    return output.view(*input.shape[:-1], weight.shape[1])


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicated: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return replicated.view_as(replicated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(parts)
        dist.all_reduce(parts, group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, shard.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous()  # each rank has the gradient that comes through its own part of the result
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None


def _own_stream(device: torch.device, rank: int) -> tuple[torch.Generator, Any]:
    """Let the default generator go on with numbers of this rank's own. Returns what `_common_stream` needs.

    The numbers follow from the generator's state alone, which is the same on all ranks: a layer that is computed
    again in the backward pass, from a restored state, draws the same.
    """
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        seed, offset = generator.initial_seed(), generator.get_offset()  # known to the host: nothing waits
        generator.manual_seed(_mixed(seed, offset, rank))
        return generator, (seed, offset + 4)  # moved on: the next stretch draws others
    generator = torch.default_generator
    number = int(torch.randint(2**62, (), device="cpu"))
    state = generator.get_state()
    generator.manual_seed(_mixed(number, 0, rank))
    return generator, state


def _common_stream(outside: tuple[torch.Generator, Any]) -> None:
    generator, state = outside
    if generator.device.type == "cuda":
        seed, offset = state
        generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        generator.set_state(state)


def _mixed(seed: int, offset: int, rank: int) -> int:
    return (seed * 6_364_136_223_846_793_005 + offset * 1_442_695_040_888_963_407 + rank + 1) % 2**63
