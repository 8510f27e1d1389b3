"""Elements that several ranks of a site hold: one of them exchanges each with other sites, and tells the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from llmtrain.engine.dist.control import from_all
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.models.parallel.mesh import host_group
from llmtrain.storage.region import Region, shared

Array = npt.NDArray[np.float32]
Pieces = Sequence[tuple[int, str, Region]]
"""(first element in an array, Hugging Face name, elements of the tensor)."""
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Copy:
    """Rows of elements that an owner sends, and where a rank keeps them."""

    there: tuple[int, int]
    """First element in the owner's array, and the distance of rows."""
    here: tuple[int, int]
    """The same in an array of all that this rank holds."""
    rows: int
    length: int

    def take(self, sent: Array, into: Array) -> None:
        """`sent`: the owner's array; `into`: this rank's."""
        for row in range(self.rows):
            there, here = self.there[0] + row * self.there[1], self.here[0] + row * self.here[1]
            into[here : here + self.length] = sent[there : there + self.length]


def copies(owned: Pieces, held: Pieces) -> list[Copy]:
    """What a rank that holds `held` takes of what another owns."""
    theirs: dict[str, list[tuple[int, Region]]] = {}
    for at, name, region in owned:
        theirs.setdefault(name, []).append((at, region))
    return [
        Copy((other_at + each.at[0], each.step[0]), (at + each.at[1], each.step[1]), each.rows, each.length)
        for at, name, region in held
        for other_at, other in theirs.get(name, ())
        for each in shared(other, region)
    ]


def joined(owners: Sequence[Pieces], holders: Sequence[Pieces]) -> list[list[int]]:
    """Groups of ranks, in order, that hold elements of one another; each rank is in one at most, none is alone."""
    group = list(range(len(owners)))
    for holder, held in enumerate(holders):
        if _count(held) == _count(owners[holder]):
            continue  # as under ZeRO: nobody else owns what it holds
        for owner, owned in enumerate(owners):
            if group[owner] != group[holder] and copies(owned, held):
                low, high = sorted((group[owner], group[holder]))
                group = [low if each == high else each for each in group]
    found = [[rank for rank, each in enumerate(group) if each == number] for number in sorted(set(group))]
    return [ranks for ranks in found if len(ranks) > 1]


def _count(pieces: Pieces) -> int:
    return sum(region.numel for _, _, region in pieces)


class Replicas:
    """The other ranks of the site that hold elements of this one's, or own some that it holds."""

    def __init__(self, ranks: Ranks, owned: Pieces, held: Pieces) -> None:
        """All ranks call it together. `owned`: what this rank exchanges, in its array; `held`: all that it has."""
        said: list[tuple[Pieces, Pieces]] = from_all(ranks, (list(owned), list(held)))
        self._group: Any = None
        self._from: list[tuple[int, int, list[Copy]]] = []
        """(rank in the group, elements of its array, what this rank takes of it)."""
        for members in joined([each for each, _ in said], [each for _, each in said]):
            # Every rank makes every group, in one order: torch.distributed asks for it.
            if len(members) == ranks.world_size:
                group = ranks.control
            else:
                names = dist.get_process_group_ranks(ranks.control)
                group = host_group([names[each] for each in members], _LIMIT_S)
            if ranks.rank in members:
                self._group = group
                for place, rank in enumerate(members):
                    theirs = said[rank][0]
                    size = max((at + region.numel for at, _, region in theirs), default=0)
                    self._from.append((place, size, [] if rank == ranks.rank else copies(theirs, held)))
        told = sum(each.rows * each.length for _, _, takes in self._from for each in takes)
        own = _count(owned)
        assert told + own == _count(held), f"{_count(held)} elements are held, {told + own} have an owner"

    def share(self, own: Array, into: Array) -> None:
        """Make every element of `into` [held] the one of its owner, by one broadcast of each. All ranks together.

        Args:
            own: this rank's array of what it owns.
            into: an array of all that it holds; those that it owns are there.
        """
        me = dist.get_rank(self._group) if self._group is not None else 0
        for place, size, takes in self._from:
            if not size:
                continue
            sent = torch.from_numpy(own[:size].copy()) if place == me else torch.empty(size, dtype=torch.float32)
            dist.broadcast(sent, group=self._group, group_src=place)
            for each in takes:
                each.take(sent.numpy(), into)
