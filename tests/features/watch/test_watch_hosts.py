"""The watch over several hosts: DeepSpeed's launcher over pdsh and ssh, started by hand, and a fault on one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.launching import REPO, losses, rows, write_recipe
from tests.helpers.warm import WarmCommands
from tools.lab.lab import Lab, LabHost

SAID_S, GONE_S = 15.0, 10.0
"""The promise: explained after so long, everything gone so much later."""


def busy() -> float:
    """By how much the promise may be missed: this machine is three hosts at once, and may have other work."""
    return max(2.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


def ranks(host: LabHost) -> list[psutil.Process]:
    """The training processes of a host."""
    found = []
    for process in host.processes():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(REPO / "launch/train.py") in words[:3]:
                found.append(process)
    return found


class Job:
    """A run on all hosts of a lab, started on the first as a user does."""

    def __init__(self, lab: Lab, folder: Path, data: str, warm: WarmCommands, *overrides: str) -> None:
        self.lab, self.folder, self.run = lab, folder, folder / "run"
        recipe = write_recipe(folder, data)
        variables = ("OMP_NUM_THREADS=1", "DS_ACCELERATOR=cpu", "LLMTRAIN_SUPERVISED=1", "WANDB_MODE=disabled")
        (folder / ".deepspeed_env").write_text("".join(f"{each}\n" for each in variables))
        self.log = open(folder / "output", "w+")  # noqa: SIM115  # as long as the job
        first = lab.hosts[0]
        self.process = first.popen(
            [
                *("deepspeed", "--hostfile", str(lab.hostfile(1)), "--master_addr", first.address),
                *("--master_port", "29500", str(REPO / "launch/train.py"), "--config", str(recipe)),
                *("--train.max_steps", "100000", "--train.global_batch", "6", "--train.micro_batch", "1"),
                *("--schedule.name", "constant", *overrides),
            ],
            env=warm.on_hosts(),
            cwd=folder,
            stdout=self.log,
            stderr=self.log,
        )

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait_for_step(self, step: int, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while max(losses(self.run), default=-1) < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()[-3000:]
            time.sleep(0.1)

    def left(self) -> list[str]:
        """What of the job still runs anywhere."""
        found = []
        for host in self.lab.hosts:
            for process in host.processes():
                with contextlib.suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(f"{host.name}: {' '.join(process.cmdline())[:100]}")
        return found

    def fault(self, act: Callable[[], object]) -> tuple[dict[str, Any], float, float]:
        """Cause one; the event, the seconds until it was explained, and those until everything was gone after that."""
        act()
        began_s, said_s = time.monotonic(), None
        while time.monotonic() - began_s < 120:
            if said_s is None and "error: fault after step" in self.output():
                said_s = time.monotonic() - began_s
            if said_s is not None and not self.left():
                break
            time.sleep(0.1)
        gone_s = time.monotonic() - began_s - (said_s or 0.0)
        assert said_s is not None and not self.left(), (said_s, self.left(), self.output()[-3000:])
        event = [e for e in rows(self.run, "events.jsonl") if e["kind"] == "fault"][-1]
        print(f"{event['cause']}: explained after {said_s:.1f} s, all gone {gone_s:.1f} s later: {event['text']}")
        return event, said_s, gone_s


@pytest.fixture
def job(lab3: Lab, small_data: str, tmp_path: Path, warm: WarmCommands) -> Job:
    # Below 50 s a pause is told before a silent host is lost.
    job = Job(lab3, tmp_path, small_data, warm, "--fault.stall_timeout_s", "40")
    job.wait_for_step(6)
    time.sleep(4)  # a watch that has not called yet is not missed: it may be a firewall that keeps it away
    return job


def test_a_link_that_is_cut_names_the_host_and_leaves_nothing_on_either_side(job):
    event, said_s, gone_s = job.fault(job.lab.hosts[2].cut)
    assert (event["cause"], event["host"], event["ranks"]) == ("host_lost", "node-3", [2]), event["text"]
    assert said_s < SAID_S * busy() and gone_s < GONE_S * busy()
    assert job.process.wait(10) != 0


@pytest.mark.slow
def test_the_link_of_the_first_host_is_cut(job):
    """The root of the watch is there, where the launcher runs: it sees all the others go silent."""
    event, said_s, gone_s = job.fault(job.lab.hosts[0].cut)
    assert (event["cause"], event["host"]) in (("host_lost", ""), ("host_lost", "node-1")), event["text"]
    assert "most likely its own network" not in job.output()
    assert said_s < SAID_S * busy() and gone_s < GONE_S * busy()


@pytest.mark.slow
def test_two_minutes_of_sigstop_are_explained_and_survived(lab3, small_data, tmp_path, warm):
    """As a user has it: no time-out is set."""
    job = Job(lab3, tmp_path, small_data, warm)
    job.wait_for_step(6)
    (stopped,) = ranks(job.lab.hosts[1])
    os.kill(stopped.pid, signal.SIGSTOP)
    time.sleep(120)
    events = [e for e in rows(job.run, "events.jsonl") if e["kind"] in ("pause", "fault")]
    assert [(e["kind"], e["cause"], e["host"], e["ranks"]) for e in events] == [("pause", "stopped", "node-2", [1])]
    os.kill(stopped.pid, signal.SIGCONT)
    job.wait_for_step(max(losses(job.run)) + 5)
    os.kill(ranks(lab3.hosts[2])[0].pid, signal.SIGTERM)
    assert job.process.wait(120) == 0
    kinds = [e["kind"] for e in rows(job.run, "events.jsonl")]
    assert "fault" not in kinds and "pause_over" in kinds


@pytest.mark.slow
def test_a_slow_link_is_no_fault(lab3, small_data, tmp_path, warm):
    """50 ms and 5 Mbit/s to one host: slow, and nothing else."""
    lab3.hosts[1].shape(rate_mbit=5, delay_ms=25)
    job = Job(lab3, tmp_path, small_data, warm)
    job.wait_for_step(20, timeout_s=400)
    os.kill(ranks(lab3.hosts[2])[0].pid, signal.SIGTERM)
    assert job.process.wait(120) == 0
    kinds = [e["kind"] for e in rows(job.run, "events.jsonl")]
    assert "fault" not in kinds and "straggler" not in kinds and kinds[-1] == "stop"


@pytest.mark.slow
def test_a_host_that_is_lost_before_its_watch_has_called_is_named(lab3, small_data, tmp_path, warm):
    job = Job(lab3, tmp_path, small_data, warm, "--fault.stall_timeout_s", "20")
    third = lab3.hosts[2]
    while len(watch := [p for p in third.processes() if "llmtrain.features.watch.agent" in p.cmdline()]) < 2:
        time.sleep(0.01)
    watch[1].suspend()
    job.wait_for_step(1)
    third.cut()
    event, said_s, _ = job.fault(watch[1].resume)
    assert (event["cause"], event["host"], event["ranks"]) == ("host_unheard", "node-3", [2]), event["text"]
    assert said_s < 30 * busy() and job.process.wait(10) != 0
