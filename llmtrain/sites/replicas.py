"""Parameters that several ranks of a site hold: one of them speaks to the other sites, and tells the rest.

So an element passes the slow line once, whether ZeRO 0 keeps it on every rank, a pipeline on two stages (tied tensors),
or tensor parallelism on all ranks of a group (norms).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llmtrain.dist.control import from_all
from llmtrain.dist.ranks import Ranks
from llmtrain.engine.api import StateTensor
from llmtrain.tensors.pieces import put_shared
from llmtrain.tensors.region import Region

_AT_ONCE = 1 << 22
"""Elements of the tensors that the ranks exchange at a time."""


class Replicas:
    """What the ranks of one site hold more than once. All ranks call every method together."""

    def __init__(self, pieces: Sequence[StateTensor], ranks: Ranks) -> None:
        """`pieces`: of the parameters that are synchronised, all that this rank holds."""
        self._ranks = ranks
        mine = {piece.name: piece.region.end for piece in pieces if piece.replica[1] > 1}
        sizes: dict[str, int] = {}
        for share in from_all(ranks, mine) if ranks.world_size > 1 else ():
            for name, size in share.items():
                sizes[name] = max(size, sizes.get(name, 0))
        self._batches = list(_batches(sizes))
        self._pieces = {name: [piece for piece in pieces if piece.name == name] for name in sizes}

    @torch.no_grad()
    def tell(self) -> None:
        """Make all copies of an element what they are on the rank that owns it."""
        for names in self._batches:
            mine = [(piece.name, piece.own_region, _own(piece)) for name in names for piece in self._pieces[name]]
            found: dict[str, list[tuple[Region, Tensor]]] = {}
            for share in from_all(self._ranks, [each for each in mine if each[1].numel]):
                for name, region, values in share:
                    found.setdefault(name, []).append((region, values))
            for piece in (piece for name in names for piece in self._pieces[name]):
                with piece.open() as live:
                    for region, values in found[piece.name]:
                        put_shared(live, piece.region, values, region)


def _own(piece: StateTensor) -> Tensor:
    with piece.open() as live:
        return live[piece.own].detach().float().cpu().clone()


def _batches(sizes: dict[str, int]) -> Iterator[list[str]]:
    """The names in an order that is the same on all ranks, some at a time."""
    batch: list[str] = []
    count = 0
    for name in sorted(sizes):
        if batch and count + sizes[name] > _AT_ONCE:
            yield batch
            batch, count = [], 0
        batch.append(name)
        count += sizes[name]
    if batch:
        yield batch
