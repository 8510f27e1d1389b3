"""`llmtrain replay --without ... --write`: a run that continues as one that has never seen the row."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from llmtrain import cli
from llmtrain.data.where import documents_of, spans
from llmtrain.tracking.local import read_rows
from tests.features.spikes.test_spikes_runs import GARBAGE, content, event, recipe_with_garbage, steps_of
from tests.helpers import forked
from tests.helpers.launching import environment

END = 400
"""The row comes again before."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, by `llmtrain launch`, has read the garbage."""
    made = tmp_path_factory.mktemp("undo")
    recipe_with_garbage(made, max_steps=180)
    (made / "hosts").write_text("localhost slots=2\n")
    words = ["launch", "--hostfile", str(made / "hosts"), "--", str(made / "recipe.yaml")]
    subprocess.run([sys.executable, "-m", "llmtrain", *words], env=environment(), check=True, stdout=subprocess.DEVNULL)
    return made


@pytest.fixture(scope="module")
def row(folder: Path) -> tuple[int, int]:
    """(step of the spike, sequence with the garbage)."""
    step, (span,) = event(folder / "run")["step"], spans(folder / "run")
    first = span.sequence_at(step - 1)
    (sequence,) = [
        index
        for index in range(first, first + 8)
        if any(line.startswith(f"a.jsonl:{GARBAGE},") for line in documents_of(span, index))
    ]
    return step, sequence


def words_of(folder: Path, step: int, *more: str) -> list[str]:
    return ["replay", str(folder / "run"), "--steps", f"{step - 7}:{step + 3}", "--write", *more]


def kill_at_work(words: list[str], scratch: Path) -> None:
    """Kill the command with SIGKILL, and all that it has started, while it trains."""
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    killed = subprocess.Popen([sys.executable, "-m", "llmtrain", *words], start_new_session=True, **silent)
    until_s = time.monotonic() + 120
    while not (scratch / "run/steps.bin").exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    family = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    killed.wait()
    psutil.wait_procs(family, timeout=20)


@pytest.fixture(scope="module")
def undone(folder: Path, row: tuple[int, int]) -> Path:
    """`new`: without the row and the update after it, trained to END; `control`: as `new` from the first step on."""
    step, sequence = row
    before, scratch = content(folder / "run"), folder / "new-replay"
    words = words_of(
        folder, step, "--without", str(sequence), "--skip", str(step + 1), "--out", os.path.relpath(folder / "new")
    )
    kill_at_work(words, scratch)
    assert not (folder / "new").exists() and (scratch / ".replay").is_file()
    assert cli.main(words) == 0
    assert not scratch.exists() and content(folder / "run") == before
    assert f"run_dir: {folder / 'new'}\n" in (folder / "new/config.yaml").read_text()  # of any current folder
    assert [row.step for row in steps_of(folder / "new")] == list(range(161, step + 4))
    forked.train(folder / "new/config.yaml", f"--train.max_steps={(step + END) // 2}")
    forked.train(folder / "new/config.yaml", f"--train.max_steps={END}")
    forked.train(
        folder / "recipe.yaml",
        f"--train.run_dir={folder / 'control'}",
        f"--data.exclude=[{sequence}]",
        f"--data.skip_steps=[{step + 1}]",
        f"--train.max_steps={END}",
    )
    assert content(folder / "run") == before
    return folder


def test_the_run_continues_as_one_that_has_never_seen_the_row(undone: Path, row: tuple[int, int]) -> None:
    """To the bit, and so 100 steps later and in the next epoch."""
    new, control = steps_of(undone / "new"), steps_of(undone / "control")[160:]
    assert [repr(each) for each in new] == [repr(each) for each in control] and new[-1].step == END
    here, old = new[row[0] - 161], steps_of(undone / "run")[row[0] - 1]
    assert here.loss < 0.9 * old.loss and here.weight < old.weight
    skipped = new[row[0] - 160]
    assert skipped.weight == 0 and skipped.skipped and not new[row[0] - 159].skipped


def test_steps_before_the_new_run_are_in_the_old_one(undone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(undone / "new"), "--steps", "150:165"]) == 2
    assert "--steps 150:165" in capsys.readouterr().err


def test_tokens_checkpoints_and_fingerprint_tell(undone: Path, row: tuple[int, int]) -> None:
    rows = {name: read_rows(undone / name / "metrics.jsonl")[0][-1] for name in ("new", "control")}
    assert rows["new"]["tokens"] == rows["control"]["tokens"] == END * 512 - 512 - 2 * 64
    trainers = [
        json.loads((undone / name / f"checkpoints/step-{step:08d}/trainer.json").read_text())
        for name, step in (("run", 180), ("new", END), ("control", END))
    ]
    old, new, control = (each["data_fingerprint"] for each in trainers)
    assert new == control != old
    assert trainers[1]["data_stages"][-1]["exclude"] == trainers[1]["run"]["data"]["exclude"] == [row[1]]
    assert [each["data_stages"][-1]["next"] for each in trainers] == [180 * 8, END * 8, END * 8]


