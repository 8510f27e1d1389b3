"""launch/slurm.sbatch under a real Slurm: slurmctld and slurmd on the hosts of a lab.

To have it: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge (3 MB, 5 s).
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.cluster.launched import MET_S, Launched, write_recipe
from tests.helpers.launching import REPO
from tools.lab.lab import Lab
from tools.lab.slurm import Slurm, why_not_slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(why_not_slurm() is not None, reason=str(why_not_slurm())),
]
ENV = {"DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
SIZE = ("--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")


class Batch:
    """A job, submitted on the first host from the recipe's folder: of launch/slurm.sbatch, or of one command."""

    def __init__(self, slurm: Slurm, recipe: Path, *options: str, command: str | None = None) -> None:
        self.slurm, self.run_dir = slurm, recipe.parent / "run"
        (recipe.parent / ".venv/bin").mkdir(parents=True, exist_ok=True)
        (recipe.parent / ".venv/bin/activate").write_text("")
        what = [str(REPO / "launch/slurm.sbatch"), str(recipe)] if command is None else [f"--wrap={command}"]
        words = ("--parsable", "--output=slurm-%j.log", *SIZE, *options, *what)
        self.id = slurm.ask("sbatch", *words, env=ENV, cwd=recipe.parent)
        self.log = recipe.parent / f"slurm-{self.id}.log"

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, pattern: str, times: int = 1) -> re.Match[str]:
        """The last match of a pattern that must come to be in the log so many times."""
        until = time.monotonic() + MET_S
        while len(found := list(re.finditer(pattern, self.text, flags=re.M))) < times:
            assert time.monotonic() < until, f"{pattern!r} is not {times} times in:\n{self.text[-6000:]}"
            time.sleep(0.2)
        return found[-1]

    def ended(self) -> str:
        """Its state, as soon as it has ended on all hosts."""
        until = time.monotonic() + MET_S
        while (state := self.shown("JobState")) in ("RUNNING", "COMPLETING"):
            assert time.monotonic() < until, self.text[-6000:]
            time.sleep(0.2)
        return state

    def shown(self, name: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S+)", self.slurm.ask("scontrol", "show", "job", self.id))
        assert found is not None
        return found[1]

    def assert_nothing_left(self) -> None:
        left = {host.name: [p.cmdline() for p in Launched.job_on(host)] for host in self.slurm.lab.hosts}
        assert not any(left.values()), left

    def newest_checkpoint(self) -> int:
        found = (self.run_dir / "checkpoints").glob("step-*[0-9]/manifest.json")
        return max(int(path.parent.name.removeprefix("step-")) for path in found)


def test_a_killed_rank_and_a_cancelled_job(lab3: Lab, small_data: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, small_data)
    slurm = Slurm(lab3)
    job = Batch(slurm, recipe)
    for number in range(3):
        job.wait_for(rf"^rank {number} -> node-{number + 1} -> cpu, local rank 0$")
    job.wait_for(r"^step +7/")
    tasks = [p for p in lab3.hosts[1].processes() if "llmtrain" in p.cmdline()]
    tasks[0].kill()
    job.wait_for(r"^error: fault after step \d+: rank 1 on node-2 .*killed it")
    resumed = job.wait_for(r"^resumed from .* at step (\d+)$")
    assert f"launch: restarting from step {resumed[1]} on 3 hosts, 3 ranks" in job.text
    job.wait_for(r"^step ", times=int(resumed[1]) + 5)
    slurm.ask("scancel", "--signal=TERM", job.id)
    assert (job.ended(), job.shown("ExitCode"), job.shown("Restarts")) == ("FAILED", "75:0", "0")
    stopped = job.wait_for(r"^stopped \(SIGTERM\) at step (\d+)")
    assert job.newest_checkpoint() == int(stopped[1])
    job.assert_nothing_left()

    again = Batch(slurm, recipe)
    assert again.wait_for(r"^resumed from .* at step (\d+)$")[1] == stopped[1]
    again.wait_for(r"^step ", times=3)
    slurm.ask("scancel", again.id)
    assert again.ended() == "CANCELLED"
    stopped = again.wait_for(r"^stopped \(SIGTERM\) at step (\d+)")
    assert again.newest_checkpoint() == int(stopped[1])
    assert "warning: the ranks were not asked" not in again.text
    again.assert_nothing_left()


def test_before_its_time_is_over_it_saves_and_is_queued_again(lab3: Lab, small_data: str, tmp_path: Path) -> None:
    """Slurm counts time in minutes, and sends the signal up to a minute early."""
    recipe = write_recipe(tmp_path, small_data)
    slurm = Slurm(lab3)
    job = Batch(slurm, recipe, "--time=2", "--signal=B:USR1@30")
    stopped = job.wait_for(r"^stopped \(SIGTERM\) at step (\d+)")
    assert job.wait_for(r"^resumed from .* at step (\d+)$")[1] == stopped[1]
    assert job.shown("Restarts") == "1"
    assert "launch: 3 ranks are asked to save and leave" in job.text
    slurm.ask("scancel", job.id)
    assert job.ended() == "CANCELLED"
    job.assert_nothing_left()


def test_a_lost_host(lab3: Lab, small_data: str, tmp_path: Path) -> None:
    """With --no-kill the allocation outlives it. For Slurm its step never ends: the next one must not wait for it."""
    recipe = write_recipe(tmp_path, small_data)
    slurm = Slurm(lab3)
    job = Batch(slurm, recipe, "--no-kill", command=f"exec llmtrain launch --launcher slurm --min-hosts 2 -- {recipe}")
    job.wait_for(r"^step +7/")
    lab3.hosts[2].kill()
    resumed = job.wait_for(r"^resumed from .* at step (\d+)$")
    assert f"launch: restarting from step {resumed[1]} on 2 hosts, 2 ranks, without node-3" in job.text
    job.wait_for(r"^step ", times=int(resumed[1]) + 3)
    slurm.ask("scancel", job.id)
    stopped = job.wait_for(r"^stopped \(SIGTERM\) at step (\d+)")
    assert job.newest_checkpoint() == int(stopped[1])
