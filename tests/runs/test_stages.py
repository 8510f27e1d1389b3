"""Runs in stages as a user has them: kills around borders, other data from a checkpoint, branches, what is said."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain import cli
from llmtrain.checkpoint.format import complete_checkpoints, step_folder
from tests.helpers import forked
from tests.helpers.forked import Launch
from tests.helpers.launching import losses, rows, write_recipe
from tests.helpers.preference import prepared_preferences
from tests.runs.test_first_step import base, late_by_one, recipe, refused, write_column  # noqa: F401  # base: a fixture

CONSTANT = ("--schedule.name", "constant")
LONGER = {"sequence_length": 64, "train": {"global_batch": 4}}
SHORTER = {"sequence_length": 32, "train": {"global_batch": 16}}


def staged(folder: Path, data: str, stages: list[dict[str, Any]], steps: int, name: str = "run") -> Path:
    """A recipe with these stages, whose run folder is folder/name."""
    folder.mkdir(exist_ok=True)
    path = write_recipe(folder, data, name)
    tree = yaml.safe_load(path.read_text())
    tree["data"]["stages"], tree["train"]["max_steps"] = stages, steps
    path = path.with_name(f"{name}.yaml")
    path.write_text(json.dumps(tree))  # YAML, too, and without anchors
    return path


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in rows(run, "events.jsonl") if event["kind"] == kind]


@pytest.mark.parametrize("trials", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_kills_around_borders_change_no_digit(small_data, other_data, tmp_path, trials):
    """A border every 4 steps: other data, another length and batch. Each kill is within two steps of one."""
    rng = random.Random(trials)
    borders = [4 * (number + 1) for number in range(trials)]
    paths = [other_data, small_data]
    stages = [
        {"from_step": border, "path": paths[n % 2], **(LONGER, SHORTER, {})[n % 3]} for n, border in enumerate(borders)
    ]
    steps = borders[-1] + 3
    broken, whole = (staged(tmp_path / name, small_data, stages, steps) for name in ("broken", "whole"))
    often = (*CONSTANT, "--checkpoint.every_steps", "1")
    run = tmp_path / "broken" / "run"
    for border in borders:
        launch = Launch(broken, *often)
        at, deadline = border - 2 + rng.randrange(3), time.monotonic() + 90
        while max(losses(run), default=0) < at:
            assert time.monotonic() < deadline and launch.alive(), launch.output()[-3000:]
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.1))
        launch.kill()
    assert Launch(broken, *often).wait(120) == [0, 0]
    forked.train(whole, *often)
    want = tmp_path / "whole" / "run"
    assert len(losses(want)) == steps and losses(run) == losses(want)
    told = [
        {row["step"]: (row["tokens"], row["data/stage"]) for row in rows(each) if "loss" in row} for each in (run, want)
    ]
    assert told[0] == told[1]
    assert [stage for _, stage in told[1].values()] == [sum(n >= border for border in borders) for n in range(steps)]


@pytest.fixture(scope="module")
def trained(small_data, other_data, tmp_path_factory) -> Path:
    """A folder with a run of 4 steps in `first`, and one of 8 whose data is another from step 4 on in `staged`."""
    folder = tmp_path_factory.mktemp("stages")
    forked.train(staged(folder, small_data, [], 4, "first"), *CONSTANT, world_size=1)
    one = staged(folder, small_data, [{"from_step": 4, "path": other_data}], 8, "staged")
    forked.train(one, *CONSTANT, world_size=1)
    return folder


def test_other_data_goes_on_from_a_checkpoint(trained, small_data, other_data, capsys):
    """As the stage of a run does, to the last digit: parameters, moments, step and schedule are kept. The same command
    again goes on within the other data; another branch goes back to where the first data was left."""
    first, branch = trained / "first", trained / "branch"
    words = ("--resume", str(first), "--data.path", other_data, "--train.run_dir", str(branch))
    recipe = trained / "first.yaml"
    code, output = forked.finish(recipe, *CONSTANT, *words, world_size=1)
    assert code == 2 and "Traceback" not in output and "data_fingerprint" in output
    assert "--resume_data new" in output and "from step 4" in output
    for steps in ("6", "8"):
        output = forked.finish(
            recipe, *CONSTANT, *words, "--resume_data", "new", "--train.max_steps", steps, world_size=1
        )[1]
        at, index = {"6": (4, 0), "8": (6, 16)}[steps]
        assert f"stage 1 at step {at}: {other_data} from sequence {index}, 256 tokens a step" in output, output
    want = losses(trained / "staged")
    assert losses(branch) == {step: loss for step, loss in want.items() if step > 4} and len(want) == 8
    ids = [
        json.loads((complete_checkpoints(run / "checkpoints")[0] / "trainer.json").read_text())["run_id"]
        for run in (first, branch)
    ]
    assert ids[0] != ids[1]
    last = [[row["eval/loss"] for row in rows(run) if "eval/loss" in row][-1] for run in (branch, trained / "staged")]
    assert last[0] == last[1]  # a run that knows the other data alone: evaluation is of the stage's data
    capsys.readouterr()
    assert cli.main(["checkpoint", "ls", str(branch)]) == 0
    head, newest, *_ = capsys.readouterr().out.splitlines()
    assert "STAGE" in head and "FROM" in head and f"1: {other_data}" in newest and "first/step-4" in newest

    back = ("--resume", str(branch), "--resume_data", "new", "--train.run_dir", str(trained / "back"))
    output = forked.finish(recipe, *CONSTANT, *back, "--train.max_steps", "9", world_size=1)[1]
    assert f"stage 2 at step 8: {small_data} from sequence 32" in output, output


def test_rotary_positions_change_at_a_border_and_are_exported(small_data, tmp_path):
    """A checkpoint at the border is of the stage before it; a resume in the stage has its own, to the last digit."""
    stages = [{"from_step": 2, "sequence_length": 64, "rope": {"rope_theta": 50.0}}]
    path = staged(tmp_path, small_data, stages, 5)
    every = ("--checkpoint.every_steps", "1", "--checkpoint.keep", "9", "--model.config.max_position_embeddings", "48")
    output = forked.train(path, *CONSTANT, *every, "--train.export", "true", world_size=1)
    assert 'rope {"rope_theta": 50.0}' in output
    run, again = tmp_path / "run", tmp_path / "again"
    told = {}
    for step in (2, 3):
        state = json.loads((step_folder(run / "checkpoints", step) / "trainer.json").read_text())
        told[step] = [
            state["model_config"]["rope_parameters"]["rope_theta"],
            state["model_config"]["max_position_embeddings"],
        ]
    assert told == {2: [10000.0, 48], 3: [50.0, 64]}
    exported = json.loads((run / "export" / "config.json").read_text())
    assert exported["rope_parameters"]["rope_theta"] == 50.0 and exported["max_position_embeddings"] == 64
    words = (*CONSTANT, *every, "--resume", str(run / "checkpoints/step-00000003"), "--train.run_dir", str(again))
    forked.train(path, *words, world_size=1)
    want = losses(run)
    assert losses(again) == {4: want[4], 5: want[5]}
    flat = ("--data.stages", "[{from_step: 2, sequence_length: 64}]")
    code, output = forked.finish(path, *words[:-1], str(tmp_path / "flat"), *flat, world_size=1)
    assert code == 2 and "rope_parameters.rope_theta: 50.0 -> 10000.0" in output and "data.stages" in output


def test_the_report_shows_where_a_stage_begins(trained):
    assert cli.main(["report", str(trained / "staged")]) == 0
    page = (trained / "staged" / "report" / "index.html").read_text()
    assert page.count(">stage 1<") >= 2  # in each chart


@pytest.mark.needs("peft")
def test_each_stage_of_answers_has_its_own_column(base, tmp_path, warm):  # noqa: F811
    """One command writes those of all stages; a wrong one is said with its stage before the first step. Other data with
    another number of sets goes on from a checkpoint as if it had been planned."""
    counts = {"first": 60, "second": 50, "third": 40}
    for folder in counts:
        (tmp_path / folder).mkdir()
    first, second, third = (prepared_preferences(tmp_path / folder, count) for folder, count in counts.items())
    mixture = {second: 0.7, third: 0.3}

    def recipe_of(run: str, **data: Any) -> Path:
        path = recipe(tmp_path / run, base, first, {"name": "dpo"})
        tree = yaml.safe_load(path.read_text())
        tree["data"] = {"sequence_length": 192, "isolate_documents": True, **data}
        tree["train"] |= {"max_steps": 4, "global_batch": 4}
        tree["checkpoint"] = {"every_steps": 1, "keep": 9}
        path.write_text(json.dumps(tree))
        return path

    planned = recipe_of("planned", path=first, stages=[{"from_step": 2, "mixture": mixture}])
    write_column(planned, warm)
    column = Path(third) / "reference.json"
    told = column.read_text()
    column.unlink()
    assert third in refused(planned, "data.stages, from step 2:")
    column.write_text(told.replace(json.loads(told)["weights"], "0" * 32))
    refused(planned, "data.stages, from step 2: its column was computed with other weights")
    column.write_text(told)
    right = {path: path.read_bytes() for path in Path(second).glob("reference*")}
    late_by_one(second)
    refused(planned, "data.stages, from step 2: objective.name dpo: before the first step the model and its reference")
    for path, content in right.items():
        path.write_bytes(content)
    forked.train(planned, world_size=1)
    want = losses(tmp_path / "planned/run")
    assert len(want) == 4

    def goes_on(run: str, begins: str, step: int, **data: Any) -> str:
        checkpoint = step_folder(tmp_path / begins / "run/checkpoints", step)
        words = ("--resume", str(checkpoint), "--resume_data", "new", "--train.max_steps", str(max(4, step + 1)))
        return forked.train(recipe_of(run, **data), *words, world_size=1)

    goes_on("branch", "planned", 2, mixture=mixture)
    assert losses(tmp_path / "branch/run") == {step: loss for step, loss in want.items() if step > 2}
    output = goes_on("back", "branch", 4, path=first)
    assert f"stage 2 at step 4: {first} from sequence 8" in output, output
