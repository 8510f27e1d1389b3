"""Whose word counts: a broken site, or a hostile one, must not move the model by an update or by a state of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from llmtrain.sites.told import Told

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


def leader_of(
    told: Sequence[Told],
    own: str,
    *,
    joins: bool,
    known: Collection[str],
    trusted: Collection[str],
    impossible: Callable[[Told], str],
) -> tuple[Told | None, dict[str, str]]:
    """(the site whose state counts, why the states of others do not, by id). No site: there is no telling.

    A site that trains takes a state that is ahead of its own from more than half of those that it knows, or from one
    that it trusts. One that joins takes what more than half of those tell that train; where all only start, what is
    furthest, for their checkpoints may be of different times. Those behind take the state from the others.

    Args:
        own: this site's id.
        joins: it has not synchronised since its process began.
        known: names of the sites of its last synchronisation.
        trusted: names of `sites.trust`.
        impossible: why a site cannot be where it says, or nothing.
    """
    mine = next(each for each in told if each.id == own)
    refused = {each.id: why for each in told if each is not mine and (why := impossible(each))}
    others = [each for each in told if each is not mine and each.id not in refused]
    running = [each for each in others if each.joined]
    voters = running if joins else [each for each in running if each.site in known]
    candidates = [*others, mine] if not (joins and running) else running
    leader = mine if not joins else None
    for each in sorted(candidates, key=_order):
        votes = sum(voter.state == each.state for voter in voters)
        starting = joins and not running
        if starting or each is mine or 2 * votes > len(voters) or (each.site in trusted and each.joined):
            leader = each
            break
    if leader is None:
        return None, refused
    for each in running:
        if each.state != leader.state and _order(each) < _order(leader):
            refused[each.id] = (
                f"it tells of round {each.round}, and this site is at round {mine.round}; more than half of the others "
                "do not tell the same (sites.trust names those that need no others)"
            )
    return leader, refused


def _order(site: Told) -> tuple[int, str]:
    """The furthest first; of equals the same one at all sites."""
    return -site.round, site.id
