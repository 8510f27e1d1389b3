"""The outer optimizer: from the sites' parameters to the next common ones, and updates that are too large to count.

Local SGD: S. Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767. DiLoCo: A. Douillard et al.,
arXiv 2311.08105, algorithm 1: the difference between the common parameters and the mean of the sites' is a gradient for
Nesterov's momentum, in the form of torch.optim.SGD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
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
) -> tuple[Array, Array]:
    """Return the outer update, which is bit-equal on every site.

    With mean = sum of weight x values / sum of weights:
        g = anchor - mean;  momentum <- beta momentum + g;  anchor <- anchor - lr (g + beta momentum)
    With lr 1 and beta 0 that is the mean, to the last bit.

    numpy's operators round after each operation, on every processor alike; sums run in the order of the names.

    Args:
        anchor: the common parameters, fp32 [n].
        momentum: the outer momentum, fp32 [n]; unchanged if beta is 0.
        found: site -> its parameters, fp32 [n]; if empty, nothing changes.
        weights: site -> tokens behind its parameters.
        lr: outer learning rate.
        beta: outer momentum.

    Returns: (anchor, momentum), new arrays: another site may still be reading the old ones.
    """
    anchor, momentum = anchor.copy(), momentum.copy()
    total = sum(weights[site] for site in sorted(found))
    if not total:
        return anchor, momentum
    for low in range(0, len(anchor), _CHUNK):
        part = slice(low, low + _CHUNK)
        mean = np.zeros(len(anchor[part]))
        for site in sorted(found):
            mean += found[site][part].astype(np.float64) * (weights[site] / total)
        if lr == 1 and not beta:  # exactly the mean: before - (before - mean) would round
            anchor[part] = mean
            continue
        before = anchor[part].astype(np.float64)
        gradient = before - mean
        if beta:
            momentum[part] = beta * momentum[part].astype(np.float64) + gradient
            gradient += beta * momentum[part].astype(np.float64)
        anchor[part] = before - lr * gradient
    return anchor, momentum


def squared_distance(before: Array | None, after: Array) -> float:
    """Return the squared L2 norm of after - before, or of after, fp32 [n], summed in fp64."""
    total = 0.0
    for low in range(0, len(after), _CHUNK):
        difference = after[low : low + _CHUNK].astype(np.float64)
        if before is not None:
            difference -= before[low : low + _CHUNK]
        total += float(difference @ difference)
    return total


LARGEST = 100.0
"""Largest allowed ratio of a site's change per step to the others'. A site of 1 step beside sites of 500 stays below:
their summed change is 500 times one step's if all steps agree in direction, 22 times if they are independent."""


def outsized(squares: Mapping[str, float], steps: Mapping[str, float], own: str) -> dict[str, str]:
    """Return site -> reason for each update that is too large to count.

    The reference is the lower median of the sites' changes per step, or this site's own if that is larger: of two sites
    each trusts itself, and of three or more a single one cannot make the others look too large.

    Args:
        squares: site -> squared L2 norm of its change since the last synchronisation, summed over its ranks.
        steps: site -> optimizer steps behind that change.
        own: id of this site; it may be missing in `squares`.
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
