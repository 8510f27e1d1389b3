"""The lab is what it says: separate hosts, a cable that can be shaped and cut, and no trace when it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import REPO, environment, rows, write_recipe
from tools.lab.lab import Lab


@pytest.fixture
def recipe(tmp_path: Path, small_data: str) -> Path:
    return write_recipe(tmp_path, small_data)


def test_deepspeed_trains_on_two_hosts(lab3: Lab, recipe: Path) -> None:
    """The real launcher, over the real pdsh and ssh, ends with a checkpoint of two ranks."""
    first, second, _ = lab3.hosts
    command = ["deepspeed", "--hostfile", str(lab3.hostfile()), "--include", "node-1@node-2"]
    command += ["--master_addr", first.address, str(REPO / "launch/train.py"), "--config", str(recipe)]
    before = second.bytes()
    done = first.run(
        [*command, "--train.max_steps", "4", "--checkpoint.every_steps", "4"],
        env=environment(GLOO_SOCKET_IFNAME="eth0"),
        cwd=recipe.parent,
        timeout_s=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = recipe.parent / "run"
    assert [row["step"] for row in rows(run) if "loss" in row][-1] == 4
    checkpoint = run / "checkpoints" / "step-00000004"
    assert {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"} <= {
        p.name for p in checkpoint.iterdir()
    }
    assert second.bytes()[0] - before[0] > 100_000  # the gradients went through the switch
    assert first.processes() == second.processes() == []
