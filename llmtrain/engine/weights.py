"""Write parameter values into a live engine, slice by slice, and prove that they arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.engine.build import Ranks
from llmtrain.engine.fragments import (
    PARAM,
    Fragment,
    forward_copies,
    forward_dtype,
    fragments,
    owned,
    whole_shapes,
)
from llmtrain.errors import ModelError
from llmtrain.models.checksum import as_int64, checksum
from llmtrain.models.source import ParameterSource, RandomSource
from llmtrain.models.tensorfile import numel

Key = tuple[str, str]
"""(kind, Hugging Face name) of a tensor of the optimizer's state."""
_CHUNK = 1 << 20  # elements


@torch.no_grad()
def fill_parameters(engine: Any, source: ParameterSource) -> None:
    """Fill the fp32 masters of this rank from the source. No rank waits for another; `refresh` has to follow.

    Every rank reads only the slices that it holds. Names and shapes must agree with the model's.

    Raises:
        ModelError: the source lacks a parameter, has one more, or one of another shape.
    """
    aliases = match_names(engine, source)
    here: dict[str, list[Fragment]] = {}
    for fragment in fragments(engine):
        if fragment.kind == PARAM:
            here.setdefault(fragment.name, []).append(fragment)
    in_source = {alias: name for name, alias in aliases.items()}
    for alias in source.order():
        for fragment in here.get(in_source.get(alias, ""), ()):
            fill(fragment, partial(source.read, alias))


def fill(fragment: Fragment, read: Callable[[int, int], Tensor]) -> None:
    """Fill a fragment from `read`: (start, stop) -> these elements of the flat Hugging Face tensor.

    A chunk of 1 M elements at a time: that is all the memory that it needs beside the state.
    """
    for low in range(0, fragment.view.numel(), _CHUNK):
        view = fragment.view[low : low + _CHUNK]
        start = fragment.start + low
        view.copy_(read(start, start + view.numel()))


def prove_weights(engine: Any, source: ParameterSource, ranks: Ranks) -> None:
    """Compare checksums of the assembled parameters with those of the source (DeepSpeed #7848: silent random weights).

    Raises:
        ModelError: naming the parameters that differ.
    """
    if isinstance(source, RandomSource):
        return
    aliases = match_names(engine, source)
    names = sorted(aliases)
    mine = {}
    for name in names[ranks.rank :: ranks.world_size]:  # each file is read once, by all ranks together
        alias = aliases[name]
        mine[name] = checksum(source.read(alias, 0, numel(source.shape(alias))).reshape(-1))
    shares: list[dict[str, int] | None] = [None] * ranks.world_size
    dist.all_gather_object(shares, mine, group=ranks.control)
    expected = {(PARAM, name): value for share in shares if share for name, value in share.items()}
    bad = [name for _, name in differing_tensors(engine, expected, ranks)]
    if bad:
        raise ModelError(
            f"{source.origin}: after loading, {len(bad)} of {len(names)} parameters differ from the file, "
            f"first {', '.join(bad[:3])}. Training would start from wrong weights, so the run ends here."
        )


@torch.no_grad()
def differing_tensors(
    engine: Any, expected: Mapping[Key, int], ranks: Ranks, rounded: Mapping[Key, int] | None = None
) -> list[Key]:
    """(kind, name) of what is not in memory as expected, put together over the ranks. The same list on all ranks.

    Also the parameters whose copies that the forward pass reads differ from the masters rounded to their precision.

    Args:
        expected: checksums of whole tensors; every parameter of the model is among them.
        rounded: what a view in a lower precision could not hold: this rank's checksum of the exact values in the
            parts that it owns.
    """
    sums: dict[Key, int] = {**dict.fromkeys(expected, 0), **(rounded or {})}
    shapes = whole_shapes(engine)
    bad = set()
    for fragment in fragments(engine):
        key = (fragment.kind, fragment.name)
        if key not in expected or key in (rounded or {}):
            continue
        mine, all_here = _checksums(fragment)
        sums[key] += mine
        # Replicas: the sum over the ranks counts each element once, so each rank proves its own copy.
        if fragment.view.numel() == numel(shapes[fragment.name]) and all_here != expected[key]:
            bad.add(key)
    held = _summed(sums, ranks)
    bad |= {key for key in expected if held[key] != expected[key]}
    bad |= _differing_copies(engine, held, ranks)
    found: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(found, sorted(bad), group=ranks.control)
    return sorted({key for part in found for key in part})


