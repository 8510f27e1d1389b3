"""Runs whose ranks have unequal speed, as users start them: what they reach, what they say, how they go on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.commands.where import sequences, spans
from tests.helpers import forked
from tests.helpers.launching import losses, rows, wait_for_step, write_run

PACE_S = 0.01
LONG_S = 0.04
"""Beside which what this machine's other work does to a step is little."""


def recipe(folder: Path, data: str, stage: int = 1) -> Path:
    train = {"micro_batch": 6, "global_batch": 12, "max_steps": 24}
    return write_run(folder, data, {"zero_optimization": {"stage": stage}}, train)


def slowed(pace_s: float, then_s: float | None = None, after: int = 0) -> None:
    """From now on a sequence takes so many seconds more in the forward pass, and `then_s` after so many of these."""
    from llmtrain.models.language import LanguageModel

    usual, passes = LanguageModel.forward, [0]

    def forward(self: LanguageModel, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        passes[0] += self.training
        time.sleep(len(inputs) * (pace_s if then_s is None or passes[0] <= after else then_s))
        return usual(self, inputs, *args, **kwargs)

    LanguageModel.forward = forward  # type: ignore[method-assign]


def long(rank: int) -> None:
    slowed(LONG_S * (1 + rank))


def slow_alone(_: int) -> None:
    slowed(2 * LONG_S)


def slows_down(rank: int) -> None:
    slowed(2 * PACE_S, 8 * PACE_S if rank == 0 else None, after=12)


def changes(folder: Path) -> list[dict[str, Any]]:
    return [event for event in rows(folder / "run", "events.jsonl") if event["kind"] == "shares"]


def speed(folder: Path) -> float:
    """Tokens per second of the fastest of the last steps: whatever else the machine does only adds to one."""
    return max(row["tokens_per_s"] for row in rows(folder / "run")[-12:] if "tokens_per_s" in row)


def test_a_run_with_a_slow_rank(small_data: str, tmp_path: Path) -> None:
    """It says what it does, trains what equal shares would, and goes on with its shares; with other ranks equally."""
    path = recipe(tmp_path / "run", small_data)
    asked = ("--train.balance", "measured", "--train.max_steps", "14")
    code, told = forked.finish(path, *asked, before=long)
    assert code == 0, told
    (change,) = changes(tmp_path / "run")
    assert change["step"] == 11 and (change["before"], change["after"]) == ([6, 6], [8, 4]), change
    assert "step 11: ranks of unequal speed take 8, 4 sequences of a step" in told
    assert change["ideal_s"] <= change["after_s"] < 0.8 * change["before_s"] == 0.8 * change["equal_s"]
    for step, counts in ((11, [6, 6]), (12, [8, 4]), (14, [8, 4])):  # what `data where --rank` says
        span = next(each for each in spans(tmp_path / "run/run") if each.after < step <= (each.until or step))
        own = [list(sequences(span, step, rank)) for rank in (0, 1)]
        assert [len(each) for each in own] == counts
        assert sorted(own[0] + own[1]) == list(range(12 * (step - 1), 12 * step))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_the_sum_of_speeds(stage: int, small_data: str, tmp_path: Path) -> None:
    """Of one rank at half speed and one at full, each alone first: 0.95 of their sum, where equal shares have 0.67."""
    more = ("--train.micro_batch", "12", "--train.global_batch")
    found = {}
    for name, ranks, before, words in (
        ("fast", 1, long, (*more, "12")),
        ("slow", 1, slow_alone, (*more, "12")),
        ("equal", 2, long, (*more, "24")),
        ("measured", 2, long, (*more, "24", "--train.balance", "measured")),
    ):
        path = recipe(tmp_path / name, small_data, stage)
        code, told = forked.finish(path, *words, world_size=ranks, before=before)
        assert code == 0, told
        found[name] = speed(tmp_path / name)
    reached = {name: found[name] / (found["fast"] + found["slow"]) for name in ("equal", "measured")}
    print(stage, {name: round(share, 3) for name, share in reached.items()}, found)
    assert reached["measured"] >= 0.95 and 0.6 < reached["equal"] < 0.7, (reached, found)
    equal, other = (losses(tmp_path / name / "run") for name in ("equal", "measured"))
    assert equal.keys() == other.keys() and max(abs(equal[step] - other[step]) for step in equal) < 1e-4


@pytest.mark.slow
def test_a_rank_that_slows_down_and_a_kill(small_data: str, tmp_path: Path) -> None:
    """It gives sequences away within 11 steps; a resume begins with those shares, and with equal ones under others."""
    path = recipe(tmp_path / "run", small_data)
    asked = ("--train.balance", "measured", "--train.max_steps", "48", "--checkpoint.every_steps", "8")
    launch = forked.Launch(path, *asked, before=slows_down)
    wait_for_step(launch, tmp_path / "run" / "run", 44)
    launch.kill()
    found = changes(tmp_path / "run")
    assert 12 < found[0]["step"] <= 30 and found[-1]["after"] in ([2, 10], [3, 9]), found
    trainer = json.loads((sorted((tmp_path / "run/run/checkpoints").glob("step-*"))[-1] / "trainer.json").read_text())
    assert trainer["shares"] == {"sequences": found[-1]["after"]}
    code, told = forked.finish(path, *asked, before=slows_down)
    assert code == 0, told
    alone = recipe(tmp_path / "equal", small_data)
    assert forked.finish(alone, "--train.max_steps", "48", world_size=1, before=None)[0] == 0
    want, got = losses(tmp_path / "equal" / "run"), losses(tmp_path / "run" / "run")
    assert want.keys() == got.keys() and max(abs(want[step] - got[step]) for step in want) < 1e-4
    again = ("--train.balance", "measured", "--train.max_steps", "50", "--train.micro_batch", "3")
    code, told = forked.finish(path, *again, world_size=4, before=None)
    assert code == 0, told
    newest = sorted((tmp_path / "run/run/checkpoints").glob("step-*"))[-1]
    assert json.loads((newest / "trainer.json").read_text())["shares"] == {"sequences": [3, 3, 3, 3]}
