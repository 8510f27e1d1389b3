"""Write parameter values into a live engine, slice by slice, and prove that they arrived."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from llmtrain.engine.build import Ranks
from llmtrain.engine.fragments import (
    PARAM,
    Fragment,
    forward_copies,
    forward_dtype,
    fragments,
    owned,
    refresh,
    whole_shapes,
)
from llmtrain.errors import ModelError
from llmtrain.models.checksum import as_int64, checksum
from llmtrain.models.source import ParameterSource, RandomSource
from llmtrain.models.tensorfile import numel


@torch.no_grad()
def write_parameters(engine: Any, source: ParameterSource) -> None:
    """Fill the fp32 masters from the source and bring the forward's copies up to date.

    Every rank reads only the slices that it holds. Names and shapes must agree with the model's.

    Raises:
        ModelError: the source lacks a parameter, has one more, or one of another shape.
    """
    aliases = _match_names(engine, source)
    here: dict[str, list[Fragment]] = {}
    for fragment in fragments(engine):
        if fragment.kind == PARAM:
            here.setdefault(fragment.name, []).append(fragment)
    in_source = {alias: name for name, alias in aliases.items()}
    for alias in source.order():
        for fragment in here.get(in_source.get(alias, ""), ()):
            stop = fragment.start + fragment.view.numel()
            fragment.view.copy_(source.read(alias, fragment.start, stop))
    refresh(engine)


def prove_weights(engine: Any, source: ParameterSource, ranks: Ranks) -> None:
    """Compare checksums of the assembled parameters with those of the source (DeepSpeed #7848: silent random weights).

    Raises:
        ModelError: naming the parameters that differ.
    """
    if isinstance(source, RandomSource):
        return
    aliases = _match_names(engine, source)
    names = sorted(aliases)
    mine = {}
    for name in names[ranks.rank :: ranks.world_size]:  # each file is read once, by all ranks together
        alias = aliases[name]
        mine[name] = checksum(source.read(alias, 0, numel(source.shape(alias))).reshape(-1))
    shares: list[dict[str, int] | None] = [None] * ranks.world_size
    dist.all_gather_object(shares, mine, group=ranks.control)
    expected = {name: value for share in shares if share for name, value in share.items()}
    bad = differing_parameters(engine, expected, ranks)
    if bad:
        raise ModelError(
            f"{source.origin}: after loading, {len(bad)} of {len(names)} parameters differ from the file, "
            f"first {', '.join(bad[:3])}. Training would start from wrong weights, so the run ends here."
        )


@torch.no_grad()
def differing_parameters(engine: Any, expected: dict[str, int], ranks: Ranks) -> list[str]:
    """Names whose fp32 masters differ from the expected checksums, or whose forward copies differ from the masters."""
    masters = _assembled(engine, ranks, rounded=False)
    bad = {name for name in expected if masters.get(name) != expected[name]}
    rounded = _assembled(engine, ranks, rounded=True)
    partial: dict[str, int] = dict.fromkeys(rounded, 0)
    for name, start, values, whole in forward_copies(engine):
        if not whole:
            partial[name] += checksum(values, start)
        elif checksum(values) != rounded[name]:
            bad.add(name)
    if engine.zero_optimization_stage() == 3:
        copies = _summed(partial, ranks)
        bad |= {name for name in rounded if copies[name] != rounded[name]}
    found: list[list[str] | None] = [None] * ranks.world_size
    dist.all_gather_object(found, sorted(bad), group=ranks.control)
    return sorted({name for part in found if part for name in part})


def _assembled(engine: Any, ranks: Ranks, *, rounded: bool) -> dict[str, int]:
    """Checksums of the masters, as they are or rounded to the precision of the forward pass."""
    dtype = forward_dtype(engine)
    sums = dict.fromkeys(sorted(whole_shapes(engine)), 0)
    for fragment in fragments(engine):
        if fragment.kind == PARAM:
            start, values = owned(fragment)
            sums[fragment.name] += checksum(values.to(dtype) if rounded else values, start)
    return _summed(sums, ranks)


def _summed(sums: dict[str, int], ranks: Ranks) -> dict[str, int]:
    names = sorted(sums)
    total = torch.tensor([as_int64(sums[name] % 2**64) for name in names], dtype=torch.int64)
    dist.all_reduce(total, group=ranks.control)  # int64 addition wraps, as the checksum needs
    return {name: int(value) % 2**64 for name, value in zip(names, total.tolist(), strict=True)}


def _match_names(engine: Any, source: ParameterSource) -> dict[str, str]:
    """Model name -> source name. A folder saved from the bare decoder lacks the decoder's prefix."""
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
