"""docs/evaluation.md: its YAML trains and its commands run; a run with it is killed and resumed, beside an undisturbed
one."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.checkpoint.format import complete_checkpoints, step_of
from llmtrain.commands.checkpoint import main
from tests.helpers.config_workplace import merged
from tests.helpers.forked import Launch, train
from tests.helpers.launching import REPO, rows, write_recipe

PAGE = (REPO / "docs/evaluation.md").read_text()
SETTINGS = (
    *("--train.eval_every", "4", "--train.log_every", "4", "--checkpoint.every_steps", "5", "--checkpoint.keep", "1"),
    *("--schedule.name", "constant", "--eval.sequences.wiki", "6"),
    # The loss falls from evaluation to evaluation: the first one is the largest, and no later one is better.
    *("--checkpoint.keep_best.mode", "max", "--train.stop_early.mode", "max", "--train.stop_early.patience", "5"),
)
FIRST, END = 4, 24


def page_as_yaml(folder: Path, data: str) -> Path:
    """The YAML blocks of the page as one, on small data. test_multiple_choice.py has those of multiple choice."""
    tree: dict[str, Any] = {}
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S):
        if "choices" not in block:
            tree = merged(tree, yaml.safe_load(block))
    tree["eval"]["sets"] = dict.fromkeys(tree["eval"]["sets"], data)
    (folder / "page.yaml").write_text(yaml.safe_dump(tree))
    return folder / "page.yaml"


def evaluations(run: Path) -> dict[int, float]:
    return {row["step"]: row["eval/wiki/loss"] for row in rows(run) if "eval/wiki/loss" in row}


@pytest.mark.timeout(300)
def test_the_page_runs_and_its_decisions_survive_a_kill(
    small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", str(page_as_yaml(tmp_path, small_data)), *SETTINGS)
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
    assert re.search(rf"complete at step {END}: eval/wiki/loss .*\b0\.01 in 5 evaluations", output), output
    assert f"complete at step {END}" in train(other, *words)
    for folder in (run, tmp_path / "undisturbed/run"):
        assert [step_of(each) for each in complete_checkpoints(folder / "checkpoints")] == [END, FIRST]
    found = evaluations(run)
    assert found == evaluations(tmp_path / "undisturbed/run") and list(found) == [4, 8, 12, 16, 20, 24]
    assert sorted(found.values(), reverse=True) == list(found.values())
    train(recipe, *words, world_size=1)  # all is done, and what it measures again is in the file
    assert [row["step"] for row in rows(run) if "eval/wiki/loss" in row] == list(found)

    [block] = re.findall(r"```bash\n(llmtrain checkpoint .*?)```", PAGE, re.S)
    for line in block.splitlines():
        told = line.replace("runs/mine", str(run)).replace(" out ", f" {tmp_path / 'out'} ").partition("#")[0]
        assert main(shlex.split(told)[2:]) == 0
        if " ls " in told:
            newest, best = capsys.readouterr().out.splitlines()[1:]
            assert f"complete, best: eval/wiki/loss {found[FIRST]:.4f}" in best and "best:" not in newest
    assert (tmp_path / "out/model.safetensors").is_file()
    assert main(["prune", str(run), "--keep", "1"]) == 0 and re.search(r"\b2 checkpoints", capsys.readouterr().out)
    again = train(recipe, *words)  # it is complete, and stays so
    stops = [event["complete"] for event in rows(run, "events.jsonl") if event["kind"] == "stop"]
    assert "step 28" not in again and len(stops) > 1 and stops[-1]
