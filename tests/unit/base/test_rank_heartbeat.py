"""The page of memory of a rank, and what a rank tells the watch at its end."""

from __future__ import annotations

import os
import time

import pytest

from llmtrain.base.rank import folder, watch
from llmtrain.base.rank.heartbeat import PHASES, Heartbeat, named, read
from llmtrain.base.rank.watched import Watched


@pytest.fixture
def heart(tmp_path):
    heart = Heartbeat()
    heart.connect(tmp_path / "rank-00003.beat", rank=3, local_rank=1)
    return heart


def test_a_reader_sees_what_the_rank_does(heart, tmp_path):
    path = tmp_path / "rank-00003.beat"
    heart.at_step(41)
    heart.begin_step()
    heart.phase("backward")
    heart.enter(named("all_reduce"))
    heart.enter(named("barrier"))  # called by the first one: counts once, under its name
    beat = read(path)
    assert (beat.rank, beat.local_rank, beat.pid, beat.step, beat.phase) == (3, 1, os.getpid(), 41, "backward")
    assert (beat.inside, beat.collective, beat.collectives, beat.left) == (True, "all_reduce", 1, None)
    heart.leave()
    assert read(path).inside
    heart.leave()
    after = read(path)
    assert not after.inside and after.beats > beat.beats and after.collective == "all_reduce"
    with heart.during("save"):
        assert read(path).phase == "save"
    assert read(path).phase == "backward"
    assert not read(path).on_device
    heart.on_device()
    heart.gave()
    heart.gave()
    before = read(path).beats
    heart.device_did(1)
    assert (read(path).on_device, read(path).given, read(path).done) == (True, 2, 1) and read(path).beats > before
    heart.stopping()
    heart.left(3)
    assert (read(path).stopping, read(path).left, read(path).phase) == (True, 3, "end")


def test_processes_forked_before_they_connect_count_for_themselves():
    heart = Heartbeat()
    if (child := os.fork()) == 0:
        heart.enter(named("all_reduce"))
        time.sleep(0.05)
        heart.leave()
        os._exit(0 if heart.waited_s() >= 0.05 else 1)
    assert os.waitpid(child, 0)[1] == 0 and heart.waited_s() == 0


def test_own_time_is_the_step_without_the_collectives(heart, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("llmtrain.base.rank.heartbeat.time.monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    heart.begin_step()
    wait(0.5)
    heart.enter(named("all_reduce"))
    wait(2.0)
    heart.leave()
    heart.end_step(1)
    with heart.during("evaluate"):
        wait(1.0)
    beat = read(tmp_path / "rank-00003.beat")
    assert (beat.timed_steps, beat.step, beat.own_s) == (1, 1, 0.5)


def test_pages_that_are_none_are_not_read(tmp_path):
    assert read(tmp_path / "no") is None
    for content in (b"", b"x" * 100, b"\0" * 4096, os.urandom(4096)):
        (tmp_path / "page").write_bytes(content)
        assert read(tmp_path / "page") is None


def test_a_heart_that_nobody_watches_beats_all_the_same():
    heart = Heartbeat()
    for phase in PHASES:
        heart.phase(phase)
    heart.enter(named("x" * 100))
    heart.leave()


@pytest.mark.parametrize(
    ("error", "is_shown"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:546] Connection closed by peer [127.0.0.1]:30512"), False),
        (KeyError("timeout"), True),
        (FileNotFoundError(2, "No such file or directory", "/data/peers/x.bin"), True),
        (EOFError("Ran out of input"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_is_said_of_a_lost_peer_is_left_to_the_watch(tmp_path, monkeypatch, error, is_shown):
    """It explains who has gone; any other traceback is the explanation."""
    monkeypatch.setattr(watch, "_watched", Watched(tmp_path))
    monkeypatch.setattr(watch.heart, "is_leaving", lambda: False)
    monkeypatch.delenv("LLMTRAIN_VERBOSE", raising=False)

    def end() -> type[BaseException]:
        with pytest.raises((SystemExit, type(error))) as ended, watch.outcome_reported():
            raise error
        return ended.type

    assert end() is type(error), "there is no watch that could tell it"
    (tmp_path / folder.AGENT).write_text("{}")
    assert end() is (type(error) if is_shown else SystemExit)
    assert type(error).__name__ in (tmp_path / "rank-00000.error").read_text()


def test_the_reason_that_nccl_gives_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_watched", Watched(tmp_path))
    monkeypatch.setattr(watch.heart, "is_leaving", lambda: False)
    text = "NCCL error in: NCCLUtils.cpp:94, invalid usage\nncclInvalidUsage: ...\nLast error:\nDuplicate GPU detected"
    assert not watch.failed(RuntimeError(text))
    kept = (tmp_path / "rank-00000.error").read_text()
    assert "invalid usage Duplicate GPU detected" in kept


def test_a_rank_without_an_agent_has_no_watch_and_bounds_itself(monkeypatch):
    monkeypatch.setattr(watch, "alone_s", None)
    monkeypatch.setenv("LOCAL_SIZE", "1")
    watch.begin(stall_timeout_s=7.0, start_timeout_s=5.0, run_dir="run", agent="")
    assert watch.alone_s == 7.0 and watch.agent_address() is None and not watch.failed(ValueError())
