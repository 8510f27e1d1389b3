"""What is a fault, and what only takes long. Time is a number here."""

from __future__ import annotations

from typing import Any

import pytest

from llmtrain.features.watch.facts import RankFacts
from llmtrain.features.watch.verdict import Judge, Pauses, Stragglers


class Cluster:
    """Hosts that report once a second, each with one rank, into a judge."""

    def __init__(self, hosts: int = 3, stall_s: float = 30.0) -> None:
        self.now = 0.0
        self.judge = Judge(stall_s, self.now)
        self.ranks: list[dict[str, Any]] = [
            {**RankFacts(rank=n, host=f"node-{n + 1}", phase="forward").to_json(), "beats": 0, "active": False}
            for n in range(hosts)
        ]
        self.mute: set[int] = set()
        self.steps = True

    def second(self) -> Any:
        """One second; the verdict."""
        self.now += 1.0
        for number, rank in enumerate(self.ranks):
            if self.steps and rank["state"] == "running":
                rank["beats"] += 10
                rank["step"] += 1
            if number not in self.mute:
                finished = rank["state"] == "left"
                self.judge.hear(f"node-{number + 1}", {"ranks": [rank], "finished": finished}, self.now)
        return self.judge.decide(self.now)

    def until_verdict(self, seconds: int) -> tuple[Any, float]:
        began = self.now
        for _ in range(seconds):
            if (verdict := self.second()) is not None:
                return verdict, self.now - began
        return None, self.now - began


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    for _ in range(5):
        assert cluster.second() is None
    return cluster


def test_a_running_job_is_let_run(cluster):
    assert cluster.until_verdict(500)[0] is None


KILLED = {"state": "dead", "signal": "SIGKILL"}
ENDED = {"code": 0, "phase": "end"}  # and still there: they hang in a library's clean-up, say


@pytest.mark.parametrize(
    ("changes", "mute", "trigger", "after_s", "text"),
    [
        ({1: KILLED}, set(), "dead_rank", (0, 4), ""),
        ({0: {"state": "left", "code": 2}, 1: KILLED, 2: KILLED}, set(), "dead_rank", (0, 10), ""),
        ({}, {2}, "silent_host", (9, 12), ""),
        ({}, set(), "stall", (30, 32), ""),
        ({0: {"state": "left", "code": 0}}, set(), "stall", (30, 60), ""),
        ({1: {"state": "stopped"}}, set(), "stall", (30, 100), ""),
        ({0: ENDED, 1: ENDED, 2: ENDED}, set(), "leave", (595, 610), "still there 6"),
        ({0: {"phase": "export", "active": True}}, set(), None, (1000, 1000), ""),  # the others wait for it
    ],
)
def test_what_becomes_of_a_job_that_completes_no_step(cluster, changes, mute, trigger, after_s, text):
    cluster.mute, cluster.steps = mute, False
    for rank, change in changes.items():
        cluster.ranks[rank].update(change)
    verdict, passed_s = cluster.until_verdict(1000)
    assert (verdict and verdict.trigger) == trigger and after_s[0] <= passed_s <= after_s[1]
    assert text in (verdict.text if text else "")
    silent = [host.name for host in cluster.judge.host_facts(cluster.now) if host.silent_s > 0]
    assert silent == [f"node-{number + 1}" for number in mute]


def test_ranks_that_died_of_another_wait_for_the_news_of_that_one(cluster):
    """Host 3 is switched off: rank 0 sees a closed connection at once, the host's silence takes 10 s to be sure."""
    cluster.mute, cluster.steps = {2}, False
    cluster.ranks[0].update(state="dead", error="RuntimeError: Connection closed by peer")
    verdict, after_s = cluster.until_verdict(60)
    silent = [h.name for h in cluster.judge.host_facts(cluster.now) if h.silent_s > 0]
    assert verdict is not None and silent == ["node-3"] and after_s <= 13


def test_nothing_after_the_end_of_the_run_is_a_fault(cluster):
    """Rank 0 has said it: a rank that dies, a host that is switched off, minutes without a sign of the others."""
    for rank in cluster.ranks:
        rank.update(code=0, phase="end")
    cluster.steps = False
    assert cluster.until_verdict(100)[0] is None and cluster.judge.stalled_s(cluster.now) == 0
    cluster.ranks[1].update(state="dead", code=None, signal="SIGSEGV")
    cluster.mute = {2}
    cluster.ranks[0].update(state="left")
    assert cluster.until_verdict(100)[0] is None and not cluster.judge.waits(cluster.now)


def test_a_host_whose_watch_alone_has_died_is_no_fault(cluster):
    """The ranks go on doing steps, which they cannot without that host."""
    cluster.mute = {2}
    cluster.judge.close("node-3", cluster.now)
    assert cluster.until_verdict(300)[0] is None


def test_a_glimpse_of_a_system_call_is_no_progress(cluster):
    """On a busy machine a rank that waits is seen in one now and then: its stack is written, a page is read."""
    cluster.steps = False
    for second in range(27):
        cluster.ranks[1]["state"] = "disk" if second == 20 else "running"
        assert cluster.second() is None
    verdict, after_s = cluster.until_verdict(40)
    assert (verdict.trigger, after_s) == ("stall", 4)


