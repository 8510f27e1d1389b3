"""Runs with swap files that end badly: the checkpoint before is intact, nothing is left, and the next start goes on."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tests.features.nvme.test_nvme_ranks import WIDE
from tests.helpers.forked import Launch, finish
from tests.helpers.launching import losses, wait_for_step, write_run

END = 30
TRAIN = {"global_batch": 8, "micro_batch": 2, "max_steps": END}


def test_runs_that_are_damaged_and_killed_go_on(small_data: str, tmp_path: Path) -> None:
    disk, sections = tmp_path / "disk", {"model": {"config": WIDE}, "checkpoint": {"every_steps": 2}}
    disk.mkdir()
    place = {"device": "nvme", "nvme_path": str(disk)}
    swapping = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    plain = write_run(tmp_path / "plain", small_data, {"zero_optimization": {"stage": 3}}, TRAIN, **sections)
    recipe = write_run(tmp_path / "swapping", small_data, {"zero_optimization": swapping}, TRAIN, **sections)
    optim = ("--optim.clip_norm", "0", "--optim.lr", "0.0003")
    code, output = finish(plain, *optim)
    assert code == 0, output

    run = tmp_path / "swapping/run"
    damaged = Launch(recipe, *optim)
    wait_for_step(damaged, run, 3)
    deadline = time.monotonic() + 120
    while damaged.ranks[1].is_alive():
        assert time.monotonic() < deadline, damaged.output()
        _spoil(damaged.ranks[1].pid, disk)
    damaged.wait(60)
    assert f"rank 1: zero_optimization.offload_optimizer.nvme_path = '{disk}': the swap file of " in damaged.output()

    killed = Launch(recipe, *optim)
    wait_for_step(killed, run, max(losses(run)) + 1)
    killed.kill()
    assert not list(disk.iterdir())
    code, output = finish(recipe, *optim)
    assert code == 0, output
    assert losses(run) == losses(tmp_path / "plain/run")


def _spoil(process: int | None, folder: Path) -> None:
    """Write zeros over a process's swap file."""
    for link in Path(f"/proc/{process}/fd").glob("*"):
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(str(folder)):
                with link.open("r+b") as file:
                    file.write(bytes(1 << 16))
    time.sleep(0.01)
