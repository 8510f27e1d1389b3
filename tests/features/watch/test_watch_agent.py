"""The watch of rank 0's host and what the others send it, in one process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.features.watch import agent
from llmtrain.features.watch.agent import Agent
from llmtrain.features.watch.facts import RankFacts
from llmtrain.features.watch.verdict import Verdict


@pytest.fixture
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agent]:
    """The watch of node-1. Its parameter: fault.stall_timeout_s."""
    (tmp_path / "watch").mkdir(mode=0o700)
    settings = {
        "folder": str(tmp_path / "watch"),
        "host": "node-1",
        "run_dir": str(tmp_path),
        "stall_s": getattr(request, "param", 300.0),
        "connects_s": 30.0,
    }
    agent = Agent({**settings, "launcher": os.getpid(), "local_size": 1})
    agent.job = {"is_root": True, "hosts": {}}
    yield agent
    agent.close()


@pytest.fixture
def other(root: Agent) -> Iterator[agent.Line]:
    """The connection of node-2."""
    hello = {"token": root.server.token, "host": "node-2", "port": 1}
    line = agent.call("127.0.0.1", root.server.port, hello, 5.0)
    while "node-2" not in root.server.lines:
        root.server.accept(time.monotonic())
    yield line
    line.close()


def report(state: str = "running", finished: bool = False) -> dict[str, Any]:
    facts = RankFacts(rank=1, host="node-2", state=state).to_json()
    rank = {**facts, "beats": 1, "active": False, "timed_steps": 0, "own_s": 0.0}
    return {"ranks": [rank], "oom_kills": 0, "finished": finished}


def test_a_host_that_finishes_while_stacks_are_gathered_is_not_lost(root, other):
    """A pause may pass: the job goes on, and the host's last word is said once."""
    other.send(report())
    time.sleep(0.1)
    root._take_reports(time.monotonic())
    assert [host.waited_for for host in root.judge.hosts] == [True]
    other.send(report("left", finished=True))
    other.close()
    root._facts(Verdict("pause", stalled_s=61.0))
    assert [host.waited_for for host in root.judge.hosts] == [False] and not root.server.lines
    began = time.monotonic()
    assert [root.judge.decide(began + seconds) for seconds in range(0, 60, 2)] == [None] * 30


def test_the_report_of_a_host_of_many_ranks_may_follow_its_first_line_at_once(root):
    """More bytes than a stranger may send: the connection ended for ever. The next report is taken."""
    hello = {"token": root.server.token, "host": "node-2", "port": 1}
    line = agent.call("127.0.0.1", root.server.port, hello, 5.0)
    line.send({**report(), "ranks": 16 * report()["ranks"]})
    received: list[dict[str, Any]] = []
    until = time.monotonic() + 10
    while not received and time.monotonic() < until:
        if root.server.lines:
            assert not root.server.lines["node-2"].closed
            line.send({**report(), "ranks": 16 * report()["ranks"]})
        line.flush()
        root.server.accept(time.monotonic())
        received = root.server.lines["node-2"].receive() if "node-2" in root.server.lines else []
    assert len(received[0]["ranks"]) == 16
    line.close()


def test_the_stacks_of_another_host_are_taken(root, other):
    other.send(report())
    stack = [["/x/loop.py", 7, "loop"]]
    other.send({"stacks": [{**report()["ranks"][0], "stack": stack}], "oom_kills": 0})
    facts = root._facts(Verdict("pause", stalled_s=61.0))
    assert [(rank.rank, rank.host, len(rank.stack)) for rank in facts.ranks] == [(1, "node-2", 1)]


def test_ranks_of_a_host_whose_watch_never_called_are_among_the_facts(root, other):
    """Else its absence reads as a fault of the network, or of the ranks that wait for it."""
    root.job = {"is_root": True, "hosts": {"node-2": [1], "node-3": [2]}}
    other.send(report())
    time.sleep(0.1)
    root._take_reports(time.monotonic())
    ranks = root._facts(Verdict("pause", stalled_s=61.0)).ranks
    assert [(r.rank, r.host, r.state) for r in ranks] == [(1, "node-2", "running"), (2, "node-3", "unknown")]


def test_a_watch_that_has_lost_its_folder_before_the_ranks_came_leaves(root, capfd):
    """Whom it never saw it cannot wait for: else it would stay as long as the launcher."""
    shutil.rmtree(root.folder)
    root.run()
    assert str(root.folder) in capfd.readouterr().err and root.folder.is_dir()


