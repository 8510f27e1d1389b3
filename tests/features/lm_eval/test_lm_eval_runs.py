"""docs/evaluation.md as it stands there: `llmtrain eval` finds in a run's export what the run has measured."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.tracking.metrics import metric_of
from tests.helpers.launching import environment, rows
from tests.runs.test_multiple_choice import LENGTH, SCORES, STEPS


@pytest.mark.needs("lm_eval")
@pytest.mark.timeout(300)
def test_lm_eval_finds_in_the_export_what_the_run_has_measured(place: tuple[Path, str]) -> None:
    """The accuracies are counts of questions: equal. HFLM reads as many tokens as the run does."""
    folder, _ = place
    run, env = folder / "runs/mine", environment(WANDB_MODE="offline")
    config = json.loads((run / "export/config.json").read_text())
    (run / "export/config.json").write_text(json.dumps({**config, "max_position_embeddings": LENGTH}))
    done = subprocess.run(shlex.split(SCORES), cwd=folder, env=env, capture_output=True, text=True)
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
    done = subprocess.run(earlier, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "step 2" in done.stderr, done.stderr
    assert rows(run)[-1]["step"] == 2
    read_back = pytest.importorskip("tests.features.wandb.wandb_files").read_back
    sent = [row for folder in run.glob("wandb/offline-run-*") for row in read_back(folder)["rows"]]
    given = [(row["step"], row["tasks/mine/acc"]) for row in sent if "tasks/mine/acc" in row]
    assert sorted(given) == [(row["step"], row["tasks/mine/acc"]) for row in (rows(run)[-1], told)]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["{run}", "--tasks", "mined", "--include-path", "{tasks}"], "mine?"),
        (["{run}", "--tasks", "mine", "--include-path", "none"], "--include-path none: "),
        (["{run}", "--tasks", "mine", "--checkpoint", "7"], "step-7: "),
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
    assert done.returncode == 2 and done.stderr.startswith("error: llmtrain eval: ")
    assert "'llmtrain[eval]'" in done.stderr


def test_a_score_has_the_unit_of_its_harness() -> None:
    assert getattr(metric_of("tasks/arc/acc"), "unit", None) == "as lm-eval"
