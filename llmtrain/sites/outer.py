"""The outer optimisation over the part of the model that a rank owns: what all sites hold alike, and its update.

Local SGD: S. Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767. DiLoCo: A. Douillard et al.,
arXiv 2311.08105, algorithm 1: the difference between the common parameters and the mean of the sites' is a gradient for
Nesterov's momentum, in the form of torch.optim.SGD.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from llmtrain.engine.api import Engine, StateTensor
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.optim.optimizers import PARAM
from llmtrain.sites.compress import BLOCK
from llmtrain.sites.fragments import fragment_of
from llmtrain.sites.replicas import Replicas
from llmtrain.storage.checksum import checksum_part_array
from llmtrain.storage.region import Region

Array = npt.NDArray[np.float32]
Mean = Literal["weighted", "median", "trimmed"]
ROBUST = 3
"""Sites without which neither a median nor a trimmed mean tells one that is wrong from the others."""
_CHUNK = 1 << 18
"""Elements updated at a time: the fp64 temporaries stay in the cache."""


class Shard:
    """The parameters that a rank owns, one after another in a flat fp32 array."""

    def __init__(self, engine: Engine, frozen: Collection[str], fragments: int = 1, ranks: Ranks | None = None) -> None:
        """
        Args:
            engine: its parameters.
            frozen: names of parameters that do not train: they are the same everywhere, and never sent.
            fragments: how many parts of the model synchronise one by one; each begins with a block of its own.
            ranks: of the site, which call it together; None: this rank alone has all that it holds.
        """
        self._engine = engine
        pieces = [piece for piece in engine.state() if piece.kind == PARAM and piece.name not in frozen]
        self._pieces: list[tuple[int, int, StateTensor]] = []
        """(first element that it owns in the array, first one in an array of all that it holds, piece)."""
        self.parts: list[slice] = []
        """Of the array, by fragment."""
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
                self.size += BLOCK  # of zeros: parts are told apart by their places, those of nothing too
            self.parts.append(slice(begin, self.size))
            if number + 1 < fragments:
                self.size = -(-self.size // BLOCK) * BLOCK
        self._fragment = fragment
        held = [(at, piece.name, piece.region) for _, at, piece in self._pieces]
        self._replicas = Replicas(ranks, self.regions(), held) if ranks is not None and ranks.world_size > 1 else None
        assert self._replicas or all(piece.own_region.numel == piece.region.numel for piece in pieces), "replicas"

    def regions(self, part: slice | None = None) -> list[tuple[int, str, Region]]:
        """(first element in the array, Hugging Face name, elements of the tensor) of what this rank owns of each piece,
        or of a part's."""
        return [(at, p.name, p.own_region) for at, _, p in self._of(part) if p.own_region.numel]

    def read(self, part: slice | None = None) -> Array:
        """The live values, [size]; of a part alone, with zeros elsewhere."""
        values = np.zeros(self.size, np.float32)
        for at, _, piece in self._of(part):
            if count := piece.own_region.numel:
                with piece.open() as live:
                    values[at : at + count] = live[piece.own].detach().float().cpu().numpy()
        return values

    @torch.no_grad()
    def write(self, values: Array, part: slice | None = None) -> None:
        """Make `values` the live ones: [size], or those of a part; on all ranks of the site that hold them, which call
        it together."""
        held = self._shared(values, part)
        for _, at, piece in self._of(part):
            with piece.open() as live:
                live.copy_(torch.from_numpy(held[at : at + live.numel()]))
        self._engine.refresh()

    def _shared(self, values: Array, part: slice | None) -> Array:
        """All elements that this rank holds, [held]; of a part alone, with anything elsewhere."""
        own = np.zeros(self.size, np.float32)
        own[part or slice(None)] = values
        held = np.zeros(self._held, np.float32)
        for at, to, piece in self._of(part):
            count = piece.own_region.numel
            held[to + piece.own.start : to + piece.own.start + count] = own[at : at + count]
        if self._replicas is not None:
            self._replicas.share(own, held)
        return held

    def _of(self, part: slice | None) -> list[tuple[int, int, StateTensor]]:
        if part is None:
            return self._pieces
        number = self.parts.index(part)
        return [each for each in self._pieces if self._fragment[each[2].name] == number]

    def checksum(self, values: Array) -> int:
        """Of `values` [size]; the sum over a site's ranks does not depend on how they share the model."""
        sums = (checksum_part_array(values[at : at + r.numel], r) for at, _, r in self.regions())
        return sum(sums) % 2**64


