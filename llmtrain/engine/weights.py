"""Writes parameter values into a live engine, piece by piece, and proves that they arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from llmtrain.base.errors import ModelError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.engine.api import Engine, ForwardCopy, StateTensor
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.models.source import ParameterSource, RandomSource, refuse_other_shapes
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.checksum import as_int64, checksum, checksum_part
from llmtrain.storage.region import Region
from llmtrain.storage.tensorfile import numel

Key = tuple[str, str]
"""(kind, Hugging Face name) of a tensor of the optimizer's state."""
_CHUNK = 1 << 18
"""Elements copied at a time: few enough for malloc to reuse their memory."""
_DEVICE_CHUNK = 1 << 22
"""The same for a GPU, where copies of 1 MiB would spend most of their time on the launch."""


@torch.no_grad()
def fill_parameters(engine: Engine, source: ParameterSource) -> dict[Key, int]:
    """Fill the fp32 masters of this rank from a source; call `refresh` afterwards. Returns the checksums of packed
    pieces, taken before packing. Raises ModelError if the source has other parameters than the engine."""
    check_names(engine, source)
    pieces_of: dict[str, list[StateTensor]] = {}
    for piece in engine.state():
        if piece.kind == PARAM:
            pieces_of.setdefault(piece.name, []).append(piece)
    arrived: dict[Key, int] = {}
    for name in source.order():
        for piece in pieces_of.get(name, ()):
            value = fill(piece, partial(source.read_region, name))
            if value is not None:
                arrived[PARAM, name] = value
    return arrived


def fill(piece: StateTensor, read: Callable[[Region], Tensor]) -> int | None:
    """Fill a piece from `read`, which returns a region of the flat Hugging Face tensor. Returns the checksum of the
    values if the piece packs them, else None."""
    heart.beat()
    on_device = piece.device.type == "cuda"
    chunk = _DEVICE_CHUNK if on_device else _CHUNK
    with (piece.write or piece.open)() as live:
        for low in range(0, live.numel(), chunk):
            view = live[low : low + chunk]
            values = read(piece.region.part(low, low + view.numel()))
            if on_device and not values.is_cuda:
                values = values.pin_memory()
            view.copy_(values, non_blocking=on_device)
        if piece.write is None:
            return None
        parts = ((low, min(low + chunk, live.numel())) for low in range(0, live.numel(), chunk))  # lazy: few at once
        return sum(checksum_part(live[low:high], piece.region.part(low, high)) for low, high in parts) % 2**64


def fill_rounding(piece: StateTensor, read: Callable[[Region], Tensor]) -> int:
    """Fill a piece, and return the checksum of this rank's own part before it is rounded to the piece's dtype."""
    own = piece.region.part(piece.own.start, piece.own.stop)
    total = 0

    def watched(region: Region) -> Tensor:
        nonlocal total
        values = read(region)
        if own.numel:
            low, high = region.below(own.first), region.below(own.end)
            total += checksum_part(values[low:high], region.part(low, high))
        return values

    fill(piece, watched)
    return total


@dataclass(frozen=True)
class MastersApart:
    """Parameters whose masters differ from the values that the forward pass reads."""

    names: tuple[str, ...]
    """Hugging Face names."""
    ranks: tuple[int, ...]
    """Ranks on which the masters differ."""

    def message(self, engine: Engine, ranks: Ranks) -> str:
        hosts = {seat.rank: seat.host for seat in ranks.seats}
        on = ", ".join(f"{rank} ({hosts[rank]})" if rank in hosts else str(rank) for rank in self.ranks[:4])
        more = f" and {len(self.ranks) - 4} more" if len(self.ranks) > 4 else ""
        others = f" ({len(self.names) - 1} more such parameters)" if len(self.names) > 1 else ""
        text = (
            f"the optimizer keeps other values of {self.names[0]}{others} than the forward pass reads, on "
            f"rank{'s' if len(self.ranks) > 1 else ''} {on}{more}. A checkpoint would hold untrained values, so "
            "none is written. "
        )
        if keys := engine.layout_keys:
            which = f"one of {', '.join(keys)}" if len(keys) > 1 else keys[0]
            return text + f"The cause may be {which}: remove this key; if that does not help, use another ZeRO stage."
        return text + "Use another zero_optimization.stage, or other degrees of parallelism."


