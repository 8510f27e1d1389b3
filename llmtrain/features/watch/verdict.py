"""Decides from the hosts' reports if a job continues. Pure logic: times are passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from llmtrain.features.watch.facts import HostFacts, RankFacts, is_secondary

SILENT_S = 10.0
"""Silence of a lost host, unless other ranks complete steps."""
_MORE_NEWS_S = 1.5
"""Time after a first dead rank for further reports."""
_STEPS_WITHOUT_S = 8.0
_OTHERS_LEAVE_S, _ALL_LEAVE_S = 30.0, 600.0
"""Time for all ranks to leave: after one left with a user's mistake or a signal to the job; after the end of the run,
while trackers are closed and libraries end."""


@dataclass
class Host:
    """State of a host by its reports. Times are seconds of the judge's clock."""

    name: str
    heard_s: float
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    closed: bool = False
    oom_kills: int = 0
    finished: bool = False
    """All its ranks and its agent have left."""

    @property
    def waited_for(self) -> bool:
        return not self.finished and any(r.state not in ("left", "dead") for r in self.ranks.values())


@dataclass(frozen=True)
class Verdict:
    """A decision to end the job, or to report its pause."""

    trigger: str
    """dead_rank | silent_host | stall | pause | leave: the last one is no fault, see `text`."""
    stalled_s: float = 0.0
    text: str = ""
    """Empty: the rank that left has reported it."""


class Judge:
    """Takes the reports of hosts (`hear`) and decides at intervals (`decide`). All times are from one monotonic
    clock."""

    def __init__(self, stall_s: float, now: float, silent_s: float = SILENT_S) -> None:
        self._stall_s, self._silent_s = stall_s, silent_s
        self._hosts: dict[str, Host] = {}
        self._beats: dict[int, int] = {}
        self._progress_s = self._step_s = now
        self._step = -1
        self._first_dead_s: float | None = None
        self._first_left_s: float | None = None
        self._leaving_s: float | None = None

    @property
    def hosts(self) -> list[Host]:
        return list(self._hosts.values())

    def hear(self, name: str, message: dict[str, Any], now: float) -> None:
        """Take a host's report: `ranks` as RankFacts.to_json with `beats` and `active`, `oom_kills`. Raises TypeError,
        KeyError, ValueError for anything else."""
        host = self._hosts.setdefault(name, Host(name, now))
        host.heard_s, host.closed = now, False
        host.oom_kills = int(message.get("oom_kills", 0))
        for raw in message["ranks"]:
            facts = RankFacts.from_json(raw)
            before = host.ranks.get(facts.rank)
            host.ranks[facts.rank] = facts
            if raw["beats"] != self._beats.get(facts.rank) or raw["active"]:
                self._progress_s = now
            self._beats[facts.rank] = raw["beats"]
            # running <-> disk is no progress: a waiting rank's page faults and stacks do that
            if before is None or {before.state, facts.state} not in ({facts.state}, {"running", "disk"}):
                self._progress_s = now
            if facts.step > self._step:
                self._step, self._step_s = facts.step, now
        if message.get("finished"):
            host.finished = True

    def expect(self, name: str, ranks: list[RankFacts], now: float) -> None:
        """Add a host that will only send signs of life."""
        self._hosts[name] = Host(name, now, {r.rank: r for r in ranks})

    def heard(self, name: str, now: float) -> None:
        self._hosts[name].heard_s, self._hosts[name].closed = now, False

    def close(self, name: str, now: float) -> None:
        """Record that the connection to a host's agent has ended without a message; `hear` takes that back."""
        host = self._hosts.get(name)
        if host is not None and not host.finished and not host.closed:
            host.closed, host.heard_s = True, now

    def woke(self, now: float) -> None:
        """Restart the limits of hosts and progress: this machine has slept."""
        self._progress_s = now
        for host in self._hosts.values():
            host.heard_s = now

    def decide(self, now: float) -> Verdict | None:
        """Return a verdict if the job is to be ended. Call it every few seconds, after all new reports."""
        ranks = self.ranks()
        live = [r for r in ranks if _lives(r)]
        leaving = bool(live) and all(r.code is not None for r in live)
        if not leaving:
            self._leaving_s = None
        elif self._leaving_s is None:
            self._leaving_s = now
        if leaving or (live and all(r.state == "stopped" for r in live)):
            self._progress_s = now  # all remaining ranks are leaving; or the user has suspended the job
        fault = None if self.ended else self._dead(ranks, live, now) or self._lost(now)
        if verdict := fault or self._left(ranks, live, now):
            return verdict
        if self._leaving_s is not None and now - self._leaving_s > _ALL_LEAVE_S:
            text = f"the ranks have announced their end, but are still there {now - self._leaving_s:.0f} s later"
            return Verdict("leave", text=text)
        stalled_s = self.stalled_s(now)
        return Verdict("stall", stalled_s=stalled_s) if stalled_s > self._stall_s else None

    @property
    def ended(self) -> bool:
        """True if rank 0 has ended the run, after all common work: nothing later is a fault."""
        return any(r.rank == 0 and r.code == 0 and r.state != "dead" for h in self.hosts for r in h.ranks.values())

    def waits(self, now: float) -> bool:
        """True if ranks are still expected to leave; after the end of the run a silent host's ranks are not."""
        reporting = [h for h in self.hosts if not self.ended or not (h.closed or now - h.heard_s > self._silent_s)]
        return any(host.waited_for for host in reporting)

    def stalled_s(self, now: float) -> float:
        """Seconds since any rank made progress; 0 if none could."""
        some = any(_lives(rank) for host in self._hosts.values() for rank in host.ranks.values())
        return now - self._progress_s if some else 0.0

    def ranks(self) -> list[RankFacts]:
        return sorted((r for host in self._hosts.values() for r in host.ranks.values()), key=lambda r: r.rank)

    def host_facts(self, now: float) -> tuple[HostFacts, ...]:
        """Return facts of all hosts; silent are those that are lost, or nearly so."""
        return tuple(
            HostFacts(
                name=host.name,
                silent_s=now - host.heard_s if host.waited_for and now - host.heard_s > SILENT_S / 2 else 0.0,
                closed=host.closed and host.waited_for,
                oom_kills=host.oom_kills,
            )
            for host in self._hosts.values()
        )

    def _dead(self, ranks: list[RankFacts], live: list[RankFacts], now: float) -> Verdict | None:
        dead = [r for r in ranks if r.state == "dead"]
        if not dead:
            return None
        self._first_dead_s = now if self._first_dead_s is None else self._first_dead_s
        waited_s = now - self._first_dead_s
        wordless = all(not r.error and (not r.signal or is_secondary(r)) for r in dead)
        if wordless and (refused := [r for r in ranks if r.state == "left" and r.code]):
            # DeepSpeed's launcher ends a host's ranks when the first of them has left, and takes their exit status.
            first = refused[0]
            voiced = first.rank == min(r.rank for r in ranks if r.host == first.host)  # one message a host: cli.py
            return None if live else Verdict("leave", text="" if voiced or not first.refusal else _has_left(first))
        if all(is_secondary(r) for r in dead):
            if all(r.signal for r in dead) and not any(r.error for r in dead):
                # SIGTERM before training began: somebody stops the job. Its launcher signals the other ranks.
                text = "the job was ended by a signal before training began"
                return Verdict("leave", text=text) if waited_s > _MORE_NEWS_S else None
            lost = any(host.closed and host.waited_for for host in self._hosts.values())
            if waited_s <= (_MORE_NEWS_S if lost else SILENT_S + 1.0):
                return None  # they died because a peer had gone, whose report is on its way
        elif (live or wordless) and waited_s <= _MORE_NEWS_S:
            return None
        return Verdict("dead_rank")

    def _lost(self, now: float) -> Verdict | None:
        if now - self._step_s < _STEPS_WITHOUT_S:
            return None  # no step is done without every host: only an agent is silent
        lost = [h for h in self._hosts.values() if h.waited_for and now - h.heard_s > self._silent_s]
        return Verdict("silent_host") if lost else None

    def _left(self, ranks: list[RankFacts], live: list[RankFacts], now: float) -> Verdict | None:
        refused = [r for r in ranks if r.state == "left" and r.code]
        if not refused or not live:
            self._first_left_s = None
            return None
        self._first_left_s = now if self._first_left_s is None else self._first_left_s
        if now - self._first_left_s <= _OTHERS_LEAVE_S:
            return None
        return Verdict("leave", text=_has_left(refused[0]))