def _checksums(fragment: Fragment) -> tuple[int, int]:
    """Of the part that this rank owns, and of all that the fragment holds."""
    low, high, _ = fragment.own.indices(fragment.view.numel())
    mine = checksum(fragment.view[low:high], fragment.start + low)
    before = checksum(fragment.view[:low], fragment.start)
    after = checksum(fragment.view[high:], fragment.start + high)
    return mine, (before + mine + after) % 2**64


def _differing_copies(engine: Any, masters: Mapping[Key, int], ranks: Ranks) -> set[Key]:
    """Parameters whose copies on this rank, or put together from partitions (ZeRO 3), differ from the masters."""
    dtype = forward_dtype(engine)
    live = [fragment for fragment in fragments(engine) if fragment.kind == PARAM]
    wanted = {key: masters[key] for key in masters if key[0] == PARAM}
    if dtype != torch.float32:
        sums = dict.fromkeys(wanted, 0)
        for fragment in live:
            start, values = owned(fragment)
            for low in range(0, values.numel(), _CHUNK):
                piece = values[low : low + _CHUNK].to(dtype)
                sums[fragment.kind, fragment.name] += checksum(piece, start + low)
        wanted = _summed(sums, ranks)
    in_place = {fragment.view.data_ptr() for fragment in live}  # ZeRO 0 in fp32 computes with the masters themselves
    partitions: dict[Key, int] = dict.fromkeys(wanted, 0)
    bad = set()
    for name, start, values, whole in forward_copies(engine):
        key = (PARAM, name)
        if not whole:
            partitions[key] += checksum(values, start)
        elif values.data_ptr() not in in_place and checksum(values) != wanted[key]:
            bad.add(key)
    if engine.zero_optimization_stage() == 3:
        together = _summed(partitions, ranks)
        bad |= {key for key in wanted if together[key] != wanted[key]}
    return bad


def _summed(sums: dict[Key, int], ranks: Ranks) -> dict[Key, int]:
    """The checksums of all ranks' parts, added up. The keys are the same on all ranks."""
    keys = sorted(sums)
    total = torch.tensor([as_int64(sums[key]) for key in keys], dtype=torch.int64)
    dist.all_reduce(total, group=ranks.control)  # int64 addition wraps, as the checksum needs
    return {key: int(value) % 2**64 for key, value in zip(keys, total.tolist(), strict=True)}


def match_names(engine: Any, source: ParameterSource) -> dict[str, str]:
    """Model name -> source name. A folder saved from the bare decoder lacks the decoder's prefix.

    Raises:
        ModelError: the source lacks a parameter, has one more, or one of another shape.
    """
    shapes = whole_shapes(engine)
    available = set(source.order())
    hf = engine.module.hf
    prefix = f"{hf.base_model_prefix}."
    aliases = {name: name if name in available else name.removeprefix(prefix) for name in shapes}
    missing = sorted(name for name, alias in aliases.items() if alias not in available)
    if missing:
        raise ModelError(
            f"{source.origin} lacks {len(missing)} of the model's {len(shapes)} parameters, first "
            f"{', '.join(missing[:3])}. They would stay random. Check that the model's configuration is the one of "
            "these weights."
        )
    known = set(aliases.values()) | set(hf.state_dict())  # tied names and buffers may stand in the file as well
    surplus = sorted(n for n in available - known if not n.endswith((".inv_freq", ".masked_bias", ".attn.bias")))
    if surplus:
        raise ModelError(
            f"{source.origin} holds {len(surplus)} tensors that the model has no place for, first "
            f"{', '.join(surplus[:3])}. Check that the model's configuration is the one of these weights."
        )
    for name, alias in aliases.items():
        if source.shape(alias) != shapes[name]:
            raise ModelError(
                f"{source.origin}: {name} has shape {list(source.shape(alias))} there, but the model's configuration "
                f"makes it {list(shapes[name])}. Use the configuration that these weights were made with."
            )
    return aliases
