"""A run with a document of garbage: its steps are recorded, its spike is reported, and a checkpoint before it stays."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from llmtrain.commands.prepare import main as prepare
from llmtrain.tracking.local import read_rows
from llmtrain.tracking.steps import StepRow, read_steps
from tests.helpers import forked
from tests.helpers.launching import write_run

TEXT = "the run reads a line and then it writes another line of plain words about the same plain thing"
GARBAGE = 500
"""Line of the source with the garbage."""


def prepare_text(folder: Path) -> Path:
    draw, words = random.Random(1), TEXT.split()
    with open(folder / "a.jsonl", "w") as stream:
        for line in range(1, 4001):
            garbage = "".join(draw.choice("~^|@#{}$%&*<>=+;`") for _ in range(320))
            text = garbage if line == GARBAGE else " ".join(draw.choice(words) for _ in range(20))
            stream.write(json.dumps({"text": text}) + "\n")
    given = ["--source", str(folder / "a.jsonl"), "--vocab-size", "300", "--out", str(folder / "set")]
    assert prepare(given) == 0
    return folder / "set"


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`: two launches of 2 ranks, in the second of which the garbage is read."""
    folder = tmp_path_factory.mktemp("spiked")
    data = prepare_text(folder)
    path = write_run(
        folder,
        str(data),
        {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0},
        {"global_batch": 8, "micro_batch": 2, "max_steps": 190, "log_every": 10, "eval": False, "export": False},
        data={"path": str(data), "sequence_length": 64},
        optim={"lr": 1e-3},
        checkpoint={"every_steps": 20, "keep": 1},
    )
    forked.train(path, "--train.max_steps=120")
    (folder / "log").write_text(forked.train(path))
    return folder


def steps_of(run: Path) -> list[StepRow]:
    return list(read_steps(run / "steps.bin"))


def event(run: Path) -> dict[str, Any]:
    (found,) = [row for row in read_rows(run / "events.jsonl")[0] if row["kind"] == "spike"]
    return found


def test_each_step_is_recorded_as_it_was_logged(spiked: Path) -> None:
    steps = steps_of(spiked / "run")
    assert [row.step for row in steps] == list(range(1, 191))
    logged = {row["step"]: row for row in read_rows(spiked / "run/metrics.jsonl")[0] if "loss" in row}
    assert len(logged) == 19
    for step, row in logged.items():
        here = steps[step - 1]
        assert here.loss == pytest.approx(row["loss"], abs=1e-12)
        assert here.norm == pytest.approx(row["grad_norm"], rel=1e-6)
        assert len(here.shares) == 2 and sum(here.shares) / here.weight == pytest.approx(here.loss, rel=1e-6)


def test_the_spike_is_told_with_the_command_that_replays_it(spiked: Path) -> None:
    spike, run = event(spiked / "run"), spiked / "run"
    steps = steps_of(run)
    worst = max(steps[30:], key=lambda row: row.norm)
    assert spike["step"] == worst.step and spike["deviations"] > 5
    first, last = worst.step - 7, worst.step + 3
    assert spike["replay"] == f"llmtrain replay {run} --steps {first}:{last}"
    assert spike["replay"] in (spiked / "log").read_text()


def test_the_newest_checkpoint_before_the_spike_is_kept(spiked: Path) -> None:
    spike = event(spiked / "run")["step"]
    kept = f"step-{(spike - 1) // 20 * 20:08d}"
    found = sorted(path.name for path in (spiked / "run/checkpoints").glob("step-*"))
    assert found == [kept, "step-00000190"]
