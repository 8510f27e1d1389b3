"""`llmtrain launch` is killed, or its terminal closed: with a script in the place of DeepSpeed's launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.launching import REPO
from tests.unit.cluster.test_launch_attempts import JOB
from tests.unit.cluster.test_launch_placement import recipe as recipe  # the fixture

pytestmark = pytest.mark.long

LAUNCH = """
import sys
from llmtrain.commands import launch
from llmtrain.cluster.launch import launchers
launchers.command = lambda *_: [sys.executable, "job.py"]
launchers.AGENTS_LEAVE_S = 0.0
sys.exit(launch.main(["--hostfile", "hosts", "--", "run.yaml"]))
"""
# A rank that prints all the time: into a pipe that nobody reads it could not.
RUNS = """
def stop(*_):
    time.sleep(1.0)
    print("saving", flush=True)
    Path("saved").write_text("")
    tell("end", status="stopped", code=0, reason="SIGTERM")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
place()
while not Path("finish").exists():
    print("a step", flush=True)
    time.sleep(0.02)
tell("end", status="complete", code=0)
"""


@pytest.fixture
def start(recipe: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """start(script, *words before the command) -> a launch whose job is the script."""
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    (tmp_path / "tmp").mkdir()
    started = []

    def go(script: str, *before: str) -> subprocess.Popen[bytes]:
        (tmp_path / "job.py").write_text(JOB + script)
        env = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path / "tmp")}
        with open("output", "wb") as output:
            words = [*before, sys.executable, "-c", LAUNCH]
            started.append(subprocess.Popen(words, stdout=output, stderr=output, env=env, start_new_session=True))
        return started[-1]

    yield go
    (tmp_path / "finish").write_text("")
    for process in started:
        process.kill()
        process.wait()


def wait_until(true: Callable[[], bool], within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until, Path("output").read_text()[-3000:]
        time.sleep(0.05)


def wait_until_met() -> None:
    wait_until(lambda: "rank 0 -> localhost" in Path("output").read_text())
    time.sleep(0.2)


def is_over(folder: Path) -> bool:
    """No process of the job, or beside launch, has this folder for its own."""
    for process in psutil.process_iter():
        try:
            mine = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if mine and process.cwd() == str(folder):
                return False
        except psutil.Error:
            continue
    return True


@pytest.mark.parametrize("group", [False, True])
def test_the_ranks_of_a_killed_launch_save_and_leave(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, group: bool
) -> None:
    launch = start(RUNS)
    wait_until_met()
    (os.killpg if group else os.kill)(launch.pid, signal.SIGKILL)
    launch.wait()
    wait_until(lambda: is_over(tmp_path), 30.0)
    assert Path("saved").exists()
    said = Path("output").read_text()
    assert "1 of 1 ranks" in said and "saving" in said
    assert "llmtrain:" not in said and "warning" not in said
    assert list(Path("tmp").iterdir()) == []


def test_a_launch_that_is_killed_before_the_ranks_have_met_leaves_nothing(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    launch = start("Path('begun').write_text('')\nsubprocess.run(['sleep', '600'], start_new_session=True)")
    wait_until(Path("begun").exists)
    time.sleep(0.5)
    launch.kill()
    launch.wait()
    wait_until(lambda: is_over(tmp_path), 30.0)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_a_launch_unless_nohup_started_it(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, nohup: bool
) -> None:
    launch = start(RUNS, *(["nohup"] if nohup else []))
    wait_until_met()
    os.killpg(launch.pid, signal.SIGHUP)
    time.sleep(2.0)
    if nohup:
        assert launch.poll() is None and not Path("saved").exists()
        Path("finish").write_text("")
        assert launch.wait(60) == 0
    else:
        assert launch.wait(60) == 75 and Path("saved").exists()
    assert is_over(tmp_path)
