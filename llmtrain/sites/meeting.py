"""The two meetings of a round, on all ranks of a site: who is there, and what all of them have got."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llmtrain import log, units
from llmtrain.dist.control import from_rank_0
from llmtrain.dist.ranks import Ranks
from llmtrain.sites.members import Member, Members, MembersError, SitesError
from llmtrain.sites.told import Told, told_of

AGAIN_S = 0.5
"""Between two looks for sites that the run's start waits for."""
_HEARD_S = 2.0
"""After it a coordinator that was away has heard of every living site, and a meeting waits for them again."""


class RoundFailed(Exception):
    """The sites have not synchronised; all ranks of this site know it with the same words."""


class Meetings:
    """What a site says to the others and hears from them. All ranks of the site call every method together."""

    def __init__(self, ranks: Ranks, members: Members | None, site: str, run: str, common: Mapping[str, Any]) -> None:
        """`members`: on rank 0. `site`: this one's id. `run`: checksum of `common`."""
        self._ranks, self._members, self._site, self._run, self._common = ranks, members, site, run, common
        self.before: list[str] = []
        """Names of those that took part in the last round."""
        self.missed = False
        """A round has failed since."""

    def meet(self, said: Mapping[str, Any], deadline_s: float, least: int) -> list[Told]:
        """What all sites of this run say that want to synchronise, this one included. Raises RoundFailed."""
        said = {"phase": "meet", "run": self._run, "common": self._common, **said}
        while True:
            told = [each for each in map(told_of, self._ask(said, deadline_s)) if each is not None]
            for each in told:
                if each.run != self._run:
                    self._refuse(each, late=said["round"] > 0)
            told = [each for each in told if each.run == self._run]
            if len(told) >= least:
                if not self.missed or len(told) >= len(self.before):
                    return told
                self.missed = False
                time.sleep(_HEARD_S)
                continue
            if from_rank_0(self._ranks, lambda: time.monotonic() > deadline_s):
                names = ", ".join(sorted(each.site for each in told))
                raise RoundFailed(f"{units.counted(len(told), 'site')} of {least} are there ({names})")
            time.sleep(AGAIN_S)

    def commit(self, round_: int, have: list[str] | None, deadline_s: float) -> tuple[list[str], list[str]]:
        """(sites that make this outer step, sites whose parameters all of them have). Raises RoundFailed.

        `have`: those whose parameters this site has; None if it cannot make the step.
        """
        said = {"phase": "commit", "run": self._run, "round": round_, "have": have}
        votes: dict[str, set[str]] = {}
        for member in self._ask(said, deadline_s):
            theirs = member.said
            same = (theirs.get("phase"), theirs.get("run"), theirs.get("round")) == ("commit", self._run, round_)
            if same and isinstance(theirs.get("have"), list):
                votes[member.id] = set(map(str, theirs["have"]))
        return agreed(votes)

    def _refuse(self, other: Told, *, late: bool) -> None:
        """Somebody trains something else at this coordinator: whoever was here first stays."""
        text = other.difference(self._common)
        if late:
            log.warn_once(text)
            return
        error = SitesError(text)
        error.everywhere = True
        raise error

    def _ask(self, said: Mapping[str, Any], deadline_s: float) -> list[Member]:
        """All participants, on all ranks. Raises RoundFailed."""

        def ask() -> tuple[list[Member], str]:
            assert self._members is not None
            try:
                return self._members.meet(said, deadline_s - time.monotonic()), ""
            except MembersError as error:
                return [], str(error)

        members, wrong = from_rank_0(self._ranks, ask)
        if wrong:
            known = [each for each in self.before if each != self._site.partition(":")[0]]
            raise RoundFailed(f"{wrong}; last time {', '.join(known)} took part" if known else wrong)
        return members


def agreed(votes: Mapping[str, set[str]]) -> tuple[list[str], list[str]]:
    """(sites that make an outer step, sites whose parameters all of them have), from what each has got.

    Nobody is left out who does not stand in the way of the others: as many sites as can be both go on and count. One to
    which the others' parameters have not come, over a line that carries its votes alone, would else decide that nothing
    counts but its own. More than half must go on: those that are apart from each other make no step in two ways.
    """
    ordered = sorted(votes, key=lambda site: (len(votes[site]), site))
    most: tuple[list[str], list[str]] = ([], [])
    for left_out in range((len(votes) + 1) // 2):
        going = sorted(ordered[left_out:])
        used = sorted(set.intersection(*(votes[site] for site in going)))
        if not left_out or len({*used} & {*going}) > len({*most[0]} & {*most[1]}):
            most = going, used
    return most
