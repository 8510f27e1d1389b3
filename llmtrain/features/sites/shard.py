"""The parameters that a rank exchanges with other sites: one flat array, its fragments, replicas, checkpoint tensors.

Streaming DiLoCo, which exchanges one fragment of the model after another: A. Douillard et al., arXiv 2501.18512.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from llmtrain.base.errors import CheckpointError
from llmtrain.base.untrusted import natural
from llmtrain.checkpoint.format import OUTER
from llmtrain.checkpoint.load import compare_checksums
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.engine.api import Engine, StateTensor
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.sites.message_formats import BLOCK
from llmtrain.features.sites.sample_ledger import Ledger
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.checksum import checksum_part_array
from llmtrain.storage.region import Region, shared

Array = npt.NDArray[np.float32]
Pieces = Sequence[tuple[int, str, Region]]
"""(first element in an array, Hugging Face name, elements of the tensor) of several tensors."""
_LIMIT_S = 600.0
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Copy:
    """Rows of elements that an owner broadcasts, and where they are on another rank."""

    source: tuple[int, int]
    """First element in the owner's array, and distance of rows."""
    target: tuple[int, int]
    """First element and distance of rows in the array of all held elements on this rank."""
    rows: int
    length: int

    def take(self, sent: Array, into: Array) -> None:
        """Copy the rows from `sent`, the owner's array, to `into`, this rank's."""
        for row in range(self.rows):
            source, target = self.source[0] + row * self.source[1], self.target[0] + row * self.target[1]
            into[target : target + self.length] = sent[source : source + self.length]


def copies(owned: Pieces, held: Pieces) -> list[Copy]:
    """Return the rows that a rank holding `held` takes from an owner of `owned`."""
    owned_by_name: dict[str, list[tuple[int, Region]]] = {}
    for at, name, region in owned:
        owned_by_name.setdefault(name, []).append((at, region))
    return [
        Copy((other_at + both.at[0], both.step[0]), (at + both.at[1], both.step[1]), both.rows, both.length)
        for at, name, region in held
        for other_at, other in owned_by_name.get(name, ())
        for both in shared(other, region)
    ]


def joined(owners: Sequence[Pieces], holders: Sequence[Pieces]) -> list[list[int]]:
    """Return the groups of at least two ranks that hold elements of one another, in order."""
    group = list(range(len(owners)))
    for holder, pieces in enumerate(holders):
        if _count(pieces) == _count(owners[holder]):
            continue  # as under ZeRO: it owns all that it holds
        for owner, owned in enumerate(owners):
            if group[owner] != group[holder] and copies(owned, pieces):
                low, high = sorted((group[owner], group[holder]))
                group = [low if number == high else number for number in group]
    groups = [[rank for rank, member in enumerate(group) if member == number] for number in sorted(set(group))]
    return [ranks for ranks in groups if len(ranks) > 1]


def _count(pieces: Pieces) -> int:
    return sum(region.numel for _, _, region in pieces)


class Replicas:
    """Elements replicated on several ranks of a site: one rank exchanges each with other sites, and broadcasts it."""

    def __init__(self, ranks: Ranks, owned: Pieces, held: Pieces) -> None:
        """All ranks call it together. `owned`: the pieces that this rank exchanges; `held`: all that it has."""
        shares: list[tuple[Pieces, Pieces]] = ranks.gather((list(owned), list(held)))
        self._group: Ranks | None = None
        self._from: list[tuple[int, int, list[Copy]]] = []
        """(rank in the group, elements of its array, rows that this rank takes from it)."""
        for members in joined([pieces for pieces, _ in shares], [pieces for _, pieces in shares]):
            group = ranks if len(members) == ranks.world_size else ranks.among(members, _LIMIT_S)
            if group is not None:
                self._group = group
                for place, rank in enumerate(members):
                    other = shares[rank][0]
                    size = max((at + region.numel for at, _, region in other), default=0)
                    self._from.append((place, size, [] if rank == ranks.rank else copies(other, held)))
        received = sum(copy.rows * copy.length for _, _, takes in self._from for copy in takes)
        count = _count(owned)
        assert received + count == _count(held), f"{_count(held)} elements are held, {received + count} have an owner"

    def share(self, values: Array, into: Array) -> None:
        """Complete `into`, [held], with the owners' values, by one broadcast per owner; this rank's own elements are
        already in place. `values`: this rank's owned elements. All ranks call it together."""
        for place, size, takes in self._from:
            if not size:
                continue
            assert self._group is not None
            owns = place == self._group.rank
            sent = torch.from_numpy(values[:size].copy()) if owns else torch.empty(size, dtype=torch.float32)
            self._group.copy_from(place, sent)
            for copy in takes:
                copy.take(sent.numpy(), into)


