"""`mirror.url` as a user has it: a run that is killed goes on elsewhere, from the store alone."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain.features.mirror.upload import Mirrored
from tests.helpers import forked
from tests.helpers.forked import Launch
from tests.helpers.launching import losses, rows, write_recipe

OFTEN = ("--checkpoint.every_steps", "2", "--schedule.name", "constant")


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_run_goes_on_elsewhere_from_the_store_alone(small_data: str, tmp_path: Path, kills: int) -> None:
    """Each launch is killed at any moment, uploads under way too, and all that its host had is gone."""
    rng = random.Random(kills)
    url = f"file://{tmp_path}/store"
    (tmp_path / "whole").mkdir()
    whole = write_recipe(tmp_path / "whole", small_data)
    steps = ("--train.max_steps", str(80 * (kills + 1)))  # a mirror may be slower than as many steps
    seen: dict[int, float] = {}
    for kill in range(kills):
        folder = tmp_path / f"host-{kill}"
        folder.mkdir()
        launch = Launch(write_recipe(folder, small_data), *OFTEN, *steps, "--mirror.url", url)
        deadline, begun = time.monotonic() + 120, max(Mirrored(url).complete(), default=0)
        while max(Mirrored(url).complete(), default=0) < begun + 4:
            assert time.monotonic() < deadline and launch.alive(), launch.output()[-3000:]
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        launch.kill()
        seen |= losses(folder / "run")
        shutil.rmtree(folder / "run")
    folder = tmp_path / "last"
    folder.mkdir()
    output = forked.train(write_recipe(folder, small_data), *OFTEN, *steps, "--mirror.url", url)
    assert f"{url}: step-" in output
    assert [row["kind"] for row in rows(folder / "run", "events.jsonl")].count("resume") == 1
    assert "not mirrored" not in output and "Fatal Python error" not in output  # its process has ended as it should
    assert any(row["kind"] == "mirrored" for row in rows(folder / "run", "events.jsonl"))
    assert max(Mirrored(url).complete()) == 80 * (kills + 1)
    forked.train(whole, *OFTEN, *steps)
    assert seen | losses(folder / "run") == losses(tmp_path / "whole" / "run")


def test_a_store_that_is_not_there_costs_the_run_nothing(small_data: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    url = f"file://{tmp_path}/file/store"  # a file is where its folder would be
    output = forked.train(
        write_recipe(tmp_path, small_data), *OFTEN, "--train.max_steps", "4", "--resume", "none", "--mirror.url", url
    )
    assert output.count("cannot be mirrored") == 1 and "Traceback" not in output
    assert max(losses(tmp_path / "run")) == 4


def _stops_its_mirror(rank: int) -> None:
    from llmtrain.features.mirror import part

    finish = part.Uploader.finish

    def stop(self: part.Uploader, **how: Any) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        finish(self, **how)

    part.Uploader.finish = stop  # type: ignore[method-assign]


def test_a_mirror_that_stands_still_holds_no_run_up(small_data: str, tmp_path: Path) -> None:
    limits = ("--fault.stall_timeout_s", "4", "--train.max_steps", "4", "--mirror.url", f"file://{tmp_path}/s")
    output = forked.train(write_recipe(tmp_path, small_data), *limits, before=_stops_its_mirror)
    assert re.search(r"mirrored\. .*process \(\d+\) .*\b2\.0s", output), output


@pytest.mark.slow
def test_a_killed_process_is_started_again(small_data: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    launch = Launch(
        write_recipe(tmp_path, small_data),
        *OFTEN,
        "--train.max_steps",
        "100000",
        "--resume",
        "none",
        "--mirror.url",
        url,
    )
    killed, before, deadline = 0, 0, time.monotonic() + 120
    while killed < 1 or max(Mirrored(url).complete(), default=0) < before + 4:
        assert time.monotonic() < deadline and launch.alive(), launch.output()[-3000:]
        if not killed and Mirrored(url).complete():
            [process] = [
                each
                for each in psutil.process_iter(["cmdline"])
                if {"llmtrain.features.mirror.upload", url} <= set(each.info["cmdline"] or ())
            ]
            time.sleep(10.5)  # it is not started twice within 10 s
            process.kill()
            killed, before = 1, max(Mirrored(url).complete())
        time.sleep(0.05)
    assert "(code -9)" in launch.output()
    launch.kill()


def _slow_store(rank: int) -> None:
    from llmtrain.features.mirror import part

    finish, fetch = part.Uploader.finish, part.fetch_newest

    def slow_finish(self: part.Uploader, **how: Any) -> None:
        time.sleep(12)
        finish(self, **how)

    def slow_fetch(*words: Any) -> Path | None:
        time.sleep(12)
        return fetch(*words)

    part.Uploader.finish, part.fetch_newest = slow_finish, slow_fetch  # type: ignore[method-assign]


@pytest.mark.slow
def test_transfers_that_take_longer_than_a_collective_may(small_data: str, tmp_path: Path) -> None:
    """The other ranks of a large run wait for the first checkpoint's download, and for the last one's upload."""
    url = f"file://{tmp_path}/store"
    limits = ("--fault.timeout_s", "8", "--mirror.url", url, "--train.max_steps", "4", "--train.eval", "true")
    code, output = forked.finish(write_recipe(tmp_path, small_data), *OFTEN, *limits, before=_slow_store)
    assert code == 0, output
    shutil.rmtree(tmp_path / "run")
    code, output = forked.finish(write_recipe(tmp_path, small_data), *OFTEN, *limits, before=_slow_store)
    assert code == 0 and f"{url}: step-00000004" in output, output
