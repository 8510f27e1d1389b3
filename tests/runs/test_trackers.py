"""Trackers of one run over a resume that repeats steps: a plugin's that raises."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.forked import train
from tests.helpers.launching import rows, write_recipe

DEAD = """
from dataclasses import dataclass
from llmtrain import Sink

@dataclass(kw_only=True)
class Dead(Sink, entry="dead"):
    why: str = "nobody answers"

    def log(self, row, *, more):
        raise OSError(self.why)
"""
WORDS = (
    "--train.log_every",
    "1",
    "--train.eval_every",
    "4",
    "--checkpoint.every_steps",
    "4",
    "--schedule.name",
    "constant",
)


def two_launches(folder: Path, data: str, *words: str) -> tuple[str, dict[int, float], dict[int, float]]:
    """Train the run of `folder` to step 8, and from its step 4 on to step 10 with another learning rate. Returns the
    first launch's output, and the losses by step of before and after."""
    recipe, run = write_recipe(folder, data), folder / "run"
    output = train(recipe, *WORDS, *words, "--train.max_steps", "8")
    before = {row["step"]: row["loss"] for row in rows(run) if "loss" in row}
    shutil.rmtree(run / "checkpoints/step-00000008")
    train(recipe, *WORDS, *words, "--train.max_steps", "10", "--optim.lr", "2e-3")
    after = {row["step"]: row["loss"] for row in rows(run) if "loss" in row}
    assert sorted(after) == list(range(1, 11)) and after[5] == before[5] and after[6] != before[6]
    return output, before, after


@pytest.mark.timeout(300)
def test_a_dead_tracker_is_given_up(small_data: str, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(DEAD)
    output, *_ = two_launches(tmp_path, small_data, "--plugin", str(mine), "--trackers.dead.why", "it is gone")
    assert re.search("trackers.dead .*OSError: it is gone", output)
