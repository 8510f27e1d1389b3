"""The quorum of a round: the participating sites, the state that counts, and the parameters that all of them have."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llmtrain.base import log, units
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.engine.ranks.stop_requests import StopAsked
from llmtrain.features.sites.membership import (
    SILENT_S,
    Heard,
    Member,
    Members,
    MembersError,
    PeerStatus,
    SitesError,
    name_of,
    peer_status,
)

AGAIN_S = 0.5
"""Seconds between two attempts to meet."""
_ASK_S, _JOINS_S = 0.1, 10.0
"""Shortest limits of a request to the coordinator: in general, and for a site that joins and waits without limit."""
_LONGEST_S = 30.0
_SAID_S = 1.0
"""Seconds of waiting before a site logs it: an earlier peer is not mentioned."""
_HEARD_S = 2.0
"""Seconds until a restarted coordinator has heard of every living site, and meetings wait for them again."""


class RoundFailed(Exception):
    """The sites have not synchronised. Raised on all ranks of this site with the same message."""


class MeetAgain(Exception):
    """Peers have given up the round and meet again; so must this site. Raised on all of its ranks."""


class Meetings:
    """Meetings of a site with its peers at the coordinator; all its ranks call every method together. A site is alone
    only if the coordinator has heard of no other living one: else sites would train side by side for ever."""

    def __init__(
        self,
        ranks: Ranks,
        members: Members | None,
        site: str,
        run: str,
        common: Mapping[str, Any],
        longest_s: float = _LONGEST_S,
    ) -> None:
        """`members`: on rank 0, None on others. `run`: checksum of `common`, settings that all sites share.
        `longest_s`: limit of one request, for which the other ranks wait in a collective."""
        self._longest_s = min(longest_s, _LONGEST_S)
        self._ranks, self._members, self._site, self._run, self._common = ranks, members, site, run, common
        self.before: list[str] = []
        """Names of the sites in the last round."""
        self.known: list[str] = []
        """Names of the sites in the last round with other sites."""
        self.missed = False
        """A round has failed since."""
        self.stop_asked: Callable[[], bool] = lambda: False
        """True if this rank was asked to stop while the site waits to join."""
        self._waits_for: list[str] = []

    def meet(
        self, said: Mapping[str, Any], deadline_s: float, least: int, *, joins: bool = False, patience_s: float = 0.0
    ) -> list[PeerStatus]:
        """Return the status of all sites that come to synchronise, this one included. `said`: this site's status.
        `deadline_s`: time.monotonic(). `least`: sites that must be there. `joins`: this site trains nothing yet, and
        waits while any peer lives. `patience_s`: beyond the deadline after a failure, as one of two sites must wait
        while the other trains. Raises RoundFailed, StopAsked."""
        said = {"phase": "meet", "run": self._run, "common": self._common, "together": len(self.before), **said}
        began_s, self._waits_for = time.monotonic(), []
        while True:
            if joins and any(self._ranks.gather(self.stop_asked())):
                raise StopAsked
            longest_s = max(deadline_s, time.monotonic() + _JOINS_S) if joins else deadline_s
            asks_s = longest_s + (patience_s if self.missed else 0.0)
            members, heard, late = self._ask(said, asks_s, always=joins)
            told = [each for each in map(peer_status, members) if each is not None]
            for each in told:
                if each.run != self._run:
                    self._refuse(each, late=said["round"] > 0)
            told = [each for each in told if each.run == self._run]
            twins = [each for each in told if each.site == self._name and each.id != self._site]
            # A launch that was killed is heard of for some seconds.
            if twins and joins and self._ranks.first(lambda: time.monotonic() > began_s + 2 * SILENT_S):
                text = "a site of that name already trains. Give each site its own, or end the other launch"
                error = SitesError(f"sites.name {self._name}: {text}.")
                error.everywhere = True
                raise error
            told = [each for each in told if each not in twins]
            late = late or (f"another launch of the site {self._name} is there" if twins and joins else "")
            busy = [each.site for each in members if self._in_commit(each)]
            absent = busy if len(told) > 1 and not joins else busy + heard
            unheard = all(each.id != self._site for each in told)  # a stranger has spoken under this site's id
            waits = not late and (unheard or len(told) < least or bool(absent and (joins or len(told) == 1)))
            if not (late or waits):
                if not self.missed or len(told) >= len(self.before):
                    return told
                self.missed = False
                time.sleep(_HEARD_S)
                continue
            until_s = math.inf if joins and absent else deadline_s + (patience_s if self.missed and heard else 0.0)
            if self._ranks.first(lambda until_s=until_s: time.monotonic() > until_s):  # type: ignore[misc]
                raise RoundFailed(self._nobody(told, least, sorted({*absent}), late))
            self._say_waiting(sorted({*absent}), joins, began_s)
            if not (late or busy):
                time.sleep(AGAIN_S)

    def commit(
        self, round_: int, told: Collection[str], have: list[str] | None, deadline_s: float
    ) -> tuple[list[str], list[str]]:
        """Return (sites that make this outer step, sites whose parameters all have). At most half of the sites that
        have met make it only if the others are gone: a slow site would else make another step. `told`: ids that have
        met. `have`: ids whose parameters this one has; None: it cannot make the step. Raises RoundFailed: no votes
        until `deadline_s`; MeetAgain: the peers have given up this round."""
        said = {"phase": "commit", "run": self._run, "round": round_, "have": have}
        while True:
            members, heard, late = self._ask(said, deadline_s, expected=told)
            if late:
                if self._ranks.first(lambda: time.monotonic() > deadline_s):
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
            if self._ranks.first(lambda: time.monotonic() > deadline_s):
                raise RoundFailed(f"{', '.join(sorted(missing))} met, and did not say in time what came there")
            time.sleep(AGAIN_S)

    def past(self) -> list[Heard]:
        """Return the other sites that were in the last meeting of this run, and are gone."""

        def ask() -> list[Heard]:
            assert self._members is not None
            heard = self._members.heard()
            return [each for each in heard if each.run == self._run and not each.there and each.site != self._name]

        return self._ranks.first(ask)

    def leave(self) -> None:
        if self._members is not None:
            self._members.close()

    def _in_commit(self, member: Member, round_: int | None = None) -> bool:
        """Check if a peer is between the two meetings of a round; `round_`: of this round, with this site."""
        said = member.said
        here = said.get("phase") == "commit" and said.get("run") == self._run
        here = here and isinstance(said.get("round"), int) and isinstance(said.get("have"), list | None)
        return here and (member.id != self._site if round_ is None else said.get("round") == round_)

    def _say_waiting(self, absent: list[str], joins: bool, began_s: float) -> None:
        """Warn once, and again when the absent sites change."""
        if absent and absent != self._waits_for and time.monotonic() > began_s + _SAID_S:
            self._waits_for = absent
            names = ", ".join(absent)
            log.warn(
                f"site {self._name} is alone: {names} {'is' if len(absent) == 1 else 'are'} there, and not at this "
                f"meeting yet; it {'joins when they come' if joins else 'waits'}"
            )

    def _nobody(self, told: list[PeerStatus], least: int, absent: list[str], late: str) -> str:
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
        """Refuse a peer that trains something else; `late`: only warn, as this site was here first."""
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
        """Return (participants, names of other living sites, reason if nobody came), on all ranks; a wait beyond a
        collective's limit is split. `always`: list living sites even if others have come. `expected`: list them if one
        of these ids is missing. Raises RoundFailed: the coordinator does not answer."""

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
            return members, sorted(there if always else there - {self._name}), wrong, late

        members, heard, wrong, late = self._ranks.first(ask)
        if wrong and not late:
            known = [each for each in self.before if each != self._name]
            raise RoundFailed(f"{wrong}; last time {', '.join(known)} took part" if known else wrong)
        return members, heard, wrong


def agreed(votes: Mapping[str, set[str]]) -> tuple[list[str], list[str]]:
    """Return (sites that make an outer step, sites whose parameters all of them have), from each site's received ids.
    As many sites as possible both continue and count; more than half must continue, so that two parts never make two
    steps."""
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
    """Return (the site whose state counts or None, id -> reason why a state does not count). A training site accepts a
    state ahead of its own from more than half of the sites in `known`, or from one in `trusted`. A joining one accepts
    the report of more than half of the training sites; if all only start, the furthest one. `impossible`: returns why a
    reported position is impossible, or ""."""
    mine = next(each for each in told if each.id == own)
    refused = {each.id: why for each in told if each is not mine and (why := impossible(each))}
    others = [each for each in told if each is not mine and each.id not in refused]
    running = [each for each in others if each.joined]
    voters = running if joins else [each for each in running if each.site in known]
    candidates = [*others, mine] if not (joins and running) else running
    leader = mine if not joins else None
    alike = Counter(each.state for each in (*others, mine))

    def order(site: PeerStatus) -> tuple[int, int, str]:  # the furthest first; the same order on all sites
        return -site.round, -alike[site.state], site.id

    for each in sorted(candidates, key=order):
        votes = sum(voter.state == each.state for voter in voters)
        starting = joins and not running
        if starting or each is mine or 2 * votes > len(voters) or (each.site in trusted and each.joined):
            leader = each
            break
    if leader is None:
        return None, refused
    for each in running:
        if each.state != leader.state and order(each) < order(leader):
            refused[each.id] = (
                f"it reports round {each.round}, and this site is at round {mine.round}; more than half of the others "
                "do not report the same (sites.trust names those that need no others)"
            )
    return leader, refused
