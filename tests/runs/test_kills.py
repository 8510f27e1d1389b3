"""SIGKILL around a save, again and again: no committed step is lost, and the run continues digit for digit."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.checkpoint.format import Manifest, complete_checkpoints, problems, stale_folders, step_of
from tests.helpers.forked import Launch
from tests.helpers.launching import REPO, environment, losses, rows, write_recipe
from tests.helpers.warm import WarmCommands

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
    """The training is killed so often; then it ends, and an undisturbed one at the same step."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
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
    (tmp_path / "undisturbed").mkdir()
    other = Launch(write_recipe(tmp_path / "undisturbed", small_data), *SCHEDULE, *OFTEN, *end)
    assert other.wait(300) == [0, 0], other.output()[-3000:]
    want = tmp_path / "undisturbed/run"
    assert losses(run) == losses(want)
    assert not stale_folders(run / "checkpoints")
    a, b = (_tensors(complete_checkpoints(folder / "checkpoints")[0]) for folder in (run, want))
    assert a and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def llmtrain(folder: Path, *words: str, warm: WarmCommands | None = None) -> None:
    env = (warm.environment if warm else environment)(PYTHONPATH=str(REPO))
    done = subprocess.run(["llmtrain", *words], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = sorted(checkpoint.glob("rank-*.safetensors"))
    return {f"{file.name}:{name}": value for file in files for name, value in load_file(file).items()}
