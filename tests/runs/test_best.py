"""A run that keeps its best checkpoints and ends early, killed and resumed, beside one that nobody disturbs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from llmtrain.checkpoint.format import complete_checkpoints, read_trainer, step_of
from llmtrain.commands.checkpoint import main
from tests.helpers.forked import Launch, train
from tests.helpers.launching import rows, write_recipe

SETTINGS = (
    *("--train.eval_every", "4", "--train.log_every", "4", "--checkpoint.every_steps", "5", "--checkpoint.keep", "1"),
    *("--eval.mean.also", "1", "--schedule.name", "constant"),
    # The loss falls from evaluation to evaluation: the first one is the largest, and no later one is better.
    *("--checkpoint.keep_best.metric", "eval/also/loss", "--checkpoint.keep_best.mode", "max"),
    *("--train.stop_early.metric", "eval/mean/loss", "--train.stop_early.mode", "max"),
    *("--train.stop_early.patience", "5"),
)  # fmt: skip
FIRST, END = 4, 24


def evaluations(run: Path) -> dict[int, float]:
    return {row["step"]: row["eval/also/loss"] for row in rows(run) if "eval/also/loss" in row}


@pytest.mark.timeout(300)
def test_the_best_checkpoint_and_an_early_end_survive_a_kill(
    small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SETTINGS, "--eval.sets.also", small_data, "--eval.sequences.also", "6")
    (tmp_path / "undisturbed").mkdir()
    recipe, other = (write_recipe(folder, small_data) for folder in (tmp_path, tmp_path / "undisturbed"))
    run = tmp_path / "run"
    launch, deadline = Launch(recipe, *words), time.monotonic() + 90
    while max((event["step"] for event in rows(run, "events.jsonl") if event["kind"] == "save"), default=0) < 10:
        assert launch.alive() and time.monotonic() < deadline, launch.output()[-3000:]
        time.sleep(0.005)
    launch.kill()
    assert max(evaluations(run)) < END, "it was to be killed before"
    output = train(recipe, *words)
    assert f"the run is complete at step {END}: eval/mean/loss has not become better in 5 evaluations" in output
    undisturbed = train(other, *words)
    assert f"complete at step {END}" in undisturbed and "validation loss" in output
    for folder in (run, tmp_path / "undisturbed/run"):
        assert [step_of(each) for each in complete_checkpoints(folder / "checkpoints")] == [END, FIRST]
    found = evaluations(run)
    assert found == evaluations(tmp_path / "undisturbed/run") and list(found) == [4, 8, 12, 16, 20, 24]
    assert sorted(found.values(), reverse=True) == list(found.values())

    assert main(["ls", str(run)]) == 0
    newest, best = capsys.readouterr().out.splitlines()[1:]
    assert f"complete, best: eval/also/loss {found[FIRST]:.4f}" in best and "best:" not in newest
    assert main(["prune", str(run), "--keep", "1"]) == 0 and "2 checkpoints kept" in capsys.readouterr().out
    assert main(["to-hf", str(run), str(tmp_path / "out"), "--best", "--check", "none"]) == 0
    assert read_trainer(complete_checkpoints(run / "checkpoints")[1])["step"] == FIRST
    again = train(recipe, *words)  # it is complete, and stays so
    assert "step 28" not in again and [event["kind"] for event in rows(run, "events.jsonl")][-1] == "baselines"