def ask(place: dict[str, Any]) -> bool:
    """True if the watch answers a host that has the token."""
    line = agent.call("127.0.0.1", place["port"], {"token": place["token"], "host": "node-2", "port": 1}, 5.0)
    until = time.monotonic() + 5
    while not (said := line.receive()) and time.monotonic() < until and not line.closed:
        time.sleep(0.05)
    line.close()
    return any(message.get("do") == "go on" for message in said)


def test_a_watch_survives_what_strangers_send_and_starts_again_after_a_kill(tmp_path):
    """Fifteen bytes ended it, and 12 s later a healthy run of long steps. 100 open files, idle connections, a kill."""
    (folder := tmp_path / "watch").mkdir(mode=0o700)
    settings = {
        "folder": str(folder),
        "host": "node-1",
        "run_dir": str(tmp_path),
        "stall_s": 300.0,
        "connects_s": 30.0,
        "launcher": os.getpid(),
        "local_size": 1,
    }
    (folder / "job.json").write_text('{"is_root": true, "hosts": {}}')
    words = [sys.executable, "-m", "llmtrain.features.watch.agent", json.dumps(settings)]
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))  # noqa: E731
    keeper = subprocess.Popen(words, stderr=subprocess.PIPE, preexec_fn=few)

    def place(other_than: int = 0) -> dict[str, Any]:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads((folder / "agent.json").read_text())
                if found["pid"] != other_than:
                    return found
            time.sleep(0.05)
        raise AssertionError("no watch")

    first = place()
    idle = []
    try:
        for said in (
            b'{"token":"\xc3\xa9"}\n',
            b'{"token":"\\ud800"}\n',
            b"[" * 200_000 + b"\n",
            b"5\nnull\n[]\n{}\n",
            b'{"token":1e999}\n',
            b"\xff\xfe\0\n",
            b"x" * 5000,
        ):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", first["port"])) as stranger:
                stranger.sendall(said)
        idle = [socket.create_connection(("127.0.0.1", first["port"])) for _ in range(150)]
        for pid in (first["pid"], keeper.pid):
            os.kill(pid, signal.SIGUSR1)  # a scheduler's request for a save, to all processes
        assert ask(first) and place() == first
        os.kill(first["pid"], signal.SIGKILL)
        second = place(other_than=first["pid"])
        assert (second["port"], second["token"]) == (first["port"], first["token"]) and ask(second)
    finally:
        keeper.kill()
        for pid in {first["pid"], place()["pid"]}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in idle:
            each.close()
    said = keeper.communicate()[1].decode()
    assert said == "warning: the watch of node-1 has ended with code -9 before its ranks, and starts again in 1 s\n"


