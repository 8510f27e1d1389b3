"""`llmtrain launch` itself is killed in the lab: its ranks on all hosts save and leave, and nothing of it stays."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.cluster.launched import Launched, write_recipe
from tests.cluster.test_restart import cmdline, secret
from tests.helpers.warm import WarmCommands
from tools.lab.lab import Lab

LEFT_S = 60.0  # on a test machine with other work


@pytest.mark.timeout(900)
def test_the_ranks_of_a_killed_launch_save_and_leave(
    lab3: Lab, small_data: str, tmp_path: Path, warm: WarmCommands
) -> None:
    recipe = write_recipe(tmp_path, small_data)
    # Steps longer than an ssh: a rank that is asked late would have left with those that were asked before.
    recipe.write_text(recipe.read_text().replace("global_batch: 12", "global_batch: 600"))
    with Launched(lab3, recipe, "--env-file", str(secret(tmp_path)), warm=warm) as run:
        run.wait_for(r"^rank 2 -> node-3")
        run.wait_for_step(3)
        for each in lab3.hosts[0].processes():
            if "launch" in cmdline(each) and "--hostfile" in cmdline(each):
                each.send_signal(signal.SIGKILL)
        run.wait_for("launch was killed: 3 of 3 ranks were asked to save and leave")
        until = time.monotonic() + LEFT_S
        while left := [
            word for host in lab3.hosts for p in host.processes() for word in cmdline(p) if "llmtrain" in word
        ]:
            assert time.monotonic() < until, left
            time.sleep(0.2)
        assert run.newest_checkpoint() == run.step() >= 3
        run.assert_nothing_left()
        for host in lab3.hosts:
            assert list((host.home / ".llmtrain" / "secrets").iterdir()) == []
