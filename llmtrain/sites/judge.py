"""Which sites' updates are too large to be training: a broken site, or a hostile one, must not move the model."""

from __future__ import annotations

import math
from collections.abc import Mapping

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