def test_a_watch_that_crashes_for_ever_is_started_for_ever_while_its_port_answers(monkeypatch, capfd):
    """After six crashes in a week it ended, and an open, silent port of rank 0's host is a lost host to its peers."""
    launcher = subprocess.Popen(["sleep", "60"])
    starts, ports = os.pipe(), os.pipe()

    class Crashes:
        def __init__(self, settings: dict[str, Any], server: agent.Server, keeper: int) -> None:
            os.write(ports[1], server.port.to_bytes(2, "little"))

        def run(self) -> None:
            os.write(starts[1], b"x")
            os._exit(9)

    def watch_from_elsewhere() -> None:
        port = int.from_bytes(os.read(ports[0], 2), "little")
        while len(os.read(starts[0], 1)) and len(turned_away) < 9:
            line = agent.call("127.0.0.1", port, {}, 1.0)
            until = time.monotonic() + 5
            while not line.closed and time.monotonic() < until:
                line.receive()
                time.sleep(0.01)
            turned_away.append(line.closed and agent.answers("127.0.0.1", port))
        launcher.kill()
        launcher.wait()

    turned_away: list[bool] = []
    monkeypatch.setattr(agent, "Agent", Crashes)
    monkeypatch.setattr(agent, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(agent, "_LONGEST_PAUSE_S", 0.2)
    peer = threading.Thread(target=watch_from_elsewhere)
    peer.start()
    try:
        assert agent.kept({"launcher": launcher.pid, "host": "node-1"}) == 9
    finally:
        signal.signal(agent._HUSH, signal.SIG_DFL)
        launcher.kill()
    peer.join()
    assert turned_away == [True] * 9
    said = capfd.readouterr().err.splitlines()
    assert [line.partition("again in ")[2] for line in said] == ["0.05 s", "0.1 s", "0.2 s, as after each further end"]


def test_a_host_whose_watch_alone_has_ended_is_not_lost(root):
    """Rank 0 still serves the store there."""
    now = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as store:
        where = {"host": "node-9", "address": "127.0.0.1"}
        root.job = {"is_root": False, "root": where, "store": store.getsockname()[1], "hosts": {}}
        root.judge.expect("node-9", [RankFacts(rank=0, host="node-9", state="unknown")], now)
        root.judge.close("node-9", now)
        assert root.judge.decide(now + 13) == Verdict("silent_host")
        assert root._lost_the_watch_alone(now + 13) and root.judge.decide(now + 20) is None
    assert root.judge.decide(now + 26) == Verdict("silent_host") and not root._lost_the_watch_alone(now + 26)


def test_many_reports_do_not_make_many_looks(root, other, monkeypatch):
    """1,000 hosts report 1,000 times a second."""

    class Enough(Exception):
        pass

    looks, until = [], time.monotonic() + 1.0

    def observe(now: float) -> list[dict[str, Any]]:
        looks.append(now)
        if now > until:
            raise Enough
        return []

    def talk() -> None:
        while time.monotonic() < until:
            other.send(report())
            time.sleep(0.005)

    monkeypatch.setattr(root.ranks, "observe", observe)
    talker = threading.Thread(target=talk)
    talker.start()
    with pytest.raises(Enough):
        root.run()
    talker.join()
    assert 3 <= len(looks) <= 12 and root.judge.ranks()


class Simulated:
    """Node-1, whose watch waits without taking time, and node-2. Both do a step in each wait, while node-2 lives."""

    def __init__(self, root: Agent, other: agent.Line, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.steps, self.lives, self.ended_s = time.monotonic(), 0, True, 0.0
        self.plan: list[tuple[float, Callable[[], object]]] = []
        """What happens next in a wait, and when."""
        self.work_s = 0.0
        """Time that each round of the agent takes for itself."""
        self._other, self._said_s = other, 0.0
        monkeypatch.setattr(agent.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(agent, "wait", lambda lines, seconds, others=(): self.wait(seconds))
        monkeypatch.setattr(agent, "captured", lambda *_, **__: self.wait(1.0) or {"stacks": []})
        monkeypatch.setattr(root.ranks, "observe", self._observe)
        monkeypatch.setattr(root, "_end_everywhere", lambda lost: setattr(self, "ended_s", self.now))
        monkeypatch.setattr(root, "notes", agent._Notes("/nonexistent"))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.steps += self.lives
        if self.lives and self.now - self._said_s >= 1.0:
            self._said_s = self.now
            self._other.send({"ranks": [self._rank(1)], "oom_kills": 0, "finished": False})
        while self.plan and self.now >= self.plan[0][0]:
            self.plan.pop(0)[1]()

    def _observe(self, now: float) -> list[dict[str, Any]]:
        self.now += self.work_s
        return [self._rank(0)]

    def _rank(self, rank: int) -> dict[str, Any]:
        facts = RankFacts(rank=rank, host=f"node-{rank + 1}", phase="step", step=self.steps, inside=True)
        return {**facts.to_json(), "beats": self.steps, "active": False, "timed_steps": 0, "own_s": 0.0}

    def dies(self) -> None:
        self.lives = False


@pytest.fixture
def simulated(root: Agent, other: agent.Line) -> Iterator[Simulated]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Simulated(root, other, monkeypatch)


def give_up() -> None:
    raise TimeoutError


@pytest.mark.parametrize("root", [12.0, 40.0, 300.0], indirect=True)
def test_a_host_that_dies_is_lost_whatever_the_limit_of_a_stall(root, simulated, capfd):
    """With less than 50 the pause was told before the host was lost: asking it took 5 s, which passed for a machine
    that slept, and all silence was forgiven, for ever."""
    dies_s = simulated.now + 20
    simulated.plan = [(dies_s, simulated.dies), (dies_s + 200, give_up)]
    root.run()
    *pauses, fault = capfd.readouterr().err.splitlines()
    assert re.match(r"error: .*\bnode-2 \(rank 1\) .*\b1\d s\b", fault) and len(pauses) <= 1, (pauses, fault)
    assert 10 < simulated.ended_s - dies_s < 14


def test_the_watchs_own_work_is_no_sleep_and_a_sleep_is_held_against_nobody(root, simulated, capfd):
    """A full disk, the kernel log, a driver that does not answer; an hour of a machine that was suspended."""
    began_s = simulated.now
    simulated.plan = [
        (began_s + 20, lambda: setattr(simulated, "now", simulated.now + 3600)),
        (began_s + 3650, lambda: setattr(simulated, "work_s", 7.0)),
        (began_s + 3800, simulated.dies),
        (began_s + 4000, give_up),
    ]
    root.run()
    assert re.search(r"error: .*\bnode-2 \(rank 1\)", capfd.readouterr().err)
    assert 3810 < simulated.ended_s - began_s < 3830
