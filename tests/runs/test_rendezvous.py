"""How the ranks of a launch meet: real processes, on two hosts by name, with what goes wrong at the start of a job."""

from __future__ import annotations

import base64
import errno
import json
import multiprocessing as mp
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.launching import free_port
from tests.helpers.ranks import PRELOAD

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*PRELOAD, "tests.runs.test_rendezvous"])


def _rank(pipe: Any, host: str, env: dict[str, str], settings: dict[str, Any], limit_s: float, faults: Any) -> None:
    os.environ.update(env)
    os.dup2(os.open(os.environ["LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    socket.gethostname = lambda: host  # type: ignore[assignment]
    import torch.distributed as dist

    from llmtrain.base.errors import UserError
    from llmtrain.engine.deepspeed.build import join_process_group
    from llmtrain.engine.ranks import rendezvous

    found = rendezvous.versions()
    rendezvous.versions = lambda: {**found, **faults.get("versions", {})}
    if "launched" in faults:
        rendezvous._launched_hosts = lambda: faults["launched"]
    began = time.monotonic()
    try:
        ranks = join_process_group(20.0, start_timeout_s=limit_s, settings=settings)
    except UserError as error:
        pipe.send(("error", str(error), time.monotonic() - began))
    else:
        import torch

        total = torch.ones(1)
        dist.all_reduce(total)
        assert ranks.store is not None
        ranks.store.add("total", ranks.rank)
        ranks.meet()
        facts = {
            "seats": [(seat.rank, seat.host, seat.local_rank) for seat in ranks.seats],
            "sum": float(total),
            "store": ranks.store.add("total", 0),
            "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
            "nccl": os.environ.get("NCCL_SOCKET_IFNAME"),
        }
        ranks.meet()  # rank 0 serves the store
        pipe.send(("met", facts, time.monotonic() - began))
    os._exit(0)


class Job:
    """Ranks that start as on several hosts; `world[i]` is the host of rank i."""

    def __init__(self, folder: Path, world: list[str]) -> None:
        self.world, self.port, self.log = world, free_port(), folder / "log"
        self.started: dict[int, tuple[Any, Any]] = {}

    def start(
        self,
        rank: int,
        settings: Mapping[str, Any] | None = None,
        limit_s: float = 20.0,
        faults: Mapping[str, Any] | None = None,
        **env: str,
    ) -> None:
        host = self.world[rank]
        local = [r for r, other in enumerate(self.world) if other == host]
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local.index(rank)),
            "LOCAL_SIZE": str(len(local)),
            "WORLD_SIZE": str(len(self.world)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "",
            "NCCL_SOCKET_IFNAME": "",
            "LOG": str(self.log),
            **env,
        }
        ours, theirs = _CONTEXT.Pipe()
        arguments = (
            theirs,
            host,
            variables,
            dict(settings or {"data": {"path": "corpus"}}),
            limit_s,
            dict(faults or {}),
        )
        process = _CONTEXT.Process(target=_rank, args=arguments)
        process.start()
        theirs.close()
        self.started[len(self.started)] = (process, ours)

    def answers(self, timeout_s: float = 40.0) -> list[tuple[str, Any, float]]:
        """("met", facts, seconds) or ("error", message, seconds) of each that was started."""
        found = []
        for process, pipe in self.started.values():
            assert pipe.poll(timeout_s), "a rank hangs"
            found.append(pipe.recv())
            process.join(10)
        return found

    def close(self) -> None:
        for process, _ in self.started.values():
            process.kill()


def interfaces() -> list[str]:
    """Of this machine, those with an address."""
    return [name for name, held in psutil.net_if_addrs().items() if any(a.family == socket.AF_INET for a in held)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make(*world: str) -> Job:
        made.append(Job(tmp_path, list(world)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_two_hosts_meet_over_the_interface_of_the_master_address(job):
    both = job("node-1", "node-2")
    both.start(0)
    both.start(1)
    for kind, facts, _ in both.answers():
        assert kind == "met", facts
        assert facts["seats"] == [(0, "node-1", 0), (1, "node-2", 0)]
        assert facts["sum"] == 2 and facts["store"] == 1
        assert facts["gloo"] == "lo" and facts["nccl"] == "=lo"  # the address is a loopback one
    assert re.search(r"2 hosts: lo\b", both.log.read_text())


def test_a_rank_that_does_not_come_is_named_with_its_host_within_the_limit(job):
    three = job("node-1", "node-2", "node-3")
    launched = {"launched": dict(enumerate(three.world))}
    three.start(0, limit_s=3, faults=launched)
    three.start(1, limit_s=3, faults=launched)
    for kind, message, seconds in three.answers():
        assert kind == "error" and "rank 2 (node-3) of 3" in message, message
        assert "fault.start_timeout_s" in message
        assert seconds < 8


def test_the_host_of_a_missing_rank_is_read_from_the_launcher_that_started_us():
    world = base64.urlsafe_b64encode(json.dumps({"node-1": [0, 1], "node-2": [0, 1]}).encode()).decode()
    ask = "from llmtrain.engine.ranks.rendezvous import _launched_hosts; print(_launched_hosts())"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])"
    done = subprocess.run(
        [sys.executable, "-c", launcher, f"--world_info={world}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "{0: 'node-1', 1: 'node-1', 2: 'node-2', 3: 'node-2'}"


def test_without_rank_0_the_others_say_what_they_looked_for(job):
    both = job("node-1", "node-2")
    both.start(1, limit_s=2)
    ((kind, message, seconds),) = both.answers()
    assert kind == "error" and f"127.0.0.1:{both.port}" in message and "rank 1 on node-2" in message
    assert os.strerror(errno.ECONNREFUSED) in message
    assert seconds < 6


def test_rank_0_that_dies_while_the_others_wait_ends_them(job):
    both = job("node-1", "node-2", "node-3")
    both.start(0)
    both.start(1)
    deadline = time.monotonic() + 20
    store_is_up = False
    while not store_is_up and time.monotonic() < deadline:
        with socket.socket() as probe:
            store_is_up = probe.connect_ex(("127.0.0.1", both.port)) == 0
    time.sleep(2.0)  # rank 1 waits for the verdict now
    both.started[0][0].kill()
    del both.started[0]
    ((kind, message, seconds),) = both.answers(15)
    assert kind == "error" and re.search("rank 1 on node-2 .*rank 0", message)
    assert seconds < 15


def test_a_port_in_use_is_told_with_its_user(job):
    alone = job("node-1", "node-2")
    with socket.socket() as taken:
        taken.bind(("", alone.port))
        taken.listen()
        alone.start(0)
        alone.start(1, limit_s=2)  # finds something at the port, but it is no rank 0
        (kind, message, _), (other, told, seconds) = alone.answers()
    assert kind == other == "error"
    assert f"MASTER_PORT is {alone.port}" in message and "--master_port" in message
    assert f"process {os.getpid()} ({psutil.Process().name()})" in message
    assert "rank 0" in told and seconds < 15


def test_two_launches_on_one_port_are_told_apart(job):
    first = job("node-1", "node-2", "node-3")
    first.start(0)
    first.start(1)
    time.sleep(1.0)
    first.start(1)  # as another launch's rank 1 would
    messages = [message for kind, message, _ in first.answers() if kind == "error"]
    assert len(messages) == 3 and all("rank 1" in message and "twice" in message for message in messages)


def test_a_rank_of_another_launch_at_the_same_port_does_not_disturb_the_ranks_that_meet(job):
    both = job("node-1", "node-2")
    both.start(0, LLMTRAIN_LAUNCH="a")
    time.sleep(1.0)
    both.start(1, LLMTRAIN_LAUNCH="b")  # its own rank 0 has found the port in use
    time.sleep(2.0)
    both.start(1, LLMTRAIN_LAUNCH="a")
    both.started.pop(1)[0].kill()
    assert [(kind, facts["sum"]) for kind, facts, _ in both.answers()] == [("met", 2.0)] * 2


def test_two_launches_by_hand_on_one_host_know_their_own_ranks(warm):
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    ask = "from llmtrain.engine.ranks.rendezvous import _launch; print('launch', _launch())"
    rank = "subprocess.Popen([sys.executable, '-c', sys.argv[2]])"
    launcher = f"import subprocess, sys; each = [{rank}, {rank}]; [one.wait() for one in each]"
    command = [warm.python, "-c", launcher, f"--world_info={world}", ask]
    started = [
        warm.popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "CROSS_SIZE": hosts})
        for hosts in ("1", "1", "2")
    ]
    first, second, several = ([w for w in each.communicate()[0].splitlines() if "launch" in w] for each in started)
    assert len(first) == len(second) == 2 and len({*first, *second}) == 2 and first[0] == first[1]
    assert set(several) == {"launch "}  # on several hosts there is nothing that only these ranks have


def test_other_versions_are_refused_by_name_on_all_ranks(job):
    both = job("node-1", "node-2")
    both.start(0)
    both.start(1, faults={"versions": {"torch": "2.0.1"}})
    for kind, message, _ in both.answers():
        assert kind == "error" and "torch" in message and "2.0.1 on node-2" in message, message
        assert " on node-1" in message and "deepspeed is" not in message


def test_another_configuration_is_refused_with_the_key(job):
    both = job("node-1", "node-2")
    both.start(0, settings={"data": {"path": "old"}, "optim": {"lr": 0.1}})
    both.start(1, settings={"data": {"path": "new"}, "optim": {"lr": 0.1}})
    for kind, message, _ in both.answers():
        assert kind == "error" and re.search("data.path .*old on node-1, new on node-2", message), message
        assert "optim.lr" not in message


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(job):
    both = job("node-1", "node-2")
    both.start(0, limit_s=2, GLOO_SOCKET_IFNAME="eth7")
    ((kind, message, _),) = both.answers()
    assert kind == "error" and re.search("GLOO_SOCKET_IFNAME .*'eth7'.*node-1", message)
    assert all(name in message for name in interfaces())


def test_a_users_interface_stays(job):
    here = interfaces()
    both = job("node-1", "node-2")
    for rank in range(2):
        both.start(rank, GLOO_SOCKET_IFNAME=here[-1], NCCL_SOCKET_IFNAME="^docker")
    for kind, facts, _ in both.answers():
        assert kind == "met", facts
        assert facts["gloo"] == here[-1] and facts["nccl"] == "^docker"


def test_a_master_name_that_nobody_knows_is_told_at_once(job):
    both = job("node-1", "node-2")
    both.start(1, MASTER_ADDR="no-such-host.invalid")
    ((kind, message, seconds),) = both.answers()
    assert kind == "error" and re.search("MASTER_ADDR .*no-such-host.invalid", message) and seconds < 20
