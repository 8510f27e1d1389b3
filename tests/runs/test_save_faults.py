"""Saves that are disturbed: a full or read-only disk, stopped processes, signals. Nothing is half there."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.checkpoint.format import Manifest, complete_checkpoints, problems, stale_folders
from llmtrain.checkpoint.snapshot import Snapshot
from tests.helpers.forked import Launch
from tests.helpers.launching import losses, rows, write_recipe

SCHEDULE = ("--schedule.name", "constant")
EVER = ("--train.max_steps", "1000000")


def mount(folder: Path, options: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.decode().strip()}")


def remount(folder: Path, options: str) -> None:
    """At a moment in which no file there is open for writing: the kernel refuses others."""
    command = ["mount", "-t", "tmpfs", "-o", f"remount,{options}", "tmpfs", folder]
    deadline = time.monotonic() + 60
    while (done := subprocess.run(command, capture_output=True)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A run folder whose checkpoints lie on a file system of 70 MiB, of which 64 are headroom."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mount(folder, "size=70m")
    yield folder.parent
    subprocess.run(["umount", "-l", folder], check=True)


def wait_for(launch: Launch, run: Path, kind: str, after: int = 0, timeout_s: float = 90) -> dict[str, Any]:
    """The first event of the kind past a step."""
    deadline = time.monotonic() + timeout_s
    while True:
        for event in rows(run, "events.jsonl"):
            if event["kind"] == kind and event["step"] > after:
                return event
        assert launch.alive() and time.monotonic() < deadline, launch.output()[-3000:]
        time.sleep(0.005)


def wait_until(launch: Launch, true: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert launch.alive() and time.monotonic() < deadline, launch.output()[-3000:]
        time.sleep(0.001)


def stop_well(launch: Launch) -> None:
    for rank in launch.ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGTERM)
    assert launch.wait(60) == [0, 0], launch.output()[-3000:]


def all_intact(run: Path) -> bool:
    found = complete_checkpoints(run / "checkpoints")
    whole = all(not problems(f, (m := Manifest.read(f)), sorted(m.files)) for f in found)
    return bool(found) and whole and not stale_folders(run / "checkpoints")


def test_a_full_and_a_read_only_disk_cost_checkpoints_and_not_the_run(small_data, tmp_path, small_disk):
    """No space: a message with what is needed, free, and could be freed. Space again, writable again: saves again."""
    recipe, disk = write_recipe(tmp_path, small_data), small_disk / "checkpoints"
    launch = Launch(recipe, *SCHEDULE, *EVER, "--fault.max_failed_saves", "100000")
    wait_for(launch, small_disk, "save", after=5)
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * (6 << 20))
    failed = wait_for(launch, small_disk, "save_failed")
    assert re.search(r"\d MiB .*llmtrain checkpoint prune", failed["error"], re.S), failed
    ballast.unlink()
    saved = wait_for(launch, small_disk, "save", after=failed["step"])

    remount(disk, "ro")
    failed = wait_for(launch, small_disk, "save_failed", after=saved["step"])
    assert os.strerror(errno.EROFS) in failed["error"]
    remount(disk, "rw")
    wait_for(launch, small_disk, "save", after=failed["step"])
    stop_well(launch)
    assert all_intact(small_disk)
    assert sorted(losses(small_disk)) == list(range(1, max(losses(small_disk)) + 1))  # no step was lost to it


def refuse_copies(rank: int) -> None:
    """CUDA's answer to a copy over two registrations of page-locked memory; on rank 1, at its second save."""
    plain, begun = Snapshot.start, [0]

    def start(self: Snapshot, *given: Any, **named: Any) -> None:
        begun[0] += 1
        if rank == 1 and begun[0] == 2:
            raise RuntimeError("CUDA error: invalid argument")
        plain(self, *given, **named)

    Snapshot.start = start  # type: ignore[method-assign]


