"""The starter of a host's ranks: what they get, and how they end."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.cluster.launch.placement import HOST
from tests.helpers.launching import REPO

RANK = """
import json, os, signal, sys, time
from pathlib import Path
rank, what = os.environ["RANK"], sys.argv[1:]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "CUDA_VISIBLE_DEVICES")
def leave(*_):
    time.sleep(0.5)  # it saves
    Path(f"left-{rank}").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in what else leave)
Path(f"new-{rank}").write_text(json.dumps({**{name: os.environ[name] for name in names}, "argv": what}))
os.rename(f"new-{rank}", f"rank-{rank}")
if "end" in what:
    sys.exit(0)
if f"fails-{rank}" in what:
    sys.exit(7)
if f"dies-{rank}" in what:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
WORLD = {"a": [0, 1, 2], "b": [4, 6]}


def start(folder: Path, *words: str, number: int = 0) -> subprocess.Popen[str]:
    (folder / "stub.py").write_text(RANK)
    world = base64.urlsafe_b64encode(json.dumps(WORLD).encode()).decode()
    seat = (f"--world_info={world}", f"--node_rank={number}", "--master_addr=10.0.0.1", "--master_port=29500")
    env = {**os.environ, "PYTHONPATH": f"{REPO}:{folder}"}
    command = (sys.executable, "-u", "-m", HOST, *seat, "stub", *words)
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def wait_for_ranks(folder: Path, count: int) -> None:
    until = time.monotonic() + 60
    while len(list(folder.glob("rank-*"))) < count:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_ranks_get_what_deepspeeds_launcher_gives_them(tmp_path: Path) -> None:
    words = ("end", "--config", "--help", "a b", "$(x)")
    assert start(tmp_path, *words, number=1).wait(60) == 0
    common = {
        "WORLD_SIZE": "5",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "4,6",
        "argv": list(words),
    }
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("rank-*")}
    assert found == {
        "rank-3": {**common, "RANK": "3", "LOCAL_RANK": "0"},
        "rank-4": {**common, "RANK": "4", "LOCAL_RANK": "1"},
    }


@pytest.mark.parametrize("what, code", [("fails-1", 7), ("dies-1", 256 - signal.SIGKILL)])
def test_the_others_are_asked_to_leave_when_one_has_failed(tmp_path: Path, what: str, code: int) -> None:
    assert start(tmp_path, what).wait(60) == code
    assert {path.name for path in tmp_path.glob("left-*")} == {"left-0", "left-2"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_all_ranks_at_once_and_a_second_one_ends_them(tmp_path: Path, number: int) -> None:
    starter = start(tmp_path)
    wait_for_ranks(tmp_path, 3)
    began = time.monotonic()
    starter.send_signal(number)
    assert starter.wait(60) == 0 and len(list(tmp_path.glob("left-*"))) == 3
    assert time.monotonic() - began < 20  # one after another, each with 30 s, could take longer
    for path in tmp_path.glob("*-*"):
        path.unlink()
    starter = start(tmp_path, "deaf")
    wait_for_ranks(tmp_path, 3)
    starter.send_signal(number)
    time.sleep(0.5)
    assert starter.poll() is None
    starter.send_signal(number)
    assert starter.wait(60) == 256 - signal.SIGKILL
