"""docs/evaluation.md as it stands there: multiple choice in a run, and the same by `llmtrain eval` from its export."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.forked import train
from tests.helpers.launching import REPO, environment, rows, write_recipe
from tests.helpers.questions import questions
from tests.helpers.wandb_files import read_back
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


@pytest.mark.needs("lm_eval")
@pytest.mark.timeout(300)
def test_lm_eval_finds_in_the_export_what_the_run_has_measured(place: tuple[Path, str]) -> None:
    """The accuracies are counts of questions: equal. HFLM reads as many tokens as the run does."""
    folder, _ = place
    run = folder / "runs/mine"
    config = json.loads((run / "export/config.json").read_text())
    (run / "export/config.json").write_text(json.dumps({**config, "max_position_embeddings": LENGTH}))
    done = subprocess.run(shlex.split(SCORES), cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = [row for row in rows(run) if "eval/mine/accuracy" in row][-1]
    told = rows(run)[-1]
    assert told["step"] == STEPS
    for name, own in (("acc", "accuracy"), ("acc_norm", "accuracy_norm")):
        assert told[f"tasks/mine/{name}"] == pytest.approx(measured[f"eval/mine/{own}"], abs=1e-6)
        assert re.search(rf"^mine +{name} +{told[f'tasks/mine/{name}']:.4f} +0\.\d+$", done.stdout, re.M), done.stdout
    event = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (event["kind"], event["step"], event["tasks"]) == ("tasks", STEPS, ["mine"])
    earlier = [*shlex.split(SCORES), "--best", "--limit", "3"]
    done = subprocess.run(earlier, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "step 2, and to W&B" in done.stderr, done.stderr
    assert rows(run)[-1]["step"] == 2
    sent = [row for folder in run.glob("wandb/offline-run-*") for row in read_back(folder)["rows"]]
    given = [(row["step"], row["tasks/mine/acc"]) for row in sent if "tasks/mine/acc" in row]
    assert sorted(given) == [(row["step"], row["tasks/mine/acc"]) for row in (rows(run)[-1], told)]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["{run}", "--tasks", "mined", "--include-path", "{tasks}"], "there is no such task; did you mean mine?"),
        (["{run}", "--tasks", "mine", "--include-path", "none"], "--include-path none: is no folder"),
        (["{run}", "--tasks", "mine", "--checkpoint", "7"], "step-7: no such folder"),
    ],
)
@pytest.mark.needs("lm_eval")
def test_what_cannot_be_scored_is_said_in_a_sentence(place: tuple[Path, str], words: list[str], text: str) -> None:
    folder, _ = place
    given = [word.format(run=folder / "runs/mine", tasks=folder / "tasks") for word in words]
    done = subprocess.run(["llmtrain", "eval", *given], env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_without_lm_eval_the_remedy_is_named() -> None:
    code = "import sys; sys.modules['lm_eval'] = None; from llmtrain.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "eval", "runs/x", "--tasks", "hellaswag"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: llmtrain eval: the scores are lm-eval's, which is not installed here")
    assert "pip install 'llmtrain[eval]'" in done.stderr