@torch.no_grad()
def masters_apart(engine: Engine, ranks: Ranks) -> MastersApart | None:
    """Compare the masters with the parameters of the forward pass, up to rounding; the answer is the same on all ranks.
    Checkpoints hold masters: an engine that maps them to wrong names would save untrained values (round_robin_gradients
    did)."""
    copies: dict[str, list[ForwardCopy]] = {}
    for copy in engine.copies():
        copies.setdefault(copy.name, []).append(copy)
    trained = {held.name for held in engine.module.local_parameters() if held.trains}
    pieces = [piece for piece in engine.state() if piece.kind == PARAM and piece.name in trained]
    device = engine.device
    flags = [_differs(piece, copies.get(piece.name, [])).to(device, non_blocking=True) for piece in pieces]
    wrong = torch.stack(flags).tolist() if flags else []
    of_ranks = ranks.gather(sorted({piece.name for piece, bad in zip(pieces, wrong, strict=True) if bad}))
    names = sorted({name for part in of_ranks for name in part})
    return MastersApart(tuple(names), tuple(rank for rank, part in enumerate(of_ranks) if part)) if names else None


def _differs(piece: StateTensor, copies: Iterable[ForwardCopy]) -> Tensor:
    """Return whether an element of a master differs from a copy on this rank, or no copy has the region: a bool
    tensor."""
    heart.beat()
    region, read = piece.region, False
    with piece.open() as view:
        differing = torch.zeros((), dtype=torch.bool, device=view.device)
        for copy in copies:
            start = copy.region.below(region.first) if region.numel else 0
            if start + region.numel > copy.region.numel or copy.region.part(start, start + region.numel) != region:
                continue
            read = True
            values = copy.values[start : start + region.numel]
            if values.data_ptr() == view.data_ptr():  # ZeRO 0 in fp32 computes with the masters themselves
                continue
            chunk = _CHUNK if view.device.type == "cpu" else _DEVICE_CHUNK
            for low in range(0, region.numel, chunk):
                part = values[low : low + chunk]
                master = view[low : low + chunk].to(part.dtype).to(part.device)
                differs = (master != part) & ~(master.isnan() & part.isnan())
                differing = differing.to(part.device) | differs.any()
    return differing if read else torch.ones_like(differing)


def prove_masters(engine: Engine, ranks: Ranks) -> None:
    """Check that masters and forward pass agree before the first step. Raises ModelError on all ranks."""
    if apart := masters_apart(engine, ranks):
        raise ModelError(apart.message(engine, ranks))


def prove_weights(
    engine: Engine, source: ParameterSource, ranks: Ranks, arrived: Mapping[Key, int] | None = None
) -> dict[str, int]:
    """Compare the assembled parameters with the source by checksum (DeepSpeed #7848: silent random weights). `arrived`:
    the checksums that `fill_parameters` returned. Returns the source's checksums, or {} if the source is random
    initialisation. Raises ModelError naming the parameters that differ."""
    if isinstance(source, RandomSource):
        return {}
    check_names(engine, source)
    names = sorted(engine.shapes())
    # Frozen parameters in lower precision, which other pipeline stages may hold:
    lower = {piece.name: piece.dtype for piece in engine.state() if piece.dtype.itemsize < 4 and piece.kind == PARAM}
    lower_types = {name: dtype for share in ranks.gather(lower) for name, dtype in share.items()}
    mine = {}
    for name in names[ranks.rank :: ranks.world_size]:  # each file is read once, by all ranks together
        heart.beat()
        values = source.read(name, 0, numel(source.shape(name))).reshape(-1)
        exact, rounded = _sum_on(values, engine.device), values.to(lower_types.get(name, values.dtype))
        mine[name] = (exact, exact if rounded is values else _sum_on(rounded, engine.device))
    source_sums = {name: sums for share in ranks.gather(mine) for name, sums in share.items()}
    expected = {(PARAM, name): value for name, (_, value) in source_sums.items()}
    bad = [name for _, name in differing_tensors(engine, expected, ranks, arrived=arrived)]
    if bad:
        raise ModelError(
            f"{source.origin}: after loading, {len(bad)} of {len(names)} parameters differ from the file, "
            f"first {', '.join(bad[:3])}. Training would start from wrong weights, so the run ends here."
        )
    return {name: exact for name, (exact, _) in source_sums.items()}


