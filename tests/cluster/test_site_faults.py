"""Sites in the lab while things fail: none stops, none diverges."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launching import REPO
from tools.bench import sites as bench
from tools.lab.lab import Lab

pytestmark = pytest.mark.needs("torchft")

STEPS, PACE_S = 240, 0.25
AWAY_S = 20.0
"""80 steps: as a minute is where a step takes 0.75 s."""


class Trial:
    """Two sites that train on the lab's first two hosts, a third that may join, and their coordinator."""

    def __init__(self, lab: Lab, folder: Path, data: str) -> None:
        self.lab, self.folder, self.data = lab, folder, Path(data)
        self.ranks: list[bench.Rank] = []
        self.coordinator = self.start_coordinator()

    @property
    def address(self) -> str:
        return f"{self.lab.hosts[2].address}:{bench.PORT}"

    def start_coordinator(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "llmtrain", "sites", "coordinator", "--bind", self.address, "--wait-s", "3"]
        with open(self.folder / "coordinator.log", "a") as log:
            process: subprocess.Popen[str] = self.lab.hosts[2].popen(command, cwd=str(REPO), stdout=log, stderr=log)
        return process

    def site(self, number: int) -> bench.Rank:
        """Start the site of that host, or start it again."""
        options = argparse.Namespace(data=str(self.data), hidden=64, batch=4, lr=3e-3, begin="")
        host, home = self.lab.hosts[number], self.folder / f"site{number}"
        if not home.exists():
            bench.recipe(home, options, options.batch, STEPS, seed=1)
        words = [
            "--sites.name",
            f"s{number}",
            "--sites.coordinator",
            self.address,
            "--sites.timeout_s",
            "5",
            "--sites.start_sites",
            str(2 if number < 2 else 1),
            "--sites.pace",
            "measured",
            "--sites.method",
            "local_sgd",
            "--sites.sync_every",
            "10",
            "--sites.compress",
            "int8",
            "--checkpoint.every_steps",
            "20",
        ]
        rank = bench.Rank(host, home, host.name, words, PACE_S=str(PACE_S))
        self.ranks.append(rank)
        return rank

    def losses(self) -> list[float]:
        return [bench.loss_of(self.folder / f"site{number}/run") for number in range(3) if self.ran(number)]

    def ran(self, number: int) -> bool:
        return (self.folder / f"site{number}/run/metrics.jsonl").exists()


def killed_site(trial: Trial) -> None:
    gone = trial.ranks.pop(1)
    gone.process.kill()
    gone.process.wait()
    time.sleep(3)
    trial.site(1)


def cut_link(trial: Trial) -> None:
    trial.lab.hosts[1].cut()
    time.sleep(AWAY_S)
    trial.lab.hosts[1].heal()


def new_site(trial: Trial) -> None:
    trial.site(2)


def killed_coordinator(trial: Trial) -> None:
    trial.coordinator.kill()
    trial.coordinator.wait()
    time.sleep(3)
    trial.coordinator = trial.start_coordinator()


FAULTS: list[Callable[[Trial], None]] = [killed_site, cut_link, new_site, killed_coordinator]


def run(lab: Lab, folder: Path, data: str, fault: Callable[[Trial], None] | None, at: int) -> list[float]:
    """The validation losses at the end, of each site, when that fault comes after `at` steps of the first."""
    folder.mkdir()
    trial = Trial(lab, folder, data)
    try:
        for number in (0, 1):
            trial.site(number)
        if fault is not None:
            bench.wait(trial.ranks, until=at)
            fault(trial)
        bench.wait(trial.ranks)
    finally:
        for process in (trial.coordinator, *(rank.process for rank in trial.ranks)):
            process.kill()
            process.wait()
    return trial.losses()


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_thirty_faults_stop_no_site_and_cost_no_loss(lab3: Lab, small_data: str, tmp_path: Path) -> None:
    """A site killed and started again, a link cut for 20 s (80 steps), a site that joins, the coordinator killed."""
    want = run(lab3, tmp_path / "undisturbed", small_data, None, 0)
    assert want[0] == want[1], "the sites do not end with the same model"
    drawn = random.Random(7)
    told = []
    for number in range(30):
        fault = FAULTS[number % len(FAULTS)]
        at = drawn.randint(5, STEPS // 2)
        losses = run(lab3, tmp_path / f"trial{number}", small_data, fault, at)
        told.append((fault.__name__, at, [round(loss / want[0], 4) for loss in losses]))
        print(json.dumps(told[-1]), flush=True)
        assert max(losses) <= 1.02 * want[0], told
        lab3.reset()
    assert len(told) == 30
