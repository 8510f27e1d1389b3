"""docs/evaluation.md as it stands there: multiple choice in a run."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helpers.forked import train
from tests.helpers.launching import REPO, rows, write_recipe
from tests.helpers.questions import questions
from tests.helpers.warm import WarmCommands

PAGE = (REPO / "docs/evaluation.md").read_text()
PREPARES, SCORES, *_ = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
_, CHOICES, TASK, *_ = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S))
STEPS, LENGTH = 4, 96


@pytest.fixture(scope="module")
def place(small_data: str, tmp_path_factory: pytest.TempPathFactory, warm: WarmCommands) -> tuple[Path, str]:
    """(a folder with runs/mine, trained on two ranks; what it printed)"""
    folder = tmp_path_factory.mktemp("choices")
    (folder / "data").mkdir()
    (folder / "data/stdlib").symlink_to(small_data)
    (folder / "examples").symlink_to(REPO / "examples")
    (folder / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in questions()))
    done = subprocess.run(["bash", "-ec", PREPARES], cwd=folder, env=warm.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "data/mine: 24 questions, 84 choices" in done.stdout
    (folder / "tasks").mkdir()
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}}
    (folder / "tasks/mine.yaml").write_text(yaml.safe_dump(task))
    recipe = write_recipe(folder, small_data, "runs/mine")
    recipe.write_text(recipe.read_text().replace("disabled", "offline"))
    with recipe.open("a") as file:
        named = {name: str(folder / path) for name, path in CHOICES["eval"]["choices"].items()}
        file.write(yaml.safe_dump({"eval": {"choices": named}}))
    words = ["--train.max_steps", str(STEPS), "--train.eval_every", "2", "--checkpoint.every_steps", "2"]
    words += ["--checkpoint.keep_best.metric", "eval/mine/bits_per_byte", "--checkpoint.keep_best.mode", "max"]
    return folder, train(recipe, *words, "--data.sequence_length", str(LENGTH), "--train.export", "true")


@pytest.mark.timeout(300)
def test_a_run_measures_its_multiple_choice(place: tuple[Path, str]) -> None:
    folder, output = place
    found = [row for row in rows(folder / "runs/mine") if "eval/mine/accuracy" in row]
    assert [row["step"] for row in found] == [2, STEPS]
    for row in found:
        for name in ("mine", "pydoc"):
            assert 0 < row[f"eval/{name}/accuracy"] < 1 and 0 < row[f"eval/{name}/accuracy_norm"] < 1
            assert 1 < row[f"eval/{name}/bits_per_byte"] < 9
    last = found[-1]
    shown = f"mine accuracy {last['eval/mine/accuracy']:.1%}, normalised {last['eval/mine/accuracy_norm']:.1%}"
    assert f"step {STEPS}/{STEPS}  {shown}" in output and "without a documented meaning" not in output
    cut = rf"eval\.choices\.mine: \d+ of 84 choices with their question have more than data\.sequence_length {LENGTH}"
    assert re.search(cut, output)