@pytest.mark.parametrize(("stall_s", "after_s"), [(300.0, 60), (3600.0, 60), (30.0, 6), (10.0, 5)])
def test_a_pause_is_told_once_and_so_is_its_end(stall_s, after_s):
    cluster, pauses = Cluster(stall_s=stall_s), Pauses(stall_s)
    told = []

    def wait(seconds: int) -> None:
        for _ in range(seconds):
            verdict = cluster.second()
            change, lasted_s = pauses.feed(cluster.judge.stalled_s(cluster.now))
            told.extend([(change, lasted_s)] if change else [])
            assert verdict is None

    wait(100)
    assert told == []
    cluster.ranks[1]["state"], cluster.steps = "stopped", False
    wait(after_s)
    assert told == []
    wait(2)
    assert [change for change, _ in told] == ["begins"] and after_s < told[0][1] <= after_s + 1
    cluster.ranks[1]["state"], cluster.steps = "running", True
    wait(100)
    assert [change for change, _ in told] == ["begins", "over"] and told[1][1] >= told[0][1]


def test_a_suspended_job_is_no_fault(cluster):
    cluster.steps = False
    for rank in cluster.ranks:
        rank["state"] = "stopped"
    assert cluster.until_verdict(500)[0] is None
    for rank in cluster.ranks:
        rank["state"] = "running"
    assert cluster.second() is None  # before the first beat
    cluster.steps = True
    assert cluster.until_verdict(100)[0] is None


def test_a_machine_that_slept_holds_nothing_against_the_others(cluster):
    cluster.now += 3600
    cluster.judge.woke(cluster.now)
    assert cluster.judge.decide(cluster.now) is None
    assert cluster.until_verdict(100)[0] is None


def test_ranks_that_leave_one_after_another_are_no_fault(cluster):
    for number in (2, 1):
        cluster.ranks[number].update(state="left", code=0)
        assert cluster.until_verdict(100)[0] is None
    cluster.ranks[0].update(phase="export", active=True)
    cluster.steps, cluster.mute = False, {1, 2}
    assert cluster.until_verdict(300)[0] is None
    cluster.ranks[0].update(state="left", code=0)
    assert cluster.until_verdict(100)[0] is None


def test_a_mistake_of_the_users_on_one_host_ends_the_others_without_a_fault():
    cluster = Cluster(stall_s=300)
    cluster.second()
    cluster.ranks[1].update(state="left", code=2)
    cluster.steps = False
    verdict, after_s = cluster.until_verdict(100)
    assert verdict.trigger == "leave" and "rank 1 on node-2" in verdict.text and after_s >= 30


@pytest.mark.parametrize("signal", ["", "SIGTERM"])
@pytest.mark.parametrize(
    ("refuses", "text"), [(0, ""), (1, "rank 1 on node-1 has left with exit code 2: model.freeze")]
)
def test_ranks_that_the_launcher_ends_after_a_refusal_have_not_disappeared(signal, refuses, text):
    """It takes their exit status; on a loaded machine they had not met the same mistake yet. The first rank of a host
    says it itself."""
    cluster = Cluster(hosts=2)
    cluster.steps = False
    cluster.ranks[1]["host"] = "node-1"
    cluster.second()
    cluster.ranks[1 - refuses].update(state="dead", signal=signal, phase="model")  # seen in one look with the other
    assert cluster.second() is None
    cluster.ranks[refuses].update(state="left", code=2, refusal="model.freeze")
    verdict = cluster.second()
    assert (verdict.trigger, verdict.text) == ("leave", text)


def test_sigterm_before_training_is_no_fault():
    cluster = Cluster()
    cluster.steps = False
    cluster.second()
    for rank in cluster.ranks:
        rank.update(state="dead", signal="SIGTERM", phase="start")
    assert cluster.until_verdict(10)[0].trigger == "leave"


def test_a_report_that_is_none_is_refused(cluster):
    for broken in ({"ranks": [{"rank": 1}]}, {"ranks": 3}, {}, {"ranks": [{**cluster.ranks[0], "stack": [[1]]}]}):
        with pytest.raises((TypeError, KeyError, ValueError)):
            cluster.judge.hear("node-2", broken, cluster.now)


def slow(seconds: list[float], minutes: float = 3.0) -> list[int]:
    """Ranks that are named, when each needs so many seconds a step for itself."""
    stragglers, named = Stragglers(), []
    step_s = max(seconds)
    for tick in range(int(minutes * 60)):
        steps = int(tick / step_s)
        named += stragglers.feed({r: (steps, steps * own) for r, own in enumerate(seconds)}, float(tick))
    return named


def test_a_straggler_is_named_once():
    assert slow([0.1, 0.1, 0.15]) == [2]
    assert slow([0.2, 0.1]) == [0]


def test_no_straggler_where_the_ranks_are_alike():
    assert slow([0.1, 0.11, 0.105]) == []
    assert slow([0.005, 0.001]) == []  # milliseconds of a small step are nothing to look for
    assert slow([0.1]) == []


def test_a_rank_that_is_slow_now_and_then_is_no_straggler():
    stragglers, own, named = Stragglers(), 0.0, []
    for tick in range(600):
        own += 2.0 if (tick // 15) % 5 == 0 else 1.0
        named += stragglers.feed({0: (tick * 10, float(tick)), 1: (tick * 10, own)}, float(tick))
    assert named == []
