"""Compares the values that two or more ranks must hold alike.

Each rank names the elements of Hugging Face tensors that it holds (`local_parameters`, by way of `Engine.copies`). For
each tensor on two or more ranks a small hash is compared: data-parallel replicas, norms on every tensor-parallel rank,
an embedding tied over two pipeline stages, parameters that ZeRO 3 keeps gathered.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.base.errors import TrainingStopped
from llmtrain.engine.api import Engine
from llmtrain.engine.ranks.ranks import Ranks, Seat

_ROW = 4096  # 64-bit words that share a factor: the hash sees that a block has moved, but no exchange within a row
_PIECE = 1 << 17  # 64-bit words of an unaligned tensor that are copied at once: they stay in the cache
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as a signed number
_NOTHING = -(2**63)  # the neutral element of a maximum
_SHOWN = 80  # characters of a value that a message shows


@dataclass(frozen=True)
class Difference:
    """A fact or tensor that differs among its ranks."""

    name: str
    """Hugging Face name of a parameter, or the name of a fact."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks that agree with each other, the largest group first."""
    shown: tuple[str, ...]
    """Value of each group; empty strings for a parameter."""

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks that differ from the majority; without a majority, all ranks that hold the value."""
        everyone = sum(map(len, self.groups))
        if 2 * len(self.groups[0]) > everyone:
            return tuple(sorted(rank for group in self.groups[1:] for rank in group))
        return tuple(sorted(rank for group in self.groups for rank in group))


def tensor_hash(values: Tensor) -> Tensor:
    """Return a hash of the tensor's bits: an int64 scalar on its device. Does not wait for the device.

    Equal bits give equal hashes at any address, NaNs included, and one changed bit always changes the hash. Words of 64
    bits are added up in rows, and each row's sum is multiplied by an odd factor of its own (modulo 2^64). Reads the
    tensor once: 37 GB/s on one core.
    """
    flat = values.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    size = flat.element_size()
    if flat.data_ptr() % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return _add(total, flat, 0)
    for low in range(0, flat.numel(), _PIECE * 8 // size):  # a copy is aligned to words
        _add(total, flat[low : low + _PIECE * 8 // size].clone(), low * size // 8 // _ROW)
    return total


def _add(total: Tensor, flat: Tensor, first_row: int) -> Tensor:
    """Add the hash of aligned elements, which begin at `first_row`, to `total`."""
    per_word = 8 // flat.element_size()
    whole = flat.numel() // per_word
    words = flat[: whole * per_word].view(torch.int64)
    rows, rest = divmod(whole, _ROW)
    if rows:
        factors = torch.arange(first_row, first_row + rows, device=flat.device).mul_(2).add_(1).mul_(_ODD)
        total += (words[: rows * _ROW].view(rows, _ROW).sum(dim=1) * factors).sum()
    factor = (2 * (first_row + rows) + 1) * _ODD % 2**64
    factor = factor - 2**64 if factor >= 2**63 else factor
    if rest:
        total += words[rows * _ROW :].sum() * factor
    if whole * per_word < flat.numel():
        last = torch.zeros(per_word, dtype=flat.dtype, device=flat.device)
        last[: flat.numel() - whole * per_word] = flat[whole * per_word :]
        total += last.view(torch.int64).sum() * factor * 3
    return total


class Replicas:
    """Compares the ranks' tensors and facts. All ranks call `differences` together."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self._rows: dict[int, int] = {}
        """Key that two or more ranks hold -> its row in the message of the all-reduce."""

    def differences(
        self, facts: Mapping[str, Any], own: Mapping[str, Any] | None = None, *, parameters: bool = True
    ) -> list[Difference]:
        """Return all differences, the same list on all ranks: facts first, then parameters. Costs one pass over the
        parameters, one wait for the device, one all-reduce on the host. `own`: facts compared among the ranks that give
        the same name."""
        facts_held = [(_key(name), name, json.dumps(value)) for name, value in (*facts.items(), *(own or {}).items())]
        hashes = [_number(shown) for _, _, shown in facts_held]
        copies = list(self._engine.copies()) if parameters else []
        packed = [one for one in self._engine.module.local_parameters() if parameters and one.packed is not None]
        if copies or packed:
            with torch.no_grad():
                device = self._ranks.device  # offloaded values are on the host
                tensor_hashes = [tensor_hash(copy.values).to(device, non_blocking=True) for copy in copies]
                # Unpacked one at a time, to save memory.
                tensor_hashes += [tensor_hash(one.values()).to(device, non_blocking=True) for one in packed]
                hashes += torch.stack(tensor_hashes).tolist()
        facts_held += [(_key(repr((copy.name, copy.region, copy.partition))), copy.name, "") for copy in copies]
        facts_held += [(_key(repr((one.name, one.region, False))), one.name, "") for one in packed]
        if not self._rows:
            self._rows = self._shared([key for key, _, _ in facts_held])
        return self._compare(facts_held, hashes)

    def _shared(self, keys: Sequence[int]) -> dict[int, int]:
        """Number the keys that two ranks or more have; the same on all ranks."""
        of_ranks = self._ranks.gather(torch.tensor(keys, dtype=torch.int64))
        found, counts = torch.cat(of_ranks).unique(return_counts=True)
        shared = [key for key, count in zip(found.tolist(), counts.tolist(), strict=True) if count > 1]
        return {key: row for row, key in enumerate(key for key in shared if key != _NOTHING)}

    def _compare(self, held: Sequence[tuple[int, str, str]], hashes: Sequence[int]) -> list[Difference]:
        count = len(self._rows)
        message = torch.full((2, count), _NOTHING, dtype=torch.int64)
        pairs = [(self._rows[key], value) for (key, _, _), value in zip(held, hashes, strict=True) if key in self._rows]
        rows, values = (torch.tensor(each, dtype=torch.int64) for each in zip(*pairs, strict=True))
        message[0, rows], message[1, rows] = values, ~values
        self._ranks.largest(message)
        largest, smallest = message[0], ~message[1]
        wrong = set((largest != smallest).nonzero().flatten().tolist())
        if not wrong:
            return []
        mine = [
            (self._rows[key], name, shown, value)
            for (key, name, shown), value in zip(held, hashes, strict=True)
            if self._rows.get(key) in wrong
        ]
        everyone = self._ranks.gather(mine)
        return _differences(everyone)


