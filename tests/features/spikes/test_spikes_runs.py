"""A run with a document of garbage: its steps are recorded, its spike is reported, a checkpoint before it stays, and a
replay names the document."""

from __future__ import annotations

import errno
import hashlib
import html
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain import cli
from llmtrain.base.errors import CheckpointError
from llmtrain.commands.prepare import main as prepare
from llmtrain.features.spikes.steps import StepRow, read_steps
from llmtrain.tracking.local import read_rows
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


def recipe_with_garbage(folder: Path, max_steps: int, every_steps: int = 20) -> Path:
    data = prepare_text(folder)
    return write_run(
        folder,
        str(data),
        {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0},
        {"global_batch": 8, "micro_batch": 2, "max_steps": max_steps, "log_every": 10, "eval": False, "export": False},
        data={"path": str(data), "sequence_length": 64},
        optim={"lr": 1e-3},
        checkpoint={"every_steps": every_steps, "keep": 1},
    )


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`: two launches of 2 ranks, in the second of which the garbage is read."""
    folder = tmp_path_factory.mktemp("spiked")
    path = recipe_with_garbage(folder, max_steps=190, every_steps=15)
    forked.train(path, "--train.max_steps=120")
    record = (folder / "run/steps.bin").read_bytes()
    (folder / "run/steps.bin").write_bytes(record[:224] + b"odd." + record[224:])  # between the rows of steps 4 and 5
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
    (damage,) = [row for row in read_rows(spiked / "run/events.jsonl")[0] if row["kind"] == "record_damaged"]
    assert damage["text"] in (spiked / "log").read_text() and (spiked / "run/steps.bin.damaged").exists()
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
    kept = (worst.step - 1) // 15 * 15
    first, last = max(worst.step - 7, kept + 1), worst.step + 3
    assert worst.step - 7 <= kept  # an older one is gone: what begins before it would be trained from the beginning
    assert spike["replay"] == f"llmtrain replay {run} --steps {first}:{last}"
    assert spike["replay"] in (spiked / "log").read_text()


def test_the_newest_checkpoint_before_the_spike_is_kept(spiked: Path) -> None:
    spike = event(spiked / "run")["step"]
    kept = f"step-{(spike - 1) // 15 * 15:08d}"
    found = sorted(path.name for path in (spiked / "run/checkpoints").glob("step-*"))
    assert found == [kept, "step-00000190"]


def content(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def replayed(spiked: Path) -> tuple[dict[str, Any], bool]:
    """(answer of the command that the event names, True if the run's folder is as before). A first replay is killed
    while it looks at steps, and takes its ranks with it."""
    before, words = content(spiked / "run"), shlex.split(event(spiked / "run")["replay"])[1:]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    killed = subprocess.Popen([sys.executable, "-m", "llmtrain", *words], start_new_session=True, **silent)
    until_s = time.monotonic() + 120
    while not list(spiked.glob("run-replay-*/run/replay.jsonl")) and time.monotonic() < until_s:
        time.sleep(0.1)
    family = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.wait()
    assert psutil.wait_procs(family, timeout=30)[1] == []
    (stopped,) = spiked.glob("run-replay-*/run")
    assert steps_of(stopped)[-1].step < event(spiked / "run")["step"] + 3
    assert content(spiked / "run") == before and not list(spiked.glob("run-replay-*/answer.json"))
    assert cli.main(words) == 0
    (folder,) = spiked.glob("run-replay-*")
    return json.loads((folder / "answer.json").read_text()), content(spiked / "run") == before


def test_a_replay_is_equal_to_the_bit_and_only_reads_the_run(replayed: tuple[dict[str, Any], bool]) -> None:
    answer, same = replayed
    assert same and answer["exact"] and answer["equal"]
    assert len(answer["steps"]) == answer["last"] - answer["first"] + 1 > 4
    assert all(each["equal"] and each["apart"] == 0 for each in answer["steps"])


def test_the_worst_row_is_named_with_its_document(spiked: Path, replayed: tuple[dict[str, Any], bool]) -> None:
    worst, second = replayed[0]["rows"][:2]
    assert worst["step"] == event(spiked / "run")["step"]
    assert any(line.startswith(f"a.jsonl:{GARBAGE}, ") for line in worst["documents"])
    assert worst["norm"] > 4 * second["norm"] and worst["share"] > 0.8 and worst["loss"] > second["loss"]


def test_the_page_shows_the_row_and_no_markup_of_the_data(spiked: Path, replayed: tuple[dict[str, Any], bool]) -> None:
    (folder,) = spiked.glob("run-replay-*")
    page = (folder / "replay.html").read_text()
    assert f"a.jsonl:{GARBAGE}" in page and page.count("<svg") == 2
    garbage = next(line for line in replayed[0]["rows"][0]["documents"] if f":{GARBAGE}, " in line)
    assert ">" in garbage and garbage not in page and html.escape(garbage) in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "9"), "--steps 9"),
        (("--steps", "12:9"), "--steps 12:9"),
        (("--steps", "180:250"), "--steps 180:250"),
        (("--steps", "5:9", "--rows", "0"), "--rows 0"),
        (("--steps", "5:9", "--one-rank", "--skip", "5", "--write", "--out", "{here}/new"), "--write"),
        (("--steps", "5:9", "--out", "{here}/run/inside"), "run/inside: "),
        (("--steps", "5:9", "--out", "{here}/set"), "/set: "),
    ],
)
def test_a_wrong_request_is_refused_and_nothing_is_written(
    words: tuple[str, ...], message: str, spiked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, before = [word.format(here=spiked) for word in words], sorted(spiked.iterdir())
    assert cli.main(["replay", str(spiked / "run"), *given]) == 2
    assert message in capsys.readouterr().err and sorted(spiked.iterdir()) == before


def test_a_folder_without_a_run_is_refused(spiked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(tmp_path), "--steps", "1:2"]) == 2
    assert f"{tmp_path}" in capsys.readouterr().err
    for name in ("deepspeed.json", "steps.bin"):
        shutil.copy(spiked / "run" / name, tmp_path)
    (tmp_path / "config.yaml").write_text("model: {}\n")
    assert cli.main(["replay", str(tmp_path), "--steps", "1:2"]) == 2
    assert f"{tmp_path}/config.yaml: " in capsys.readouterr().err


def test_a_foreign_event_is_refused_with_its_line(
    spiked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.yaml", "deepspeed.json", "steps.bin", "events.jsonl"):
        shutil.copy(spiked / "run" / name, tmp_path)
    leaves_out = ("--steps", "5:9", "--without", "40", "--write", "--out", str(tmp_path / "new"))
    for foreign in ({"data": 5}, {"step": 3, "data": 5}, {"step": 3, "data": {"pages": 1}}, {"step": []}):
        (tmp_path / "events.jsonl").write_bytes((spiked / "run/events.jsonl").read_bytes())
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "reads", **foreign}) + "\n")
        assert cli.main(["replay", str(tmp_path), *leaves_out]) == 2
        told = capsys.readouterr().err
        assert "events.jsonl: " in told and str({"kind": "reads", **foreign}) in told


@pytest.mark.parametrize("parallel", [{}, {"tensor_parallel": {"autotp_size": 2}}, {"pipeline": {"stages": 2}}])
def test_one_rank_trains_the_steps_of_two(
    spiked: Path, parallel: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "train_batch_size": 8, **parallel})
    )
    forked.train(
        spiked / "recipe.yaml",
        f"--train.run_dir={run}",
        f"--deepspeed={tmp_path / 'ds.json'}",
        "--train.max_steps=8",
        "--checkpoint.every_steps=2",
        "--checkpoint.keep=9",
        "--data.stages=[{from_step: 4, train: {global_batch: 4, micro_batch: 1}}]",
    )
    assert cli.main(["replay", str(run), "--steps", "4:6", "--one-rank", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["equal"] and not answer["exact"] and len(answer["rows"]) == 8 + 2 * 4
    assert 0 < max(each["apart"] for each in answer["steps"]) < 1e-5  # another order of sums
    (degrees,) = [
        row["degrees"]
        for row in read_rows(Path(answer["folder"]) / "run/events.jsonl")[0]
        if row["kind"] == "reads" and row["step"] == 2
    ]
    assert set(degrees.values()) == {1}


def test_a_replay_that_was_stopped_has_no_answer(spiked: Path, tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    words = ["replay", str(spiked / "run"), "--steps", "1:120", "--one-rank", "--out", str(out)]
    asked = subprocess.Popen([sys.executable, "-m", "llmtrain", *words], stderr=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 120
    while not (out / "run/replay.jsonl").exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    (child,) = psutil.Process(asked.pid).children()
    child.terminate()
    error = asked.communicate()[1]
    assert asked.returncode == 3 and re.search(r"\bstep \d+.*\b120\b", error), error
    assert not (out / "answer.json").exists()


def test_done_lets_go_of_the_checkpoint(
    spiked: Path, replayed: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = event(spiked / "run")["step"]

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        assert cli.main(["replay", str(spiked / "run"), "--done"]) == CheckpointError.exit_code
    assert os.strerror(errno.EROFS) in capsys.readouterr().err
    assert cli.main(["replay", str(spiked / "run"), "--done"]) == 0
    assert f"steps of the spikes: {step}" in capsys.readouterr().out
    assert json.loads((spiked / "run/checkpoints/spikes.json").read_text()) == []


def test_an_outlier_is_left_out_on_all_ranks(spiked: Path) -> None:
    """One step has no update, and the steps before it have the figures of the run without the setting."""
    run = spiked / "skipping"
    words = [
        f"--train.run_dir={run}",
        "--train.max_steps=180",
        "--spikes.skip_outliers=8",
        "--checkpoint.keep=9",
    ]
    log = forked.train(spiked / "recipe.yaml", *words)
    left = [row.step for row in steps_of(run) if row.left_out]
    spike = event(spiked / "run")["step"]
    assert left == [spike] and f"step {spike}: the update is left out" in log
    assert steps_of(run)[: spike - 1] == steps_of(spiked / "run")[: spike - 1]
    last = read_rows(run / "metrics.jsonl")[0][-1]
    assert last["step"] == 180 and last["skipped_steps"] == 1
    (skip,) = [row for row in read_rows(run / "events.jsonl")[0] if row["kind"] == "skip"]
    assert skip["what"] == "outlier" and skip["step"] == spike and len(skip["samples"]) == 8

    # A resume in another folder has too few steps of its own for a verdict.
    begins = (spike - 1) // 15 * 15
    assert spike - begins < 20
    words[0] = f"--train.run_dir={spiked / 'resumed'}"
    forked.train(spiked / "recipe.yaml", *words, f"--resume={run / 'checkpoints' / f'step-{begins:08d}'}")
    assert steps_of(spiked / "resumed") == steps_of(run)[begins:]
    assert cli.main(["replay", str(run), "--steps", f"{spike - 1}:{spike + 2}", "--rows", "1"]) == 0
    (again,) = spiked.glob("skipping-replay-*")
    assert [row.step for row in steps_of(again / "run") if row.left_out] == [spike]


def test_the_first_step_of_a_stage_is_no_outlier(spiked: Path) -> None:
    """Its loss is compared with that of other data."""
    draw, other, run = random.Random(2), spiked / "other", spiked / "staged"
    (spiked / "b.jsonl").write_text(
        "".join(
            json.dumps({"text": "".join(draw.choice("~^|@#{}$%&*<>=+;`") for _ in range(400))}) + "\n"
            for _ in range(400)
        )
    )
    given = ["--source", str(spiked / "b.jsonl"), "--tokenizer", str(spiked / "set/tokenizer"), "--out", str(other)]
    assert prepare(given) == 0
    words = [
        f"--train.run_dir={run}",
        "--train.max_steps=124",
        "--spikes.skip_outliers=8",
        "--checkpoint.every_steps=124",
    ]
    forked.train(spiked / "recipe.yaml", *words, f"--data.stages=[{{from_step: 120, path: {other}}}]")
    steps = steps_of(run)
    assert steps[120].loss > 1.5 * steps[119].loss and not any(row.left_out for row in steps)
