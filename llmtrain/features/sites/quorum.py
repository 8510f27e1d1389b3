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
"""Seconds that a site waits for a peer before it logs that it waits."""
_HEARD_S = 2.0
"""Seconds until a restarted coordinator has heard of every living site, and meetings wait for them again."""


class RoundFailed(Exception):
    """The sites did not synchronise. Raised on all ranks of this site with the same message."""


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
        """True if a round has failed since the last one with other sites."""
        self.stop_asked: Callable[[], bool] = lambda: False
        """True if this rank was asked to stop while the site waits to join."""
        self._waits_for: list[str] = []

    def meet(
        self, status: Mapping[str, Any], deadline_s: float, least: int, *, joins: bool = False, patience_s: float = 0.0
    ) -> list[PeerStatus]:
        """Return the status of all sites that come to synchronise, this one included. `status`: this site's own.
        `deadline_s`: time.monotonic(). `least`: sites that must be there. `joins`: this site trains nothing yet, and
        waits while any peer lives. `patience_s`: beyond the deadline after a failure, as one of two sites must wait
        while the other trains. Raises RoundFailed, StopAsked."""
        status = {"phase": "meet", "run": self._run, "common": self._common, "together": len(self.before), **status}
        began_s, self._waits_for = time.monotonic(), []
        while True:
            if joins and any(self._ranks.gather(self.stop_asked())):
                raise StopAsked
            longest_s = max(deadline_s, time.monotonic() + _JOINS_S) if joins else deadline_s
            asks_s = longest_s + (patience_s if self.missed else 0.0)
            members, heard, late = self._ask_coordinator(status, asks_s, always=joins)
            peers = [peer for peer in map(peer_status, members) if peer is not None]
            for peer in peers:
                if peer.run != self._run:
                    self._refuse_peer(peer, late=status["round"] > 0)
            peers = [peer for peer in peers if peer.run == self._run]
            twins = [peer for peer in peers if peer.site == self._name and peer.id != self._site]
            # A launch that was killed is heard of for some seconds.
            if twins and joins and self._ranks.first(lambda: time.monotonic() > began_s + 2 * SILENT_S):
                text = "a site of that name already trains. Give each site its own, or end the other launch"
                error = SitesError(f"sites.name {self._name}: {text}.")
                error.everywhere = True
                raise error
            peers = [peer for peer in peers if peer not in twins]
            late = late or (f"another launch of the site {self._name} is there" if twins and joins else "")
            busy = [member.site for member in members if self._in_commit(member)]
            absent = busy if len(peers) > 1 and not joins else busy + heard
            unheard = all(peer.id != self._site for peer in peers)  # a stranger has spoken under this site's id
            waits = not late and (unheard or len(peers) < least or bool(absent and (joins or len(peers) == 1)))
            if not (late or waits):
                if not self.missed or len(peers) >= len(self.before):
                    return peers
                self.missed = False
                time.sleep(_HEARD_S)
                continue
            until_s = math.inf if joins and absent else deadline_s + (patience_s if self.missed and heard else 0.0)
            if self._ranks.first(lambda until_s=until_s: time.monotonic() > until_s):  # type: ignore[misc]
                raise RoundFailed(self._why_alone(peers, least, sorted({*absent}), late))
            self._say_waiting(sorted({*absent}), joins, began_s)
            if not (late or busy):
                time.sleep(AGAIN_S)

    def commit(
        self, round_: int, met: Collection[str], have: list[str] | None, deadline_s: float
    ) -> tuple[list[str], list[str]]:
        """Return (sites that make this outer step, sites whose parameters all have). Half of the sites that have met,
        or fewer, make it only if the others are gone: else a slow site could make another step. `met`: ids that have
        met. `have`: ids whose parameters this one has; None: it cannot make the step. Raises RoundFailed: no votes
        until `deadline_s`; MeetAgain: the peers have given up this round."""
        message = {"phase": "commit", "run": self._run, "round": round_, "have": have}
        while True:
            members, heard, late = self._ask_coordinator(message, deadline_s, expected=met)
            if late:
                if self._ranks.first(lambda: time.monotonic() > deadline_s):
                    raise RoundFailed(late)
                continue
            votes: dict[str, set[str]] = {}
            for member in members:
                vote = member.message
                same = (vote.get("phase"), vote.get("run"), vote.get("round")) == ("commit", self._run, round_)
                if same and member.id in met and isinstance(vote.get("have"), list):
                    votes[member.id] = set(map(str, vote["have"]))
            spoken = {member.id for member in members if self._in_commit(member, round_)}
            back = {member.id for member in members} & {*met} - spoken
            missing = {name_of(id_) for id_ in {*met} - spoken - back} & {*heard}
            if 2 * len(spoken & {*met}) > len(met) or not (back or missing):
                return agreed(votes)
            if back:
                names = ", ".join(sorted(name_of(id_) for id_ in back))
                raise MeetAgain(f"{names} met, and began to meet again before all had reported what they received")
            if self._ranks.first(lambda: time.monotonic() > deadline_s):
                raise RoundFailed(f"{', '.join(sorted(missing))} met, and did not report in time what they received")
            time.sleep(AGAIN_S)

    def past(self) -> list[Heard]:
        """Return the other sites that were in the last meeting of this run, and are gone."""

        def ask() -> list[Heard]:
            assert self._members is not None
            heard = self._members.heard()
            return [site for site in heard if site.run == self._run and not site.there and site.site != self._name]

        return self._ranks.first(ask)

    def leave(self) -> None:
        if self._members is not None:
            self._members.close()

    def _in_commit(self, member: Member, round_: int | None = None) -> bool:
        """Check if a peer is between the two meetings of a round; `round_`: of this round, with this site."""
        message = member.message
        commits = message.get("phase") == "commit" and message.get("run") == self._run
        commits = commits and isinstance(message.get("round"), int) and isinstance(message.get("have"), list | None)
        return commits and (member.id != self._site if round_ is None else message.get("round") == round_)

    def _say_waiting(self, absent: list[str], joins: bool, began_s: float) -> None:
        """Warn once, and again when the absent sites change."""
        if absent and absent != self._waits_for and time.monotonic() > began_s + _SAID_S:
            self._waits_for = absent
            names = ", ".join(absent)
            log.warn(
                f"site {self._name} is alone: {names} {'is' if len(absent) == 1 else 'are'} there, but not at this "
                f"meeting yet; it {'joins when they come' if joins else 'waits'}"
            )

    def _why_alone(self, peers: list[PeerStatus], least: int, absent: list[str], late: str) -> str:
        if absent:
            are = "is" if len(absent) == 1 else "are"
            return f"this site is alone: {', '.join(absent)} {are} there, but {are} not at this meeting"
        if late:
            peers_before = [name for name in self.before if name != self._name]
            return f"{late}; last time {', '.join(peers_before)} took part" if peers_before else late
        return f"{units.counted(len(peers), 'site')} of {least} are there ({', '.join(sorted(t.site for t in peers))})"

    @property
    def _name(self) -> str:
        return name_of(self._site)

    def _refuse_peer(self, other: PeerStatus, *, late: bool) -> None:
        """Refuse a peer that trains something else; `late`: only warn, as this site was here first."""
        text = other.difference(self._common)
        if late:
            log.warn_once(text)
            return
        error = SitesError(text)
        error.everywhere = True
        raise error

    def _ask_coordinator(
        self, status: Mapping[str, Any], deadline_s: float, *, always: bool = False, expected: Collection[str] = ()
    ) -> tuple[list[Member], list[str], str]:
        """Return (participants, names of other living sites, reason if nobody came), on all ranks; a wait beyond a
        collective's limit is split. `always`: list living sites even if others have come. `expected`: list them if one
        of these ids is missing. Raises RoundFailed: the coordinator does not answer."""

        def ask() -> tuple[list[Member], list[str], str, bool]:
            assert self._members is not None
            members, wrong, late = [], "", False
            try:
                members = self._members.meet(status, min(max(deadline_s - time.monotonic(), _ASK_S), self._longest_s))
            except MembersError as error:
                wrong, late = str(error), error.late
            present = {member.id for member in members}
            if not (always or len(present) < 2 or not {*expected} <= present):
                return members, [], wrong, late
            living = {site.site for site in self._members.heard() if site.there and site.id not in present}
            return members, sorted(living if always else living - {self._name}), wrong, late

        members, heard, wrong, late = self._ranks.first(ask)
        if wrong and not late:
            peers_before = [name for name in self.before if name != self._name]
            raise RoundFailed(f"{wrong}; last time {', '.join(peers_before)} took part" if peers_before else wrong)
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
    peers: Sequence[PeerStatus],
    own_id: str,
    *,
    joins: bool,
    known: Collection[str],
    trusted: Collection[str],
    impossible: Callable[[PeerStatus], str],
) -> tuple[PeerStatus | None, dict[str, str]]:
    """Choose the site whose state counts in this round.

    A training site keeps its own state, unless more than half of the other training sites in `known`, or one in
    `trusted`, report a state that is ahead. A site that joins takes the furthest state that more than half of the
    training sites, or one in `trusted`, report; if no site trains yet, it takes the state that is furthest.

    Args:
        impossible: returns why a peer cannot be where it says; empty: it can.

    Returns:
        the site (None: no state has enough reports), and by id the reason why a peer's state does not count.
    """
    itself = next(peer for peer in peers if peer.id == own_id)
    refused = {peer.id: why for peer in peers if peer is not itself and (why := impossible(peer))}
    others = [peer for peer in peers if peer is not itself and peer.id not in refused]
    running = [peer for peer in others if peer.joined]
    voters = running if joins else [peer for peer in running if peer.site in known]
    candidates = [*others, itself] if not (joins and running) else running
    leader = itself if not joins else None
    alike = Counter(peer.state for peer in (*others, itself))

    def order(site: PeerStatus) -> tuple[int, int, str]:  # the furthest first; the same order on all sites
        return -site.round, -alike[site.state], site.id

    for candidate in sorted(candidates, key=order):
        votes = sum(voter.state == candidate.state for voter in voters)
        starting = joins and not running
        trusts = candidate.site in trusted and candidate.joined
        if starting or candidate is itself or 2 * votes > len(voters) or trusts:
            leader = candidate
            break
    if leader is None:
        return None, refused
    for peer in running:
        if peer.state != leader.state and order(peer) < order(leader):
            refused[peer.id] = (
                f"it reports round {peer.round}, this one at {itself.round}; more than half of the others "
                "do not report the same (sites.trust names those that need no others)"
            )
    return leader, refused