@torch.no_grad()
def differing_tensors(
    engine: Engine,
    expected: Mapping[Key, int],
    ranks: Ranks,
    rounded: Mapping[Key, int] | None = None,
    arrived: Mapping[Key, int] | None = None,
) -> list[Key]:
    """Return (kind, name) of each tensor that differs from its checksum in `expected`, or whose copies in the forward
    pass differ from the rounded master; the same list on all ranks.

    Args:
        expected: checksums of complete tensors.
        rounded: checksums of this rank's own parts before they were rounded to the dtype of their piece.
        arrived: checksums of this rank's pieces before packing.
    """
    shapes, rounded, arrived = engine.shapes(), rounded or {}, arrived or {}
    parts = [_Part(key, (0, 1), 0, value) for key, value in rounded.items()]
    bad = set()
    for piece in engine.state():
        key = (piece.kind, piece.name)
        low, high = piece.own.start, piece.own.stop
        if key in rounded:
            parts.append(_Part(key, (0, 1), high - low, 0))
        elif key in arrived:
            parts.append(_Part(key, piece.replica, piece.region.numel, arrived[key]))
        elif key not in expected:
            continue
        elif piece.region.numel < numel(shapes[piece.name]):
            parts.append(_Part(key, piece.replica, piece.region.numel, _sum(piece, 0, piece.region.numel)))
        else:  # this rank compares its replica alone; the sum over the ranks has each element once
            mine = _sum(piece, low, high)
            parts.append(_Part(key, (0, 1), high - low, mine))
            others = _sum(piece, 0, low) + _sum(piece, high, piece.region.numel)
            if (mine + others) % 2**64 != expected[key]:
                bad.add(key)
    bad |= _wrong(parts, expected, shapes, ranks)
    bad |= _differing_copies(engine, expected, shapes, ranks)
    of_ranks = ranks.gather(sorted(bad))
    return sorted({key for part in of_ranks for key in part})


@dataclass(frozen=True)
class _Part:
    """This rank's part of a replica of a tensor."""

    key: Key
    replica: tuple[int, int]
    """(index, number of replicas)."""
    elements: int
    checksum: int


def _wrong(
    parts: Iterable[_Part],
    expected: Mapping[Key, int],
    shapes: Mapping[str, tuple[int, ...]],
    ranks: Ranks,
    *,
    every: bool = True,
) -> set[Key]:
    """Return the tensors of which a replica, summed over all ranks, has another checksum than expected. `every`: a
    replica that lacks elements is wrong, too."""
    keys = sorted(expected)
    place = {key: index for index, key in enumerate(keys)}
    counts = torch.ones(len(keys), dtype=torch.int64)
    for part in parts:
        counts[place[part.key]] = max(part.replica[1], int(counts[place[part.key]]))
    ranks.largest(counts)
    first = [0, *accumulate(counts.tolist())]
    total = torch.zeros(2, first[-1], dtype=torch.int64)
    for part in parts:
        row = first[place[part.key]] + part.replica[0]
        total[0, row] += part.elements
        total[1, row] += as_int64(part.checksum)
    ranks.sum(total)
    bad = set()
    for key, begin, end in zip(keys, first, first[1:], strict=False):
        for elements, value in total[:, begin:end].T.tolist():
            complete = elements == numel(shapes[key[1]])
            if (complete and value % 2**64 != expected[key]) or (every and not complete):
                bad.add(key)
    return bad