def fragment_of(shapes: Mapping[str, tuple[int, ...]], fragments: int) -> dict[str, int]:
    """Return name -> fragment, equal on all sites: layer i is in fragment i modulo their number; each other parameter,
    the largest first, in the smallest fragment."""
    fragment: dict[str, int] = {}
    sizes = [0] * fragments
    for name in sorted(shapes):
        if layer := _LAYER.search(name):
            fragment[name] = int(layer[1]) % fragments
            sizes[fragment[name]] += math.prod(shapes[name])
    rest = sorted(shapes.keys() - fragment.keys(), key=lambda name: (-math.prod(shapes[name]), name))
    for name in rest:
        fragment[name] = sizes.index(min(sizes))
        sizes[fragment[name]] += math.prod(shapes[name])
    return fragment


class Shard:
    """The parameters that a rank owns, concatenated in a flat fp32 array."""

    def __init__(self, engine: Engine, frozen: Collection[str], fragments: int = 1, ranks: Ranks | None = None) -> None:
        """`frozen`: parameters that do not train and are never sent. `fragments`: parts that synchronise in turn; each
        begins with a block of its own. `ranks`: of the site; None: no element is replicated."""
        self._engine = engine
        pieces = [piece for piece in engine.state() if piece.kind == PARAM and piece.name not in frozen]
        self._pieces: list[tuple[int, int, StateTensor]] = []
        """(first owned element in the array, first element in the array of all held ones, piece)."""
        self.parts: list[slice] = []
        """Slice of the array for each fragment."""
        self.size = self._held = 0
        fragment = fragment_of(engine.shapes(), fragments)
        for number in range(fragments):
            begin = self.size
            for piece in pieces:
                if fragment[piece.name] == number:
                    self._pieces.append((self.size, self._held, piece))
                    self.size += piece.own_region.numel
                    self._held += piece.region.numel
            if fragments > 1 and self.size == begin:
                self.size += BLOCK  # zeros: empty parts need distinct slices, too
            self.parts.append(slice(begin, self.size))
            if number + 1 < fragments:
                self.size = -(-self.size // BLOCK) * BLOCK
        self._fragment = fragment
        local = [(at, piece.name, piece.region) for _, at, piece in self._pieces]
        self._replicas = Replicas(ranks, self.regions(), local) if ranks is not None and ranks.world_size > 1 else None
        assert self._replicas or all(piece.own_region.numel == piece.region.numel for piece in pieces), "replicas"

    def regions(self, part: slice | None = None) -> list[tuple[int, str, Region]]:
        """Return (first element in the array, Hugging Face name, region of the tensor) of each owned piece."""
        return [(at, p.name, p.own_region) for at, _, p in self._pieces_of(part) if p.own_region.numel]

    def read(self, part: slice | None = None) -> Array:
        """Return the live values, [size]; zeros outside of `part`."""
        values = np.zeros(self.size, np.float32)
        for at, _, piece in self._pieces_of(part):
            if count := piece.own_region.numel:
                with piece.open() as live:
                    values[at : at + count] = live[piece.own].detach().float().cpu().numpy()
        return values

    @torch.no_grad()
    def write(self, values: Array, part: slice | None = None) -> None:
        """Write `values` to the model: all [size], or only the elements of `part`. All ranks call it together."""
        values_here = self._complete_from_owners(values, part)
        for _, at, piece in self._pieces_of(part):
            with piece.open() as live:
                live.copy_(torch.from_numpy(values_here[at : at + live.numel()]))
        self._engine.refresh()

    def _complete_from_owners(self, values: Array, part: slice | None) -> Array:
        """Return all held elements of this rank, [held]; arbitrary outside of `part`."""
        owned = np.zeros(self.size, np.float32)
        owned[part or slice(None)] = values
        complete = np.zeros(self._held, np.float32)
        for at, to, piece in self._pieces_of(part):
            count = piece.own_region.numel
            complete[to + piece.own.start : to + piece.own.start + count] = owned[at : at + count]
        if self._replicas is not None:
            self._replicas.share(owned, complete)
        return complete

    def _pieces_of(self, part: slice | None) -> list[tuple[int, int, StateTensor]]:
        if part is None:
            return self._pieces
        number = self.parts.index(part)
        return [entry for entry in self._pieces if self._fragment[entry[2].name] == number]

    def checksum(self, values: Array) -> int:
        """Checksum of `values` [size]; its sum over a site's ranks is independent of the sharding."""
        sums = (checksum_part_array(values[at : at + r.numel], r) for at, _, r in self.regions())
        return sum(sums) % 2**64


def shapes(engine: Engine) -> dict[str, str]:
    """Return the checksum of the parameters' shapes, under the name in messages."""
    text = json.dumps({name: list(shape) for name, shape in engine.shapes().items()}, sort_keys=True)
    return {"shapes of the parameters": xxhash.xxh3_64_hexdigest(text.encode())}


COMMON = OUTER + "common"
"""The common parameters."""
MOMENTUM = OUTER + "momentum"
RESIDUAL = OUTER + "residual"
"""Error feedback: the accumulated loss of this site's messages."""


def pieces(shard: Shard, kind: str, array: Callable[[], Array]) -> list[StateTensor]:
    """Return an array [size] as fp32 checkpoint tensors for any layout. `array`: called at each save."""
    return [
        StateTensor(
            name=name,
            kind=kind,
            region=region,
            own=slice(0, region.numel),
            replica=(0, 1),
            dtype=torch.float32,
            device=torch.device("cpu"),
            open=lambda low=at, high=at + region.numel: contextlib.nullcontext(torch.from_numpy(array()[low:high])),  # type: ignore[misc]
        )
        for at, name, region in shard.regions()
    ]


def read_back(shard: Shard, folder: Path, kinds: Collection[str], ranks: Ranks) -> dict[str, Array]:
    """Return kind -> array [size] of those kinds that a checkpoint has. All ranks call it together. Raises AgreedError:
    other parameters or checksums."""
    arrays: dict[str, Array] = {}
    expected: dict[str, int] = {}
    with ranks.together(), contextlib.closing(CheckpointReader(folder)) as reader:
        for kind in sorted(reader.kinds() & set(kinds)):
            arrays[kind] = np.zeros(shard.size, np.float32)
            for at, name, region in shard.regions():
                arrays[kind][at : at + region.numel] = reader.read_kind_region(kind, name, region).numpy()
            sums = reader.manifest.checksums()
            expected[kind] = sum(value for (saved_kind, _), value in sums.items() if saved_kind == kind) % 2**64
    compare_checksums(folder, {kind: shard.checksum(values) for kind, values in arrays.items()}, expected, ranks)
    return arrays


def standing(saved: Mapping[str, Any], folder: Path) -> tuple[Ledger, str, int, int, list[int]]:
    """Return (ledger, id, round, sequences since that round, tokens since the last round of each fragment) from
    trainer.json. Raises CheckpointError."""
    try:
        round_, trained = natural(saved["round"]), natural(saved["trained"])
        weights = [natural(weight) for weight in saved["weights"]]
        if not weights:
            raise ValueError("no weights")
        return Ledger.from_json(saved["ledger"]), str(saved["was"]), round_, trained, weights
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: the sites' state in trainer.json is damaged ({type(error).__name__}: {error}); resume from "
            "another checkpoint"
        ) from error
