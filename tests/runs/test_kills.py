"""SIGKILL around a save, again and again: no committed step is lost, and the run continues digit for digit."""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.checkpoint.format import Manifest, complete_checkpoints, problems, stale_folders, step_of
from tests.helpers.forked import Launch
from tests.helpers.launching import RECIPE, REPO, environment, losses, rows, write_recipe
from tests.helpers.preference import preferences
from tests.helpers.warm import WarmCommands
from tests.runs.test_chat import conversations, write_model

pytestmark = pytest.mark.needs("peft")

SCHEDULE = ("--schedule.name", "constant")  # so that the losses do not depend on where the run will end
OFTEN = ("--checkpoint.every_steps", "3")
EVER = ("--train.max_steps", "1000000")


def saves(run: Path, kind: str = "save") -> list[int]:
    return [event["step"] for event in rows(run, "events.jsonl") if event["kind"] == kind]


def newest(run: Path) -> int:
    """Step of the newest complete checkpoint, -1 if there is none."""
    return max((step_of(folder) or 0 for folder in complete_checkpoints(run / "checkpoints")), default=-1)


def unfinished(run: Path) -> set[Path]:
    """Checkpoints that are being written, or were when their launch was killed."""
    return {folder for folder in stale_folders(run / "checkpoints") if folder.name.endswith(".tmp")}


def wait_for_a_save_to_begin(launch: Launch, run: Path, count: int) -> None:
    """Until the `count`-th new unfinished checkpoint has appeared."""
    seen = unfinished(run)
    deadline = time.monotonic() + 90
    while count:
        assert launch.alive() and time.monotonic() < deadline, launch.output()[-3000:]
        new = unfinished(run) - seen
        count, seen = max(0, count - len(new)), seen | new
        time.sleep(0.0005)


def kill_one_rank(launch: Launch, rng: random.Random) -> None:
    """The others notice by themselves."""
    victim = rng.randrange(2)
    launch.ranks[victim].kill()
    codes = launch.wait(60)
    assert codes[victim] == -9 and codes[1 - victim] not in (0, None), (codes, launch.output()[-3000:])


def kill_a_writer(launch: Launch, run: Path, rng: random.Random) -> None:
    """Training goes on without it, says so if a save was lost, and later saves work. Then the run is killed."""
    victim = launch.writer(rng.randrange(2))
    assert victim is not None
    done = max(saves(run), default=0)
    victim.kill()
    deadline = time.monotonic() + 60
    while max(saves(run), default=0) <= done + 3:  # the one under way may have been complete
        assert launch.alive() and time.monotonic() < deadline, launch.output()[-3000:]
        time.sleep(0.01)
    launch.kill()


@pytest.mark.parametrize("trials", [10, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_kills_around_a_save_lose_nothing(small_data, tmp_path, trials):
    (tmp_path / "undisturbed").mkdir()
    recipe, other = (write_recipe(folder, small_data) for folder in (tmp_path, tmp_path / "undisturbed"))
    assert_nothing_is_lost(recipe, other, trials)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["lora", "dpo"])
def test_kills_of_a_post_training_lose_nothing(tmp_path, what):
    """An adapter with dropout, whose checkpoints leave out the model; pairs, whose data has a column of a reference."""
    recipe, other = post_training(tmp_path, what)
    assert_nothing_is_lost(recipe, other, 20)


def post_training(folder: Path, what: str, warm: WarmCommands | None = None) -> tuple[Path, Path]:
    """Recipes of the same training, in folders of their own. `what`: lora, dpo, or a plugin's objective over pairs."""
    write_model(folder / "model")
    records = [{"messages": talk} for talk in conversations()] if what == "lora" else preferences(150)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    section = "adapter: {r: 4, dropout: 0.1}" if what == "lora" else f"objective: {{name: {what}}}"
    recipes = []
    for name in ("disturbed", "undisturbed"):
        (folder / name).mkdir()
        path = folder / name / "recipe.yaml"
        model = f"model: {{pretrained: {folder / 'model'}}}\n{section}\n"
        text = RECIPE.format(repo=REPO, data=folder / "data", run=folder / name / "run")
        text = re.sub(r"model:\n(  .*\n)+", model, text).replace("sequence_length: 32", "sequence_length: 160")
        path.write_text(text.replace("data:\n", "data:\n  isolate_documents: true\n"))
        recipes.append(path)
    words = ("--format", "chat" if what == "lora" else "preference", "--source", "records.jsonl")
    llmtrain(folder, "prepare", *words, "--tokenizer", "model", "--out", "data", warm=warm)
    if what == "dpo":
        llmtrain(folder, "reference", str(recipes[0]))
    return recipes[0], recipes[1]


def llmtrain(folder: Path, *words: str, warm: WarmCommands | None = None) -> None:
    env = (warm.environment if warm else environment)(PYTHONPATH=str(REPO))
    done = subprocess.run(["llmtrain", *words], cwd=folder, env=env, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def assert_nothing_is_lost(recipe: Path, undisturbed: Path, trials: int) -> None:
    """Kill the training of a recipe so often; then let it end, and the undisturbed one at the same step."""
    run = recipe.parent / "run"
    rng = random.Random(trials)
    happened = dict.fromkeys(("all", "rank", "writer", "unfinished", "start-up"), 0)
    for trial in range(trials):
        launch = Launch(recipe, *SCHEDULE, *OFTEN, *EVER)
        what = ("all", "rank", "writer", "all", "rank")[trial % 5]
        if trial % 10 == 3:
            happened["start-up"] += 1
            time.sleep(rng.uniform(0.0, 3.0))
        else:
            wait_for_a_save_to_begin(launch, run, rng.randint(1, 3))
            time.sleep(rng.uniform(0.0, 0.08))
        committed = max([newest(run), *saves(run)])
        happened[what] += 1
        if what == "all":
            launch.kill()
        elif what == "rank":
            kill_one_rank(launch, rng)
        else:
            kill_a_writer(launch, run, rng)
        happened["unfinished"] += bool(stale_folders(run / "checkpoints"))
        assert newest(run) >= committed, f"trial {trial} ({what}): step {committed} was committed and is lost"
        for folder in complete_checkpoints(run / "checkpoints"):
            manifest = Manifest.read(folder)
            assert problems(folder, manifest, sorted(manifest.files)) == [], f"trial {trial} ({what})"
    print(f"{trials} trials: {happened}")
    assert happened["unfinished"] >= trials // 10  # kills did hit saves

    end = ("--train.max_steps", str(max(losses(run)) + 3))
    assert Launch(recipe, *SCHEDULE, *OFTEN, *end).wait(120) == [0, 0]
    other = Launch(undisturbed, *SCHEDULE, *OFTEN, *end)
    assert other.wait(300) == [0, 0], other.output()[-3000:]
    want = undisturbed.parent / "run"
    assert losses(run) == losses(want)
    assert not stale_folders(run / "checkpoints")
    a, b = (_tensors(complete_checkpoints(folder / "checkpoints")[0]) for folder in (run, want))
    assert a and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = sorted(checkpoint.glob("rank-*.safetensors"))
    return {f"{file.name}:{name}": value for file in files for name, value in load_file(file).items()}