def shapes(engine: Engine) -> dict[str, str]:
    """What sites of a run have in common of their models, by a name for people."""
    text = json.dumps({name: list(shape) for name, shape in engine.shapes().items()}, sort_keys=True)
    return {"shapes of the parameters": xxhash.xxh3_64_hexdigest(text.encode())}


def outer_step(
    anchor: Array,
    momentum: Array,
    found: Mapping[str, Array],
    weights: Mapping[str, float],
    *,
    lr: float,
    beta: float,
    mean: Mean = "weighted",
) -> tuple[Array, Array]:
    """The outer update: the same on every site to the last bit.

    With mean = sum of weight x values / sum of weights, or by `robust`:
        g = anchor - mean;  momentum <- beta momentum + g;  anchor <- anchor - lr (g + beta momentum)
    With lr 1 and beta 0 that is the mean, to the last bit.

    numpy's operators round after each operation, on every processor alike; sums run in the order of the names.

    Args:
        anchor: the parameters that all sites hold alike, fp32 [n].
        momentum: the outer momentum, fp32 [n]; without beta it stays as it is.
        found: site -> its parameters, fp32 [n]; with none, nothing changes.
        weights: of each of them.
        mean: of the sites; fewer than ROBUST have none but the weighted one.

    Returns: (anchor, momentum), new arrays: another site may still be reading the old ones.
    """
    anchor, momentum = anchor.copy(), momentum.copy()
    total = sum(weights[site] for site in sorted(found))
    if not total:
        return anchor, momentum
    for low in range(0, len(anchor), _CHUNK):
        part = slice(low, low + _CHUNK)
        values = [found[site][part].astype(np.float64) for site in sorted(found)]
        if mean == "weighted" or len(values) < ROBUST:
            middle = np.zeros(len(anchor[part]))
            for site, each in zip(sorted(found), values, strict=True):
                middle += each * (weights[site] / total)
        else:
            middle = robust(values, mean)
        if lr == 1 and not beta:  # the mean, whatever it was before
            anchor[part] = middle
            continue
        before = anchor[part].astype(np.float64)
        gradient = before - middle
        if beta:
            momentum[part] = beta * momentum[part].astype(np.float64) + gradient
            gradient += beta * momentum[part].astype(np.float64)
        anchor[part] = before - lr * gradient
    return anchor, momentum


def robust(values: list[npt.NDArray[np.float64]], mean: Mean) -> npt.NDArray[np.float64]:
    """Element by element, of ROBUST or more arrays [n]: the median, or the mean without the least and the largest.

    D. Yin et al., "Byzantine-Robust Distributed Learning", arXiv 1803.01498. Every site has the same voice.
    """
    ordered = np.sort(np.stack(values), axis=0)
    if mean == "median":
        return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
    return ordered[1:-1].sum(axis=0) / (len(values) - 2)


def squared_distance(before: Array | None, after: Array) -> float:
    """Squared L2 norm of the difference between two arrays [n], or of one, summed in fp64."""
    total = 0.0
    for low in range(0, len(after), _CHUNK):
        difference = after[low : low + _CHUNK].astype(np.float64)
        if before is not None:
            difference -= before[low : low + _CHUNK]
        total += float(difference @ difference)
    return total