def test_an_error_of_the_device_costs_a_save_and_later_ones_need_no_copy(small_data, tmp_path):
    """It ended the run: each run on a GPU, at its first save."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    launch = Launch(recipe, *SCHEDULE, "--train.max_steps", "12", before=refuse_copies)
    assert launch.wait(120) == [0, 0], launch.output()[-3000:]
    events = [event for event in rows(run, "events.jsonl") if event["kind"].startswith("save")]
    assert [event["kind"] for event in events].count("save_failed") == 1
    (failed,) = (event for event in events if event["kind"] == "save_failed")
    assert re.fullmatch("rank 1 .*: CUDA error: invalid argument", failed["error"])
    assert events[-1]["kind"] == "save" and events[-1]["step"] == 12 and events[-1] is not failed
    assert "without a copy" in launch.output()
    assert all_intact(run)


def test_a_disk_that_stays_full_ends_the_run_before_days_are_lost(small_data, tmp_path, small_disk):
    """After fault.max_failed_saves in a row, with exit code 2 and what is lost; with space by then, saved and 3."""
    recipe, disk = write_recipe(tmp_path, small_data), small_disk / "checkpoints"
    launch = Launch(recipe, *SCHEDULE, *EVER, "--fault.max_failed_saves", "2")
    wait_for(launch, small_disk, "save", after=5)
    (disk / "ballast").write_bytes(b"x" * (6 << 20))
    assert launch.wait(60) == [2, 2], launch.output()[-3000:]
    told = launch.output()
    assert "2 of 2" in told and "fault.max_failed_saves is 2" in told
    saved = int(complete_checkpoints(disk)[0].name[5:])
    assert f"step {saved}" in told
    assert max(losses(small_disk)) <= saved + 3 * 5  # every 5 steps

    assert all_intact(small_disk)


def test_a_run_folder_that_is_removed_is_written_again(small_data, tmp_path):
    """A clean-up outside the run: what the run holds open comes back whole, and it says what does not."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path, small_data)
    launch = Launch(recipe, *SCHEDULE, *EVER)
    wait_for(launch, run, "save", after=5)
    last = max(losses(run))
    while run.exists():
        shutil.rmtree(run, ignore_errors=True)
        if (run / "config.yaml").exists():
            break  # the run was faster
    wait_for(launch, run, "removed")
    wait_for(launch, run, "save", after=last)
    stop_well(launch)
    assert all_intact(run) and sorted(losses(run)) == list(range(1, max(losses(run)) + 1))
    assert all((run / name).stat().st_size for name in ("config.yaml", "deepspeed.json", "environment.json"))


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_training(small_data, tmp_path, small_disk):
    (small_disk / "checkpoints/ballast").write_bytes(b"x" * (6 << 20))
    launch = Launch(write_recipe(tmp_path, small_data), "--checkpoint.every_steps", "null")
    assert launch.wait(90) == [2, 2], launch.output()[-3000:]
    assert "checkpoint.dir" in launch.output()
    assert not rows(small_disk)


def test_a_run_folder_without_any_room_is_refused_in_a_sentence(small_data, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    mount(run, "size=64k")
    try:
        (run / "checkpoints").mkdir()
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (run / "checkpoints/ballast").write_bytes(b"x" * (128 << 10))
        os.truncate(run / "checkpoints/ballast", (run / "checkpoints/ballast").stat().st_size - 4096)  # for a probe
        launch = Launch(write_recipe(tmp_path, small_data))
        assert launch.wait(90) == [2, 2], launch.output()[-3000:]
        assert os.strerror(errno.ENOSPC) in launch.output() and "Traceback" not in launch.output(), launch.output()
        assert f"train.run_dir: {run} cannot be written" in launch.output()
    finally:
        subprocess.run(["umount", "-l", run], check=True)


def test_a_run_that_will_fill_its_disk_says_so_at_its_start(small_data, tmp_path, small_disk):
    launch = Launch(write_recipe(tmp_path, small_data), "--train.max_steps", "1", "--checkpoint.keep", "1000")
    assert launch.wait(90) == [0, 0], launch.output()[-3000:]
    assert launch.output().count(f"warning: {small_disk / 'checkpoints'} ") == 1


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_a_save_that_is_due_while_one_is_written(small_data, tmp_path, when_busy):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    launch = Launch(recipe, *SCHEDULE, *EVER, "--checkpoint.when_busy", when_busy)
    wait_for(launch, run, "save")
    writer = launch.writer(1)
    assert writer is not None
    writer.suspend()  # a disk that takes for ever
    stuck = max(losses(run))
    if when_busy == "skip":
        skipped = wait_for(launch, run, "save_skipped")
        wait_until(launch, lambda: max(losses(run)) > skipped["step"] + 5)  # training goes on meanwhile
        writer.resume()
        wait_for(launch, run, "save", after=skipped["step"])
    else:
        time.sleep(5)
        assert max(losses(run)) <= stuck + 10  # one save is under way, at the next training waits
        writer.resume()
        waited = wait_for(launch, run, "save_waited", after=stuck)
        assert waited["seconds"] > 1
        wait_until(launch, lambda: max(losses(run)) > stuck + 10)
    stop_well(launch)
    assert all_intact(run)


def test_signals_during_a_save(small_data, tmp_path):
    """SIGSTOP of a rank holds the run up and no more; SIGTERM while a save is under way ends it with all saved."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    launch = Launch(recipe, *SCHEDULE, *EVER, "--checkpoint.every_steps", "3")
    wait_for(launch, run, "save")
    wait_until(launch, lambda: list((run / "checkpoints").glob("*.tmp")))
    os.kill(launch.ranks[1].pid, signal.SIGSTOP)
    time.sleep(0.5)
    stuck = max(losses(run))
    time.sleep(1.0)
    assert max(losses(run)) <= stuck + 1
    os.kill(launch.ranks[1].pid, signal.SIGCONT)
    wait_for(launch, run, "save", after=stuck + 3)
    wait_until(launch, lambda: list((run / "checkpoints").glob("*.tmp")))
    stop_well(launch)
    assert all_intact(run)
    assert complete_checkpoints(run / "checkpoints")[0].name == f"step-{max(losses(run)):08d}"
    assert sorted(losses(run)) == list(range(1, max(losses(run)) + 1))
