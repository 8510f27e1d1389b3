"""The two meetings of a round, on all ranks of a site: who is there, and what all of them have got."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llmtrain.base import log, units
from llmtrain.engine.dist.control import StopAsked, from_all, from_rank_0
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.sites.membership import Heard, Member, Members, MembersError, PeerStatus, SitesError, name_of, peer_status

AGAIN_S = 0.5
"""Between two looks for sites that the run's start waits for."""
_ASK_S, _JOINS_S = 0.1, 10.0
"""Shortest time limit of a request to the coordinator: of any, and of a site that joins and waits without limit."""
_LONGEST_S = 30.0
_SAID_S = 1.0
"""Seconds of waiting before a site logs that it waits: a peer that comes sooner is not mentioned."""
_HEARD_S = 2.0
"""After it a coordinator that was away has heard of every living site, and a meeting waits for them again."""


class RoundFailed(Exception):
    """The sites have not synchronised; all ranks of this site know it with the same words."""


class MeetAgain(Exception):
    """Sites that had met are back at the meeting; all ranks of this site know it. This one goes there, too."""


class Meetings:
    """Meetings of a site with its peers at the coordinator. All ranks of the site call every method together.

    A site is alone only if the coordinator has heard of no other that is alive: sites that come at different times
    would else train side by side for ever, each sure that nobody is there.
    """

    def __init__(
        self,
        ranks: Ranks,
        members: Members | None,
        site: str,
        run: str,
        common: Mapping[str, Any],
        longest_s: float = _LONGEST_S,
    ) -> None:
        """
        Args:
            members: on rank 0.
            site: this one's id.
            run: checksum of `common`.
            longest_s: of one question to the coordinator: ranks that do not ask wait for it in a collective.
        """
        self._longest_s = min(longest_s, _LONGEST_S)
        self._ranks, self._members, self._site, self._run, self._common = ranks, members, site, run, common
        self.before: list[str] = []
        """Names of those that took part in the last round."""
        self.missed = False
        """A round has failed since."""
        self.stop_asked: Callable[[], bool] = lambda: False
        """True if this rank was asked to stop while the site waits to join."""
        self._waits_for: list[str] = []

    def meet(
        self, said: Mapping[str, Any], deadline_s: float, least: int, *, joins: bool = False, patience_s: float = 0.0
    ) -> list[PeerStatus]:
        """What all sites of this run say that want to synchronise, this one included. Raises RoundFailed, StopAsked.

        Args:
            deadline_s: time.monotonic() until which they are waited for.
            least: sites that must be there.
            joins: this site trains nothing yet. It waits for all others that are alive, as long as one is: the next
                meeting of theirs may be a whole round away.
            patience_s: the same for one whose last synchronisation has failed. Of two sites whose rounds fall at
                different times one must wait for as long as the other trains, or they never meet.
        """
        said = {"phase": "meet", "run": self._run, "common": self._common, "together": len(self.before), **said}
        began_s, self._waits_for = time.monotonic(), []
        while True:
            if joins and any(from_all(self._ranks, self.stop_asked())):
                raise StopAsked
            longest_s = max(deadline_s, time.monotonic() + _JOINS_S) if joins else deadline_s
            asks_s = longest_s + (patience_s if self.missed else 0.0)
            members, heard, late = self._ask(said, asks_s, always=joins)
            told = [each for each in map(peer_status, members) if each is not None]
            for each in told:
                if each.run != self._run:
                    self._refuse(each, late=said["round"] > 0)
            told = [each for each in told if each.run == self._run]
            busy = [each.site for each in members if self._in_commit(each)]
            absent = busy if len(told) > 1 and not joins else busy + heard
            unheard = all(each.id != self._site for each in told)  # somebody has spoken under this site's id
            waits = not late and (unheard or len(told) < least or bool(absent and (joins or len(told) == 1)))
            if not (late or waits):
                if not self.missed or len(told) >= len(self.before):
                    return told
                self.missed = False
                time.sleep(_HEARD_S)
                continue
            until_s = math.inf if joins and absent else deadline_s + (patience_s if self.missed and heard else 0.0)
            if from_rank_0(self._ranks, lambda until_s=until_s: time.monotonic() > until_s):  # type: ignore[misc]
                raise RoundFailed(self._nobody(told, least, sorted({*absent}), late))
            self._say_waiting(sorted({*absent}), joins, began_s)
            if not (late or busy):
                time.sleep(AGAIN_S)

    def commit(
        self, round_: int, told: Collection[str], have: list[str] | None, deadline_s: float
    ) -> tuple[list[str], list[str]]:
        """(sites that make this outer step, sites whose parameters all of them have).

        No more than half of those that have met make it only if the others are gone: a site that was slow would make
        another step, out of the same votes.

        Args:
            told: ids of the sites that have met.
            have: those whose parameters this site has; None if it cannot make the step.

        Raises:
            RoundFailed: they have not said in time what they have got.
            MeetAgain: they have given this round up.
        """
        said = {"phase": "commit", "run": self._run, "round": round_, "have": have}
        while True:
            members, heard, late = self._ask(said, deadline_s, expected=told)
            if late:
                if from_rank_0(self._ranks, lambda: time.monotonic() > deadline_s):
                    raise RoundFailed(late)
                continue
            votes: dict[str, set[str]] = {}
            for member in members:
                theirs = member.said
                same = (theirs.get("phase"), theirs.get("run"), theirs.get("round")) == ("commit", self._run, round_)
                if same and member.id in told and isinstance(theirs.get("have"), list):
                    votes[member.id] = set(map(str, theirs["have"]))
            spoken = {member.id for member in members if self._in_commit(member, round_)}
            back = {each.id for each in members} & {*told} - spoken
            missing = {name_of(each) for each in {*told} - spoken - back} & {*heard}
            if 2 * len(spoken & {*told}) > len(told) or not (back or missing):
                return agreed(votes)
            if back:
                names = ", ".join(sorted(name_of(each) for each in back))
                raise MeetAgain(f"{names} met, and began to meet again before all had said what came there")
            if from_rank_0(self._ranks, lambda: time.monotonic() > deadline_s):
                raise RoundFailed(f"{', '.join(sorted(missing))} met, and did not say in time what came there")
            time.sleep(AGAIN_S)

    def past(self) -> list[Heard]:
        """Other sites that were in the last meeting of this run, and are gone."""

        def ask() -> list[Heard]:
            assert self._members is not None
            heard = self._members.heard()
            return [each for each in heard if each.run == self._run and not each.there and each.site != self._name]

        return from_rank_0(self._ranks, ask)

    def leave(self) -> None:
        """This site comes to no more meetings: the others do not wait for it."""
        if self._members is not None:
            self._members.close()

    def _in_commit(self, member: Member, round_: int | None = None) -> bool:
        """Return True if a peer of this run is between the two meetings of a round. `round_`: of this one; any site."""
        said = member.said
        here = said.get("phase") == "commit" and said.get("run") == self._run
        here = here and isinstance(said.get("round"), int) and isinstance(said.get("have"), list | None)
        return here and (member.id != self._site if round_ is None else said.get("round") == round_)

    def _say_waiting(self, absent: list[str], joins: bool, began_s: float) -> None:
        """Once, and whenever it is for others."""
        if absent and absent != self._waits_for and time.monotonic() > began_s + _SAID_S:
            self._waits_for = absent
            names = ", ".join(absent)
            log.warn(
                f"site {self._name} is alone: {names} {'is' if len(absent) == 1 else 'are'} there, and not at this "
                f"meeting yet; it {'joins when they come' if joins else 'waits'}"
            )

    def _nobody(self, told: list[PeerStatus], least: int, absent: list[str], late: str) -> str:
        """Return the reason why the sites have not met."""
        if absent:
            are = "is" if len(absent) == 1 else "are"
            return f"this site is alone: {', '.join(absent)} {are} there and {are} not at this meeting"
        if late:
            known = [each for each in self.before if each != self._name]
            return f"{late}; last time {', '.join(known)} took part" if known else late
        return f"{units.counted(len(told), 'site')} of {least} are there ({', '.join(sorted(t.site for t in told))})"

    @property
    def _name(self) -> str:
        return name_of(self._site)

    def _refuse(self, other: PeerStatus, *, late: bool) -> None:
        """Somebody trains something else at this coordinator: whoever was here first stays."""
        text = other.difference(self._common)
        if late:
            log.warn_once(text)
            return
        error = SitesError(text)
        error.everywhere = True
        raise error

    def _ask(
        self, said: Mapping[str, Any], deadline_s: float, *, always: bool = False, expected: Collection[str] = ()
    ) -> tuple[list[Member], list[str], str]:
        """(all participants, names of the others that are alive elsewhere, why nobody has come), on all ranks.

        A wait longer than a collective may last is several. Raises RoundFailed: the coordinator does not answer.

        Args:
            always: ask who is alive, even if others have come.
            expected: ask it, too, where one of these is not among the participants.
        """

        def ask() -> tuple[list[Member], list[str], str, bool]:
            assert self._members is not None
            members, wrong, late = [], "", False
            try:
                members = self._members.meet(said, min(max(deadline_s - time.monotonic(), _ASK_S), self._longest_s))
            except MembersError as error:
                wrong, late = str(error), error.late
            here = {each.id for each in members}
            if not (always or len(here) < 2 or not {*expected} <= here):
                return members, [], wrong, late
            there = {each.site for each in self._members.heard() if each.there and each.id not in here}
            return members, sorted(there - {self._name}), wrong, late

        members, heard, wrong, late = from_rank_0(self._ranks, ask)
        if wrong and not late:
            known = [each for each in self.before if each != self._name]
            raise RoundFailed(f"{wrong}; last time {', '.join(known)} took part" if known else wrong)
        return members, heard, wrong


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


def leader_of(
    told: Sequence[PeerStatus],
    own: str,
    *,
    joins: bool,
    known: Collection[str],
    trusted: Collection[str],
    impossible: Callable[[PeerStatus], str],
) -> tuple[PeerStatus | None, dict[str, str]]:
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


def _order(site: PeerStatus) -> tuple[int, str]:
    """The furthest first; of equals the same one at all sites."""
    return -site.round, site.id
