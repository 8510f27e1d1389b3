"""The outer optimisation over the part of the model that a rank owns: what all sites hold alike, and its update.

Local SGD: S. Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767. DiLoCo: A. Douillard et al.,
arXiv 2311.08105, algorithm 1: the difference between the common parameters and the mean of the sites' is a gradient for
Nesterov's momentum, in the form of torch.optim.SGD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Mean = Literal["weighted", "median", "trimmed"]
ROBUST = 3
"""Sites without which neither a median nor a trimmed mean tells one that is wrong from the others."""
_CHUNK = 1 << 18
"""Elements updated at a time: the fp64 temporaries stay in the cache."""


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


LARGEST = 100.0
"""Times the others' change of a step. A site of one step beside others of 500 is within it: a sum of changes that all
have one direction is 500 times one of them, of changes without any direction 22 times."""


def outsized(squares: Mapping[str, float], steps: Mapping[str, float], own: str) -> dict[str, str]:
    """Why a site's update does not count, by site; empty where all do.

    The measure is the change a step of the lower median of the sites, or this site's own where that is larger: of two
    sites each trusts itself, and of three or more one cannot make the others look large.

    Args:
        squares: squared L2 norm of what each site has changed since the last synchronisation, of all of its ranks.
        steps: of its training behind that.
        own: this site, which may be among them.
    """
    changes = {site: math.sqrt(square) / max(steps[site], 1.0) for site, square in squares.items()}
    if not changes:
        return {}
    usual = max(sorted(changes.values())[(len(changes) - 1) // 2], changes.get(own, 0.0))
    return {
        site: f"its update is {change / usual:.3g} times what the others change in a step; the limit is {LARGEST:g}"
        for site, change in changes.items()
        if usual and change > LARGEST * usual
    }
