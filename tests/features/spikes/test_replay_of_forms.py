"""Replays of runs with an objective over answers, and with a plugin."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from llmtrain import cli
from tests.features.spikes.test_spikes_runs import content
from tests.helpers import forked
from tests.helpers.launching import write_recipe
from tests.helpers.preference import prepared_unpaired
from tests.helpers.warm import WarmCommands
from tests.runs.test_first_step import recipe, write_column

PART = """
from dataclasses import dataclass
from llmtrain import Part

@dataclass(kw_only=True)
class Count(Part, entry="count"):
    at: int = 0
"""


@pytest.mark.needs("peft")
@pytest.mark.parametrize("reference", ["column", "online"])
def test_rows_of_a_replay_have_the_baseline_of_the_step(
    base: Path, tmp_path: Path, warm: WarmCommands, reference: str
) -> None:
    """z is a mean over the global batch: only with one z do the shares of the rows add up to 1."""
    online = reference == "online"
    file = recipe(
        tmp_path / "a",
        base,
        prepared_unpaired(tmp_path),
        {"name": "kto", "reference": reference},
        {"r": 4} if online else None,
    )
    if not online:
        write_column(file, warm)
    forked.train(file, "--train.global_batch=8", "--train.max_steps=4", "--optim.lr=0.003")
    run = tmp_path / "a/run"
    assert cli.main(["replay", str(run), "--steps", "2:4", "--rows", "24"]) == 0
    answer = json.loads((tmp_path / "a/run-replay-2-4/answer.json").read_text())
    shares = {step: math.fsum(row["share"] for row in answer["rows"] if row["step"] == step) for step in (2, 3, 4)}
    assert answer["exact"] and shares == pytest.approx(dict.fromkeys(shares, 1.0), abs=1e-6)


def test_steps_of_another_plugin_are_refused(
    small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps 2 and 3 are of the first code, 5 and 6 of the second one, which began at a checkpoint of the first."""
    mine, changed = tmp_path / "mine.py", f"{PART}# changed\n"
    file, run = write_recipe(tmp_path, small_data), str(tmp_path / "run")
    words = ["--plugin", str(mine), "--parts.count.at=1", "--checkpoint.every_steps", "1", "--checkpoint.keep", "9"]
    mine.write_text(PART)
    forked.train(file, *words, "--train.max_steps", "4")
    mine.write_text(changed)
    forked.train(file, *words, "--train.max_steps", "6", "--plugin-changed", "ok")

    files = content(tmp_path)
    for steps, other in (("2:3", changed), ("5:6", PART)):
        mine.write_text(other)
        for more in ((), ("--skip", steps[0], "--write", "--out", str(tmp_path / "new"))):
            assert cli.main(["replay", run, "--steps", steps, *more, "--plugin", str(mine)]) == 2
            assert re.search(r"plugin mine .*changed", capsys.readouterr().err)
    assert content(tmp_path) == {**files, "mine.py": content(tmp_path)["mine.py"]}
    mine.write_text(changed)
    assert cli.main(["replay", run, "--steps", "5:6", "--rows", "1", "--plugin", str(mine)]) == 0
