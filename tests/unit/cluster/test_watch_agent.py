"""The watch of rank 0's host and what the others send it, in one process."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cluster.watch import agent
from llmtrain.cluster.watch.agent import Agent
from llmtrain.cluster.watch.explain.facts import RankFacts
from llmtrain.cluster.watch.verdict import Verdict


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Agent]:
    (tmp_path / "watch").mkdir(mode=0o700)
    settings = {
        "folder": str(tmp_path / "watch"),
        "host": "node-1",
        "run_dir": str(tmp_path),
        "notes": "llmtrain.tracking.fault_note",
        "stall_s": 300.0,
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
    root._take_in(time.monotonic())
    assert [host.waited_for for host in root.judge.hosts] == [True]
    other.send(report("left", finished=True))
    other.close()
    root._facts(Verdict("pause", stalled_s=61.0))
    assert [host.waited_for for host in root.judge.hosts] == [False] and not root.server.lines
    began = time.monotonic()
    assert [root.judge.decide(began + seconds) for seconds in range(0, 60, 2)] == [None] * 30


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
    root._take_in(time.monotonic())
    ranks = root._facts(Verdict("pause", stalled_s=61.0)).ranks
    assert [(r.rank, r.host, r.state) for r in ranks] == [(1, "node-2", "running"), (2, "node-3", "unknown")]


def test_a_watch_that_has_lost_its_folder_before_the_ranks_came_leaves(root, capfd):
    """Whom it never saw it cannot wait for: else it would stay as long as the launcher."""
    shutil.rmtree(root.folder)
    root.run()
    assert "not all of its ranks are watched" in capfd.readouterr().err and root.folder.is_dir()


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