def _differences(everyone: Sequence[Sequence[tuple[int, str, str, int]]]) -> list[Difference]:
    """Return the differences, sorted. `everyone`: for each rank, (row, name, shown, hash) of differing entries."""
    by_row: dict[int, dict[int, list[int]]] = {}
    words: dict[tuple[int, int], tuple[str, str]] = {}
    for rank, entries in enumerate(everyone):
        for row, name, shown, value in entries:
            by_row.setdefault(row, {}).setdefault(value, []).append(rank)
            words[row, value] = (name, shown)
    differing = []
    for row, by_value in by_row.items():
        ordered = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
        name = words[row, ordered[0][0]][0]
        values = tuple(words[row, value][1][:_SHOWN] for value, _ in ordered)
        differing.append(Difference(name, tuple(tuple(ranks) for _, ranks in ordered), values))
    # ZeRO 3 on one rank: a gathered parameter is the partition itself, and would be reported twice.
    return sorted(set(differing), key=lambda each: (not each.shown[0], each.name))


def describe(differences: Sequence[Difference], seats: Sequence[Seat]) -> str:
    """Return a sentence with the first difference, its ranks and hosts."""
    first = differences[0]
    hosts = {seat.rank: seat.host for seat in seats}

    def on(ranks: Sequence[int]) -> str:
        named = [f"{rank} ({hosts[rank]})" if rank in hosts else str(rank) for rank in ranks[:4]]
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"

    if first.shown[0]:
        values = ", ".join(f"{shown} on {on(ranks)}" for shown, ranks in zip(first.shown, first.groups, strict=True))
        sentence = f"{first.name} is not the same on all ranks: {values}"
    elif 2 * len(first.groups[0]) > sum(map(len, first.groups)):
        verb = "differs" if len(first.odd) == 1 else "differ"
        sentence = f"{first.name} on {on(first.odd)} {verb} from {on(first.groups[0])}, which should hold the same"
    else:
        sides = " and ".join(on(ranks) for ranks in first.groups[:4])
        sentence = f"{first.name} differs between {sides}, which should hold the same; there is no majority"
    if len(differences) > 1:
        ranks = Counter(rank for each in differences for rank in each.odd)
        sentence += f" ({len(differences) - 1} more such, most often on rank {ranks.most_common(1)[0][0]})"
    return sentence


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


_key = _number
"""Return a number for a tensor's name: ranks exchange names only if a tensor differs."""


class ReplicasDiffer(TrainingStopped):
    """Replicas have diverged. Restartable: most bit flips are transient, and ranks agreed at the newest checkpoint."""

    passing = True
