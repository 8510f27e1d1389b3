"""Proves a sharding: threads play several ranks in one process, whose result must equal that of the unsharded layer."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.base.errors import ModelError, UserError
from llmtrain.models.structure.calls import Call

_SECONDS = 60.0
"""Longest time that a thread waits for the others."""


@dataclass(frozen=True, kw_only=True)
class Map:
    path: str
    column: bool
    """True: the outputs are sharded. False: the inputs are."""
    transposed: bool
    """The weight is [inputs, outputs] (transformers' Conv1D)."""
    sections: tuple[int, ...] | None
    """Numbers of outputs of the parts of a fused map, which are sharded separately; None: one part."""
    bias: bool
    inside: bool = False
    """True if the input is complete, and its gradient is summed over the ranks elsewhere (Projections.entries)."""


@dataclass(frozen=True, kw_only=True)
class InnerNorm:
    """A module with parameters that acts on sharded activations."""

    path: str
    kind: str
    """"each_head": all heads use the same weights, so each rank has a part of their gradient. "across_heads": it
    normalises over the heads of all ranks (its weights are as long as the last dimension). "own_heads": the first
    dimension of its weights counts heads. "one_head": in a list of modules, the module for the head with its index."""


class TooSlow(UserError):
    """The host is overloaded, which says nothing about the model."""

    passing = True


class _Meeting:
    """Exchanges tensors among the ranks, which are threads."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.barrier = threading.Barrier(degree)
        self._held: list[Any] = [None] * degree

    def all(self, rank: int, mine: Tensor) -> list[Tensor]:
        self._held[rank] = mine
        self.barrier.wait(_SECONDS)
        brought = list(self._held)
        self.barrier.wait(_SECONDS)
        return brought


class _ShardedMap(nn.Module):
    def __init__(self, module: Any, entry: Map, rank: int, meeting: _Meeting) -> None:
        super().__init__()
        dim = int(entry.column == entry.transposed)
        weight = _shard(module.weight, dim, entry.sections, rank, meeting.degree)
        self.weight = weight.T if entry.transposed else weight
        self._rank, self._column, self.meeting = rank, entry.column, meeting
        bias = getattr(module, "bias", None)
        if bias is not None and entry.column:
            bias = _shard(bias, 0, entry.sections, rank, meeting.degree)
        self.bias = bias

    def forward(self, features: Tensor) -> Tensor:
        if self._column:
            return F.linear(features, self.weight, self.bias)
        total = torch.stack(self.meeting.all(self._rank, F.linear(features, self.weight))).sum(0)
        return total if self.bias is None else total + self.bias


def _shard(tensor: Tensor, dim: int, sections: tuple[int, ...] | None, rank: int, degree: int) -> Tensor:
    parts = tensor.detach().split(list(sections) if sections else tensor.shape[dim], dim)
    return torch.cat([part.chunk(degree, dim)[rank] for part in parts], dim)


def rehearse(
    layer: nn.Module, call: Call, maps: list[Map], norms: list[InnerNorm], attention: str, *, heads: tuple[int, int]
) -> tuple[str, ...]:
    """Find the fewest attributes of the attention module that must be divided by the number of ranks, and return their
    names.

    Args:
        attention: path of the module; "" if attention is not sharded.
        heads: (number of query heads, number of key heads).

    Raises ModelError if no division gives the layer's output, TooSlow if the host is overloaded.
    """
    _, kv_heads = heads
    degree = next((d for d in range(2, kv_heads + 1) if kv_heads % d == 0), 1) if attention else 2
    module = layer.get_submodule(attention)
    size = getattr(module, "head_dim", None) or 0
    counts = {number for count in heads for number in (count, count * size)}
    for entry in maps:  # GPT-2's split_size is the output of one of three fused maps
        weight: Any = layer.get_submodule(entry.path).weight
        counts |= {*weight.shape, *(entry.sections or ())}
    names = [
        name
        for name, value in vars(module).items()
        if attention and type(value) is int and value in counts and value % degree == 0 and name != "layer_idx"
    ]
    reason = "its shards do not add up"
    with torch.no_grad():
        expected = _result(layer(*call.args, **call.kwargs))
        for count in range(len(names) + 1):
            for chosen in itertools.combinations(names, count):
                ranks = _ranks(layer, maps, norms, attention, chosen, _Meeting(degree))
                outputs, error = _play(ranks, call)
                if error is None and all(torch.allclose(out, expected, rtol=1e-4, atol=1e-5) for out in outputs):
                    return chosen
                reason = str(error) if error is not None and count == 0 else reason
    raise ModelError(
        f"model: {call.path} cannot be sharded: {degree} ranks together give another result than one rank ({reason})."
    )


def _ranks(
    layer: nn.Module,
    maps: list[Map],
    norms: list[InnerNorm],
    attention: str,
    numbers: tuple[str, ...],
    meeting: _Meeting,
) -> list[nn.Module]:
    made = []
    for rank in range(meeting.degree):
        sharded = copy.deepcopy(layer)
        for entry in maps:
            sharded.set_submodule(entry.path, _ShardedMap(layer.get_submodule(entry.path), entry, rank, meeting))
        for path in {norm.path.rpartition(".")[0] for norm in norms if norm.kind == "one_head"}:
            items = sharded.get_submodule(path)
            assert isinstance(items, nn.ModuleList)
            share = len(items) // meeting.degree
            sharded.set_submodule(path, items[rank * share : (rank + 1) * share])
        for norm in norms:
            if norm.kind == "own_heads":
                for parameter in sharded.get_submodule(norm.path).parameters():
                    parameter.data = parameter.data.chunk(meeting.degree, 0)[rank]
            elif norm.kind == "across_heads":
                of_all = sharded.get_submodule(norm.path)
                of_all.forward = _gathering(of_all.forward, rank, meeting)
        if attention:
            divide_heads(sharded.get_submodule(attention), numbers, meeting.degree)
        made.append(sharded)
    return made


def _gathering(forward: Callable[[Tensor], Tensor], rank: int, meeting: _Meeting) -> Any:
    return lambda features: forward(torch.cat(meeting.all(rank, features), -1)).chunk(meeting.degree, -1)[rank]


def divide_heads(module: Any, numbers: tuple[str, ...], degree: int) -> None:
    """Make an attention module compute a rank's heads: divide its numbers, and those in its own copy of the config."""
    for name in numbers:
        setattr(module, name, getattr(module, name) // degree)
    if hasattr(module, "config"):
        module.config = copy.copy(module.config)
        for name in ("num_attention_heads", "num_key_value_heads"):
            if isinstance(count := getattr(module.config, name, None), int):
                setattr(module.config, name, count // degree)


def _play(ranks: list[nn.Module], call: Call) -> tuple[list[Tensor], Exception | None]:
    outputs: list[Any] = [None] * len(ranks)
    errors: list[Exception] = []
    barriers = {m.meeting.barrier for rank in ranks for m in rank.modules() if isinstance(m, _ShardedMap)}

    def play(index: int) -> None:
        try:
            with torch.no_grad():
                outputs[index] = _result(ranks[index](*call.args, **call.kwargs))
        except Exception as error:  # any error of the layer's code: try the next choice
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            for barrier in barriers:
                barrier.abort()

    threads = [threading.Thread(target=play, args=(index,)) for index in range(len(ranks))]
    before = _tasks()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Ending threads, also OpenMP's, may hold a lock of MKL. A process forked now would wait for that lock for ever.
    until_s = time.monotonic() + 1.0
    while not _tasks() <= before and time.monotonic() < until_s:
        time.sleep(0.0005)
    missing = [output is None for output in outputs]
    if all(missing) and not errors:  # the others waited for the limit while the last one still computed
        raise TooSlow(
            f"model: the proof that ranks can share {call.path} has waited {_SECONDS:.0f} s for one of its threads, as "
            "this host is overloaded. Start the command again when fewer processes run."
        )
    if any(missing) and not errors:
        return outputs, RuntimeError("some ranks call more collectives than others")
    return outputs, errors[0] if errors else None


def _tasks() -> set[str]:
    """Return the ids of this process's threads."""
    return set(os.listdir("/proc/self/task"))


def _result(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
