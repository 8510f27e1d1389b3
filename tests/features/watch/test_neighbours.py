"""Several jobs of one user on one host: neither the end of one nor what the host does to its files is felt by others.

The run that must go on is a real one with its watch. Those that end beside it go through `llmtrain launch`, mostly with
a script in the place of DeepSpeed's launcher: what a launch does at its end is the same, in a tenth of the time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.checkpoint.verify import verify
from tests.features.watch import stalls
from tests.features.watch.test_watch_runs import agents_of
from tests.helpers.forked import Launch
from tests.helpers.launching import REPO, environment, gone, losses, rows, write_recipe
from tests.helpers.warm import WarmCommands
from tests.unit.cluster.test_launch_attempts import JOB
from tests.unit.cluster.test_launch_killed import LAUNCH, RUNS

STALL_S = 4.0
ENDINGS = ("complete", "killed", "interrupted")


class Neighbour:
    """A `llmtrain launch` in a folder of its own, with a script in the place of DeepSpeed's launcher."""

    def __init__(self, folder: Path, data: str) -> None:
        folder.mkdir()
        self.folder = folder
        recipe = write_recipe(folder, data)
        (folder / "hosts").write_text("localhost slots=1\n")
        (folder / "run.yaml").symlink_to(recipe)
        (folder / "job.py").write_text(JOB + RUNS)
        env = environment(PYTHONPATH=str(REPO))
        with open(folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH], cwd=folder, stdout=output, stderr=output, env=env
            )

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait_until_met(self) -> None:
        deadline = time.monotonic() + 300
        while "rank 0 -> localhost" not in self.output():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output()[-3000:]
            time.sleep(0.05)

    def end(self, how: str) -> None:
        """As its user, or its host, ends it; returns when nothing of it is left."""
        self.wait_until_met()
        time.sleep(0.3)
        if how == "complete":
            (self.folder / "finish").write_text("")
        else:
            self.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
        self.process.wait(300)
        deadline = time.monotonic() + 120
        while [p for p in psutil.process_iter() if _cwd(p) == str(self.folder)]:
            assert time.monotonic() < deadline, self.output()[-3000:]
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _cwd(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.cwd() if process.status() != psutil.STATUS_ZOMBIE else ""
    return ""


def wait_for_more(job: Any, run: Path, steps: int, timeout_s: float = 120) -> None:
    """Until the run has done so many steps more."""
    deadline, target = time.monotonic() + timeout_s, max(losses(run), default=0) + steps
    while max(losses(run), default=0) < target:
        assert time.monotonic() < deadline and job.alive(), job.output()[-3000:]
        time.sleep(0.1)


def watch_folders(job: Any) -> list[Path]:
    """Where the ranks of a job beat."""
    found = {psutil.Process(rank.pid).environ().get("LLMTRAIN_WATCH") for rank in job.ranks}
    files = {
        Path(each.path).parent
        for rank in job.ranks
        for each in psutil.Process(rank.pid).open_files()
        if each.path.endswith(".stack")
    }
    return sorted(files | {Path(each) for each in found if each})


def beats_read_for(run: Path) -> int:
    """Ranks whose heartbeats the watches of a run have open."""
    return sum(each.path.endswith(".beat") for agent in agents_of(run) for each in agent.open_files())


@pytest.fixture
def job(small_data: str, tmp_path: Path) -> Iterator[Launch]:
    """Two ranks that train without an end, watched; a stall would be a fault after four seconds."""
    recipe = write_recipe(tmp_path, small_data)
    words = ("--train.max_steps", "1000000", "--schedule.name", "constant", "--fault.stall_timeout_s", str(STALL_S))
    job = Launch(recipe, *words, before=stalls.unhurried)
    wait_for_more(job, tmp_path / "run", 3)
    deadline = time.monotonic() + 60
    while beats_read_for(tmp_path / "run") < len(job.ranks):  # a busy machine starts the watch late
        assert time.monotonic() < deadline and job.alive(), job.output()[-3000:]
        time.sleep(0.1)
    yield job
    for rank in job.ranks:
        rank.kill()


def assert_stops_well(job: Launch, run: Path) -> None:
    """It is asked to stop, saves and leaves; nothing of it was a fault."""
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert job.wait(60) == [0, 0], job.output()[-3000:]
    assert gone(agents_of(run), 30)
    kinds = [event["kind"] for event in rows(run, "events.jsonl")]
    assert "fault" not in kinds and "pause" not in kinds and kinds[-1] == "stop", kinds


def test_a_launch_that_ends_leaves_the_users_other_runs_alone(job: Launch, small_data: str, tmp_path: Path) -> None:
    """One launch is complete, one is killed, one interrupted."""
    (folder,) = watch_folders(job)
    before = sorted(os.listdir(folder))
    neighbours = [Neighbour(tmp_path / how, small_data) for how in ENDINGS]
    try:
        for how, neighbour in zip(ENDINGS, neighbours, strict=True):
            neighbour.end(how)
            assert sorted(os.listdir(folder)) == before, how
    finally:
        for neighbour in neighbours:
            neighbour.kill()
    time.sleep(STALL_S + 1.0)
    wait_for_more(job, tmp_path / "run", 3)
    assert_stops_well(job, tmp_path / "run")


def test_a_run_whose_heartbeats_are_removed_goes_on_and_is_still_watched(job: Launch, tmp_path: Path) -> None:
    (folder,) = watch_folders(job)
    shutil.rmtree(folder)
    time.sleep(2 * STALL_S)
    wait_for_more(job, tmp_path / "run", 3)
    assert job.output().count("has removed the files in") == 1 and folder.is_dir()
    (folder / "rank-00000.new").write_text("")
    shutil.rmtree(folder)  # and again: it is said once
    wait_for_more(job, tmp_path / "run", 10)
    assert job.output().count("has removed the files in") == 1
    assert "fault" not in [event["kind"] for event in rows(tmp_path / "run", "events.jsonl")]
    os.kill(job.ranks[1].pid, signal.SIGSTOP)
    assert None not in job.wait(60) and gone(agents_of(tmp_path / "run"), 30)
    event = rows(tmp_path / "run", "events.jsonl")[-1]
    assert (event["kind"], event["cause"], event["ranks"]) == ("fault", "stopped", [1]), job.output()[-3000:]
    assert event["all_ranks"][0]["stack"], "its stack was not found"
    assert not folder.exists()


def test_nothing_after_the_end_of_a_run_is_a_fault(small_data: str, tmp_path: Path) -> None:
    """The ranks leave for longer than a stall may last, and one of them is killed meanwhile."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    words = ("--train.max_steps", "6", "--fault.stall_timeout_s", str(STALL_S))
    job = Launch(recipe, *words, before=stalls.leaves_slowly)
    deadline = time.monotonic() + 120
    while not [e for e in rows(run, "events.jsonl") if e["kind"] == "stop"]:
        assert time.monotonic() < deadline and job.alive(), job.output()[-3000:]
        time.sleep(0.05)
    time.sleep(1.0)
    os.kill(job.ranks[1].pid, signal.SIGKILL)
    assert job.wait(60) == [0, -signal.SIGKILL], job.output()[-3000:]
    assert gone(agents_of(run), 30)
    kinds = [event["kind"] for event in rows(run, "events.jsonl")]
    assert "stop" in kinds[-2:] and "fault" not in kinds and "pause" not in kinds, kinds
    assert "fault after step" not in job.output() and "no progress" not in job.output()


def test_a_question_of_the_watch_does_not_end_a_rank_that_leaves(small_data: str, tmp_path: Path) -> None:
    """SIGUSR2 again and again, to the last instruction of a process that has shut its Python down."""
    recipe = write_recipe(tmp_path, small_data)
    env = environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", LLMTRAIN_SUPERVISED="1")
    command = [sys.executable, str(REPO / "launch/train.py"), "--config", str(recipe), "--train.max_steps", "3"]
    log = tmp_path / "output"
    with open(log, "wb") as output:
        rank = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=output)
    deadline = time.monotonic() + 300
    while '"kind":"end"' not in log.read_text():
        assert time.monotonic() < deadline and rank.poll() is None, log.read_text()[-3000:]
        time.sleep(0.02)
    while rank.poll() is None and time.monotonic() < deadline:
        os.kill(rank.pid, signal.SIGUSR2)
        time.sleep(0.001)
    assert rank.wait(60) == 0, log.read_text()[-3000:]
    assert gone(agents_of(tmp_path / "run"), 30)


RESTS = """
import time
from dataclasses import dataclass

from llmtrain import Part


@dataclass(kw_only=True)
class Rests(Part, entry="rests"):
    seconds: float = 1.0

    def after_step(self, done):
        time.sleep(self.seconds)
"""
"""A run without an end is as busy as its test is long."""


def remove_as_systemd_does(process: psutil.Process) -> None:
    """What logind does at a user's last log-out, with RemoveIPC=yes: the user's files in /dev/shm and System V objects.

    In the namespaces of the process: the real ones hold what others need.
    """
    for each in sorted(Path(f"/proc/{process.pid}/root/dev/shm").rglob("*"), reverse=True):
        each.rmdir() if each.is_dir() else each.unlink()
    subprocess.run(["nsenter", "-t", str(process.pid), "--ipc", "ipcrm", "--all"], check=True)


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "--ipc", "true"], capture_output=True).returncode != 0,
    reason="no mount and IPC namespaces can be made here",
)
def test_a_log_out_with_remove_ipc_is_survived(small_data: str, tmp_path: Path, warm: WarmCommands) -> None:
    """The heartbeats, and the memory from which the checkpoints are written."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    env = environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    own_shm = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    (tmp_path / "rests.py").write_text(RESTS)
    words = (
        "--train.max_steps",
        "1000000",
        "--schedule.name",
        "constant",
        "--fault.stall_timeout_s",
        str(STALL_S),
        "--plugin",
        str(tmp_path / "rests.py"),
        "--parts.rests.seconds",
        "0.1",
    )
    train = (str(warm.hosts / "python"), str(REPO / "launch/train.py"), "--config", str(recipe), *words)
    log = tmp_path / "output"
    with open(log, "wb") as output:
        command = ("unshare", "--mount", "--ipc", "sh", "-c", own_shm, "sh", *train)
        rank = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=output)

    def saves(count: int) -> None:
        deadline = time.monotonic() + 300
        while len([e for e in rows(run, "events.jsonl") if e["kind"] == "save"]) < count:
            assert time.monotonic() < deadline and rank.poll() is None, log.read_text()[-3000:]
            time.sleep(0.1)

    try:
        saves(2)
        remove_as_systemd_does(psutil.Process(rank.pid))
        time.sleep(2 * STALL_S)
        saves(len([e for e in rows(run, "events.jsonl") if e["kind"] == "save"]) + 3)
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(120) == 0, log.read_text()[-3000:]
        assert gone(agents_of(run), 30)
    finally:
        rank.kill()
    assert log.read_text().count("RemoveIPC=yes") == 1
    kinds = [event["kind"] for event in rows(run, "events.jsonl")]
    assert "fault" not in kinds and "pause" not in kinds and kinds[-1] == "stop", kinds
    newest = complete_checkpoints(run / "checkpoints")[0]
    assert verify(newest) == []
