"""The outer step: from the sites' parameters to the next common ones, and updates that are too large to count."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from llmtrain.optim.outer_methods import SitesConfig

Array = npt.NDArray[np.float32]
_CHUNK = 1 << 18
"""Elements updated at a time: the fp64 temporaries stay in the cache."""


def outer_step(
    method: SitesConfig, common: Array, momentum: Array, found: Mapping[str, Array], weights: Mapping[str, float]
) -> tuple[Array, Array]:
    """Return (common, momentum) after the outer update, as new arrays, bit-equal on every site: numpy rounds after each
    operation on every processor, and sums run in the order of the names. `method`: makes the step from the mean by
    `weights` (tokens). `momentum`: unchanged without one. `found`: site -> its parameters; if empty, nothing changes.
    All arrays: fp32 [n]."""
    common, momentum = common.copy(), momentum.copy()
    total = sum(weights[site] for site in sorted(found))
    if not total:
        return common, momentum
    for low in range(0, len(common), _CHUNK):
        part = slice(low, low + _CHUNK)
        mean = np.zeros(len(common[part]))
        for site in sorted(found):
            mean += found[site][part].astype(np.float64) * (weights[site] / total)
        method.step(common[part], momentum[part], mean)
    return common, momentum


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
    """Return site -> reason for each update that is too large to count: against the lower median of the changes per
    step, or against this site's own if that is larger. Of two sites each trusts itself, of more a single one cannot
    make others look too large. `squares`: site -> squared L2 norm of its change over its ranks. `steps`: optimizer
    steps in it. `own`: may be missing in `squares`."""
    changes = {site: math.sqrt(square) / max(steps[site], 1.0) for site, square in squares.items()}
    if not changes:
        return {}
    usual = max(sorted(changes.values())[(len(changes) - 1) // 2], changes.get(own, 0.0))
    return {
        site: f"its update is {change / usual:.3g} times what the others change in a step; the limit is {LARGEST:g}"
        for site, change in changes.items()
        if usual and change > LARGEST * usual
    }