def _sum_on(values: Tensor, device: torch.device) -> int:
    """Return the checksum of a flat host tensor, computed on the GPU if there is one, which takes less of a core's
    time."""
    if device.type != "cuda":
        return checksum(values)
    parts = range(0, values.numel(), _DEVICE_CHUNK)
    return sum(checksum(values[low : low + _DEVICE_CHUNK].to(device), low) for low in parts) % 2**64


def _sum(piece: StateTensor, low: int, high: int) -> int:
    heart.beat()
    with piece.open() as view:
        return checksum_part(view[low:high], piece.region.part(low, high))


def _rounded_sum(piece: StateTensor, dtype: torch.dtype) -> int:
    """Return the checksum of this rank's own part, rounded to `dtype`."""
    region, total = piece.own_region, 0
    with piece.open() as view:
        values, size = view[piece.own], _CHUNK if view.device.type == "cpu" else _DEVICE_CHUNK
        for low in range(0, values.numel(), size):
            chunk = values[low : low + size].to(dtype)
            total += checksum_part(chunk, region.part(low, low + chunk.numel()))
    return total


def _address(piece: StateTensor) -> int:
    with piece.open() as view:
        return view.data_ptr()


def _differing_copies(
    engine: Engine, masters: Mapping[Key, int], shapes: Mapping[str, tuple[int, ...]], ranks: Ranks
) -> set[Key]:
    """Return parameters whose copies in the forward pass, on one rank or from several together, differ from the
    masters."""
    dtype = engine.forward_dtype
    # A packed parameter has no copy beside its only values.
    live = [piece for piece in engine.state() if piece.kind == PARAM and piece.write is None]
    wanted = {key: masters[key] for key in masters if key[0] == PARAM}
    if dtype != torch.float32:
        sums = dict.fromkeys(wanted, 0)
        for piece in live:
            sums[piece.kind, piece.name] += _rounded_sum(piece, dtype)
        keys = sorted(sums)  # the same on all ranks
        total = torch.tensor([as_int64(sums[key]) for key in keys], dtype=torch.int64)
        ranks.sum(total)
        wanted = {key: int(value) % 2**64 for key, value in zip(keys, total.tolist(), strict=True)}
    in_place = set(map(_address, live))  # ZeRO 0 in fp32 computes with the masters themselves
    partitions: list[_Part] = []
    shards: list[_Part] = []
    bad = set()
    for held in engine.copies():
        heart.beat()
        key = (PARAM, held.name)
        if not held.partition and held.values.data_ptr() in in_place:
            continue
        value = checksum_part(held.values, held.region)
        if held.partition:
            partitions.append(_Part(key, held.replica, held.region.numel, value))
        elif held.region.numel < numel(shapes[held.name]):
            shards.append(_Part(key, held.replica, held.region.numel, value))
        elif value != wanted[key]:
            bad.add(key)
    if engine.partitions_parameters:
        sharded = {part.key for part in partitions}  # of these each rank has a part; buffers are complete
        bad |= _wrong(partitions, {key: wanted[key] for key in wanted if key in sharded}, shapes, ranks)
    # Missing shards are no fault (`every`): ZeRO 3 keeps only some parameters gathered, ZeRO 0 in fp32 has no copies.
    return bad | _wrong(shards, wanted, shapes, ranks, every=False)


def check_names(engine: Engine, source: ParameterSource) -> None:
    """Check that the source and the engine have the same parameters with equal shapes. Raises ModelError."""
    refuse_other_shapes(source, engine.shapes())