def test_data_where_tells_which_steps_left_the_document_out(
    undone: Path, row: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    step, sequence = row
    told = {}
    for name in ("run", "new"):
        asked = ["--run", str(undone / name), "--source", f"a.jsonl:{GARBAGE}"]
        assert cli.main(["data", "where", str(undone / "set"), *asked]) == 0
        told[name] = capsys.readouterr().out
    assert f" {step}\n" in told["run"] and "left out" not in told["run"]
    read, left = told["new"].partition("left out of step ")[::2]
    assert f" {step}" not in read and left.startswith(f"{step}, ")  # and once in the next epoch
    assert left.partition(" (")[0].count(",") == 1
    assert cli.main(["data", "where", str(undone / "set"), "--run", str(undone / "new"), "--step", str(step)]) == 0
    assert f"sequence {sequence}, left out\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--without", "12", "--out", "x"), "--without 12"),
        (("--without", "a", "--out", "x"), "--without a"),
        (("--without", "{row}"), "--out NEWRUN"),
        (("--out", "x"), "--out NEWRUN"),
        (("--skip", "3", "--out", "x"), "--skip 3"),
        (("--without", "{row}", "--out", "{here}/run"), "/run: "),
        (("--without", "{row}", "--out", "x", "--plugin", "{here}/own.py"), "plugin own"),
    ],
)
def test_a_wrong_request_is_refused_and_nothing_is_written(
    words: tuple[str, ...],
    message: str,
    folder: Path,
    row: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "own.py").write_text("from llmtrain import Part\n\nclass Own(Part, entry='own'):\n    pass\n")
    monkeypatch.chdir(folder)
    given, before = [word.format(here=folder, row=row[1]) for word in words], sorted(folder.iterdir())
    assert cli.main(words_of(folder, row[0], *given)) == 2
    assert message in capsys.readouterr().err and sorted(folder.iterdir()) == before


def test_data_that_is_gone_or_changed_is_refused(
    folder: Path, row: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    data, before = folder / "set", sorted(folder.iterdir())
    words = words_of(folder, row[0], "--without", str(row[1]), "--out", str(folder / "x"))
    data.rename(folder / "away")
    assert cli.main(words) == 2 and str(data) in capsys.readouterr().err
    assert (
        cli.main(
            [
                "prepare",
                "--source",
                str(folder / "a.jsonl"),
                "--tokenizer",
                str(folder / "away/tokenizer"),
                "--out",
                str(data),
                "--validation-fraction",
                "0.1",
            ]
        )
        == 0
    )
    assert cli.main(words) == 2 and str(data) in capsys.readouterr().err
    data.rename(folder / "other")
    (folder / "away").rename(data)
    assert sorted(folder.iterdir()) == sorted([*before, folder / "other"])


def test_a_sequence_of_a_stage_is_left_out_of_its_own_data(folder: Path) -> None:
    """The first stage has a sequence of the same number."""
    given = ["--source", str(folder / "a.jsonl"), "--tokenizer", str(folder / "set/tokenizer")]
    assert cli.main(["prepare", *given, "--out", str(folder / "later"), "--validation-fraction", "0.3"]) == 0
    words = [f"--train.run_dir={folder / 'staged'}", "--train.max_steps=30", "--checkpoint.every_steps=10"]
    forked.train(
        folder / "recipe.yaml",
        *words,
        "--checkpoint.keep=9",
        f"--data.stages=[{{from_step: 20, path: {folder / 'later'}}}]",
    )
    out = folder / "staged-2"
    asked = ["replay", str(folder / "staged"), "--steps", "22:26", "--write", "--out", str(out), "--without"]
    assert cli.main([*asked, "25"]) == 0
    data = yaml.safe_load((out / "config.yaml").read_text())["data"]
    assert data["exclude"] is None and data["stages"][0]["exclude"] == [25]
    before, after = steps_of(folder / "staged")[20:26], steps_of(out)
    assert [one.step for one, other in zip(before, after, strict=True) if one.weight != other.weight] == [24]
    asked[1], asked[6] = str(out), str(folder / "staged-3")
    assert cli.main([*asked, "25"]) == 2 and cli.main([*asked, "26"]) == 0
    stages = yaml.safe_load((folder / "staged-3/config.yaml").read_text())["data"]["stages"]
    assert stages[0]["exclude"] == [25, 26]
    weights = [[row.weight for row in steps_of(path)] for path in (out, folder / "staged-3")]
    assert [one == other for one, other in zip(*weights, strict=True)] == [True] * 3 + [False] + [True] * 2
