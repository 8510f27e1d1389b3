"""Count a step's work: FLOPs and bytes of operators, and messages between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from llmtrain.base.rank.heartbeat import heart
from llmtrain.features.plan.torch_private import GROUPED, arguments_by_name, in_backward


@dataclass(frozen=True)
class Operator:
    """One operator on a rank."""

    phase: str
    """forward, backward, recompute (a forward pass within the backward pass), reduce (between backward pass and
    update), step (the update), data."""
    name: str
    flops: int
    bytes: int
    """Bytes of arguments and results."""


@dataclass(frozen=True)
class Message:
    """One collective, or one message to or from a stage of a pipeline."""

    phase: str
    kind: str
    """As in torch.ops.c10d: allreduce, allgather, reduce_scatter, alltoall, broadcast, reduce, send, recv, ..."""
    group: tuple[int, ...]
    """Ranks."""
    bytes: int
    """The larger side on this rank: the sum's operand, all gathered or scattered parts."""

    @property
    def sent(self) -> float:
        """Bytes that a rank of a ring sends, mean over the ranks."""
        if self.kind in ("send", "recv"):
            return float(self.bytes) if self.kind == "send" else 0.0
        return {"allreduce": 2, "barrier": 0}.get(self.kind, 1) * (1 - 1 / len(self.group)) * self.bytes


Counts = Counter[Operator | Message]


def sent(step: Counts, slots: int) -> tuple[float, float]:
    """Bytes that a rank sends in a step, and how many leave its host: a ring leaves each host once."""
    everywhere = elsewhere = 0.0
    for operation, count in step.items():
        if isinstance(operation, Message):
            hosts = len({rank // slots for rank in operation.group})
            everywhere += operation.sent * count
            elsewhere += operation.sent * count * (hosts / len(operation.group) if hosts > 1 else 0)
    return everywhere, elsewhere


class Work:
    """Counts the work of a step for each micro-batch.

    In a pipeline micro-batches overlap, so their work is the difference of two steps with different numbers of them.
    """

    def __init__(self, agreements: str | None) -> None:
        """`agreements`: name of the control group, whose messages are not counted."""
        self._agreements = agreements
        self._pieces: list[Counts] = [Counter()]
        self._before: list[Counts] = []
        self._in_forward = False

    def begin_step(self) -> None:
        self._before, self._pieces, self._in_forward = self._pieces, [Counter()], False

    def add(self, function: Any, args: Any, kwargs: Any, made: Any, recomputed: bool) -> None:
        """Count an operator. `recomputed`: a module's forward pass runs."""
        phase, name = heart.in_phase(), function.overloadpacket.__name__
        if (phase == "forward") != self._in_forward:
            self._in_forward = not self._in_forward
            if self._in_forward:
                self._pieces.append(Counter())
        if in_backward():
            phase = "recompute" if recomputed else "backward"
        elif phase == "backward":
            phase = "reduce"
        if function.namespace == "c10d":
            message = self._message(phase, function, args)
            if message is not None:
                self._pieces[-1][message] += 1
        elif function.namespace != "prim" and not function.is_view and name != "_unsafe_view":  # moves nothing
            flops, moved = _flops(function, args, kwargs, made), sum(_bytes((args, tuple(kwargs.values()), made)))
            self._pieces[-1][Operator(phase, name, flops, moved)] += 1

    def of_step(self, micro_batches: int, walked: int, walked_before: int) -> Counts:
        """Return the last step's counts as if it had `micro_batches`. It had `walked` ones, and the step before it
        `walked_before`."""
        data, *pieces = self._pieces
        total = Counter({operation: count * micro_batches // walked for operation, count in data.items()})
        for piece in pieces:
            total.update(piece)
        if micro_batches == walked:
            return total
        one = pieces[0]
        if walked != walked_before:
            for piece in self._before[1:]:
                total.subtract(piece)
            one = Counter({operation: count // (walked - walked_before) for operation, count in (+total).items()})
            total = sum(pieces, Counter[Operator | Message]())
        for operation, count in one.items():
            total[operation] += count * (micro_batches - walked)
        return total

    def _message(self, phase: str, function: Any, args: Any) -> Message | None:
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        if group.group_name == self._agreements:
            return None
        kind = function.overloadpacket.__name__.strip("_")
        kind = next((name for name in _KINDS if kind.startswith(name)), kind)
        # The larger side: a gathered result, a scattered operand.
        sides = [sum(_bytes(arg)) for arg in args if isinstance(arg, (Tensor, list))]
        return Message(phase, kind, tuple(dist.get_process_group_ranks(group)), max(sides, default=0))


_KINDS = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "reduce", "gather", "scatter")


def _bytes(argument: Any) -> Iterator[int]:
    """Yield the bytes of all tensors in an argument, also in lists; an expanded tensor counts as its storage."""
    if isinstance(argument, Tensor):
        yield min(argument.nbytes, argument.untyped_storage().nbytes())
    elif isinstance(argument, Iterable) and not isinstance(argument, str):
        for element in argument:
            yield from _bytes(element)


def _flops(function: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Return the FLOPs of a product; 0 for other operators. Causal attention counts half of its square."""
    name = function.overloadpacket.__name__
    if "attention" in name:
        by_name = arguments_by_name(function, args, kwargs)
        query, key = by_name["query"], by_name["key"]
        square = query.numel() * key.shape[-2] // (2 if by_name.get("is_causal") else 1)
        return int(2 * square * (5 if name.endswith("backward") else 2))  # products of the gradient, of the values
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if name in _PRODUCTS or function is GROUPED:
        first, second = tensors[-3:-1] if function is GROUPED and len(tensors) > 2 else tensors[-2:]
        matrices = first.shape[0] if first.dim() > second.dim() else 1  # each takes rows of its own
        return int(2 * first.numel() // matrices * second.shape[-1])
    count = flop_registry.get(function.overloadpacket)  # convolutions, fp8
    return 0 if count is None else int(count(*args, out_val=made))


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