def _has_left(rank: RankFacts) -> str:
    why = f": {rank.refusal}" if rank.refusal else ""
    return f"rank {rank.rank} on {rank.host} has left with exit code {rank.code}{why}"


def _lives(rank: RankFacts) -> bool:
    return rank.state not in ("dead", "left", "unknown")


class Pauses:
    """Finds the begin and end of a pause long enough to be explained to the user."""

    SHARE, LEAST_S, MOST_S = 0.2, 5.0, 60.0

    def __init__(self, stall_s: float) -> None:
        self._after_s = min(max(self.SHARE * stall_s, self.LEAST_S), self.MOST_S)
        self._lasted_s = 0.0

    def feed(self, stalled_s: float) -> tuple[Literal["begins", "over", ""], float]:
        """Take the seconds since the last progress, and return them with a word.

        The word is "begins" once when they exceed the limit, "over" once when there is progress again (with the pause's
        length), else "".
        """
        before, self._lasted_s = self._lasted_s, stalled_s if stalled_s > self._after_s else 0.0
        if self._lasted_s:
            return ("" if before else "begins"), self._lasted_s
        return ("over" if before else ""), before


class Stragglers:
    """Finds ranks whose own time per step is above the others', over many steps."""

    WINDOW_STEPS, WINDOW_S, WINDOWS = 20, 10.0, 3
    MARGIN, MARGIN_S = 0.25, 0.02

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}
        self._began_s: float | None = None
        self._slow: deque[set[int]] = deque(maxlen=self.WINDOWS)
        self._named: set[int] = set()

    def feed(self, timed: dict[int, tuple[int, float]], now: float) -> dict[int, tuple[float, float]]:
        """Return the ranks newly slow in three windows in a row: (seconds a step, the others' median). `timed`: by
        rank, (steps timed, own seconds in them) since the launch."""
        if self._began_s is None or self._since.keys() != timed.keys():
            self._since, self._began_s = dict(timed), now
            return {}
        steps = min(timed[rank][0] - self._since[rank][0] for rank in timed) if timed else 0
        if steps < self.WINDOW_STEPS or now - self._began_s < self.WINDOW_S:
            return {}
        own_s = {r: (timed[r][1] - self._since[r][1]) / (timed[r][0] - self._since[r][0]) for r in timed}
        self._since, self._began_s = dict(timed), now
        slow = {}
        for rank, seconds in own_s.items():
            others = [s for r, s in own_s.items() if r != rank]
            if others and seconds - median(others) > max(self.MARGIN * median(others), self.MARGIN_S):
                slow[rank] = (seconds, median(others))
        self._slow.append(set(slow))
        steady = set.intersection(*self._slow) if len(self._slow) == self.WINDOWS else set()
        new = steady - self._named
        self._named = {rank for rank in self._named | new if any(rank in slow_ranks for slow_ranks in self._slow)}
        return {rank: slow[rank] for rank in sorted(new)}
