"""The course of a run: faults of stages, schedules and resumes that trainings of a small copy do not show."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from llmtrain.config.load import parse
from llmtrain.config.stages import Stages
from llmtrain.data.stream.loader import Course
from llmtrain.parity import worlds
from llmtrain.parity.small_run import wanted
from llmtrain.parity.untrained import compare_course
from llmtrain.training.reporting import StageBorders
from tests.helpers.config_workplace import write

LINEAR = {"name": "linear", "warmup_steps": 2, "min_ratio": 0}
STAGES: list[dict[str, Any]] = [
    {"from_step": 30, "path": "data/y", "train": {"global_batch": 16}},
    {"from_step": 50, "path": "./data/x", "schedule": LINEAR},
    {"from_step": 70, "sequence_length": 256, "rope": {"rope_theta": 5e5}, "train": {"accumulation": 1}},
    {
        "from_step": 80,
        "mixture": {"data/x": 3.0},
        "sequence_length": 128,
        "rope": {"rope_type": "linear", "factor": 2.0},
    },
]


def course_of(folder: Path, stages: Any, *words: str, **sections: Any) -> tuple[list[str], bool]:
    write(folder, {"data": {"stages": stages}, **sections})
    parsed = parse(["--config", "run.yaml", *words], check_paths=False)
    return compare_course(wanted(parsed.config, parsed.places), [2])


def late_border(stages: Stages, step: int, right: Callable[..., int] = Stages.number) -> int:
    return right(stages, max(0, step - 1))


def from_its_beginning(course: Course, stage: int, step: int) -> int:
    return course.stages.sequences(step, [stage])


def from_the_runs_beginning(stages: Stages, step: int, max_steps: int | None) -> float:
    return stages.at(step).schedule.factor(step, stages.schedule_end(step, max_steps))


def late_rope(borders: StageBorders, right: Callable[..., Any] = StageBorders.request) -> Any:
    borders._step = max(0, borders._step - 1)
    return right(borders)


def resumed_a_batch_on(course: Course, step: int, index: int, right: Callable[..., Any] = Course.record) -> Any:
    return right(course, step, index + course.at(step).batch.global_batch)


FAULTS = {
    "a border one step late": (Stages, "number", late_border, "step 31: data of stage 0, by its definition 1"),
    "data used again from 0": (Course, "_index", from_its_beginning, "step 51: sequence 0, by its definition 240"),
    "a schedule from the run's beginning": (Stages, "factor", from_the_runs_beginning, "step 51: rate"),
    "a rope one step late": (StageBorders, "request", late_rope, "step 71: rope {}, by its definition {'rope_theta'"),
    "a resume one batch on": (Course, "record", resumed_a_batch_on, "step 2, resumed at 1: sequence"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert course_of(tmp_path, STAGES)[1]
    owner, name, faulty, told = FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty)
    lines, same = course_of(tmp_path, STAGES)
    assert not same and lines[0].startswith("  FAIL  course: 100 steps, 5 stages") and told in "\n".join(lines), lines


def test_the_command_compares_the_course_and_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"data": {"stages": STAGES}})
    monkeypatch.setattr(worlds.AgainstPlain, "of_ranks", lambda *_: worlds.SAME)  # no ranks
    assert main(["parity", "run.yaml", "--ranks", "2"]) == 0
    told = capsys.readouterr().out
    assert "PASS  course: 100 steps, 5 stages" in told
    assert "not trained here: stages, evaluation, " in told
    monkeypatch.setattr(StageBorders, "request", late_rope)
    assert main(["parity", "run.yaml", "--ranks", "2"]) == 1
    assert "FAIL  course" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"schedule": {"name": "wsd", "warmup_steps": 3}}, ()),
        ({"schedule": {"name": "wsd", "decay_steps": 1}, "train": {"max_steps": 1}}, ()),
        ({"schedule": {"name": "constant"}}, ("--train.max_steps", "null", "--train.max_minutes", "5")),
        ({"train": {"max_steps": ..., "max_tokens": 50_000}}, ()),
        ({"train": {"max_steps": ..., "epochs": 3}}, ()),
    ],
    ids=str,
)
def test_the_course_of_runs_of_other_lengths_and_schedules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines, same = course_of(tmp_path, [], *words, **sections)
    assert same and "PASS" in lines[0], lines


POLY = """
from dataclasses import dataclass
from llmtrain import Schedule
from llmtrain.optim.schedules import Linear

@dataclass(frozen=True, kw_only=True)
class Poly(Schedule, choice="poly"):
    def after_warmup(self, step, max_steps):
        return (1 - step / (max_steps + 1)) ** 2

@dataclass(frozen=True, kw_only=True)
class Bent(Linear, choice="bent"):
    def shape(self, progress):
        return 1 - progress**2
"""


@pytest.mark.parametrize("name", ["poly", "bent"])
def test_the_definition_of_a_plugins_schedule_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Also of one that is not 1 after its warm-up, or that derives from one of ours."""
    monkeypatch.chdir(tmp_path)
    Path("poly.py").write_text(POLY)
    write(tmp_path, {"schedule": {"name": "constant"}})
    monkeypatch.setattr(worlds.AgainstPlain, "of_ranks", lambda *_: worlds.SAME)  # no ranks
    words = ["--plugin", "poly.py", "--schedule.name", name, "--schedule.warmup_steps", "3"]
    assert main(["parity", "run.yaml", "--ranks", "2", *words]) == 0, capsys.readouterr().out
    assert "PASS  course: 100 steps" in capsys.readouterr().out


def test_a_batch_that_the_tried_ranks_cannot_have_and_a_long_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 steps take 1 s of CPU; 10 allow for another machine."""
    monkeypatch.chdir(tmp_path)
    began_s = time.process_time()
    train = {"global_batch": 64, "micro_batch": 2, "accumulation": 2, "max_steps": 100_000}
    lines, same = course_of(tmp_path, [{"from_step": 90_000, "path": "data/y", "schedule": LINEAR}], train=train)
    assert same and "100000 steps" in lines[0], lines
    assert time.process_time() - began_s < 10
    lines, same = course_of(tmp_path, [], train=train | {"global_batch": 63})
    assert same and "not compared" in lines[0]
