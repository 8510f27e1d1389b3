"""Training from the command line: faults, signals, resume, and what is left behind.

More than 20 CPU s: signals and faults each need a launch of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.cluster.launch.placement import HOST
from tests.helpers import forked
from tests.helpers.launching import (
    environment,
    finish,
    gone,
    launch,
    losses,
    ranks_of,
    rows,
    train,
    tree,
    wait_for_step,
    write_recipe,
)
from tests.helpers.leftovers import unused_shared_memory


@pytest.fixture(scope="module")
def undisturbed(small_data, tmp_path_factory):
    """An undisturbed run of 60 steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    before = unused_shared_memory(), set(os.listdir("/tmp"))
    output = train(write_recipe(folder, small_data), "--train.max_steps", "60", slots=1)  # two: test_wheel.py
    return folder / "run", output, before


def test_run_directory_and_output(undisturbed):
    run, output, _ = undisturbed
    assert {"config.yaml", "deepspeed.json", "environment.json", "metrics.jsonl", "events.jsonl"} <= set(
        os.listdir(run)
    )
    assert sorted(losses(run)) == list(range(1, 61))
    assert losses(run)[60] < losses(run)[1]
    newest = complete_checkpoints(run / "checkpoints")
    assert [p.name for p in newest] == ["step-00000060", "step-00000055"]  # checkpoint.keep is 2
    assert any("eval/loss" in row for row in rows(run)) and str(newest[0]) in output
    kinds = [event["kind"] for event in rows(run, "events.jsonl")]
    assert kinds[0] == "start" and kinds.count("save") == 12 and "stop" in kinds


def test_nothing_is_left_behind(undisturbed):
    _, _, (shm, tmp) = undisturbed
    assert unused_shared_memory() <= shm
    left = {
        name for name in set(os.listdir("/tmp")) - tmp if not name.startswith("llmtrain-tests-")
    }  # other tests' home
    assert not {name for name in left if "llmtrain" in name or "deepspeed" in name or "torch" in name}, left


def test_sigterm_to_the_launcher_saves_and_ends_all_ranks(undisturbed, small_data, tmp_path, warm):
    """The launcher signals its ranks one after another, with up to 30 s between; they agree at the next step."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    recipe.write_text(recipe.read_text() + "resume: none\n")
    process = launch(recipe, "--train.max_steps", "100000", "--schedule.name", "constant", warm=warm)
    wait_for_step(process, run, 3)
    everyone = tree(process)
    launcher = next(p for p in everyone if "deepspeed.launcher.launch" in " ".join(p.cmdline()))
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    _, output = finish(process, 60)
    assert time.monotonic() - began < 25 and gone(everyone, 5)
    stop = next(event for event in rows(run, "events.jsonl") if event["kind"] == "stop")
    assert stop["complete"] is False and "--resume auto" in output
    assert complete_checkpoints(run / "checkpoints")[0].name == f"step-{stop['step']:08d}"
    words = ["--schedule.name", "constant", "--resume", "auto"]
    forked.train(recipe, "--train.max_steps", str(stop["step"] + 2), *words)
    assert max(losses(run)) == stop["step"] + 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_one_rank_stops_all_with_exit_0(small_data, tmp_path, number):
    """A hang-up of one rank was blamed on the network, with nothing saved. What asks to save had no line."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    job = forked.Launch(recipe, "--train.max_steps", "100000", "--schedule.name", "constant")
    wait_for_step(job, run, 2)
    os.kill(job.ranks[1].pid, signal.SIGUSR1)
    deadline, told = time.monotonic() + 20, rf"step (\d+) is saved: rank 1 on {os.uname().nodename} was sent SIGUSR1"
    while not (asked := re.search(told, job.output())):
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.05)
    os.kill(job.ranks[1].pid, number)
    assert job.wait(60) == [0, 0], job.output()
    assert f"stopped (rank 1 on {os.uname().nodename}: {number.name}) at step" in job.output()
    assert complete_checkpoints(run / "checkpoints")[0].name == f"step-{max(losses(run)):08d}"
    assert int(asked[1]) in [event["step"] for event in rows(run, "events.jsonl") if event["kind"] == "save"]


def test_ctrl_c_saves_and_leaves_no_process(small_data, tmp_path, warm):
    """The terminal sends SIGINT to all of them at once; `deepspeed` itself dies of it, the ranks save first."""
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    process = launch(recipe, "--train.max_steps", "100000", "--schedule.name", "constant", warm=warm)
    wait_for_step(process, run, 3)
    everyone = tree(process)
    os.killpg(process.pid, signal.SIGINT)
    assert gone(everyone, 40)
    finish(process, 10)
    assert complete_checkpoints(run / "checkpoints")[0].name == f"step-{max(losses(run)):08d}"


def test_sigusr1_saves_and_goes_on_and_a_dead_launcher_stops_the_ranks(small_data, tmp_path, warm):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    words = ("--train.max_steps", "100000", "--schedule.name", "constant", "--checkpoint.every_steps", "null")
    process = launch(recipe, *words, warm=warm)
    wait_for_step(process, run, 2)
    assert not complete_checkpoints(run / "checkpoints")
    ranks = ranks_of(process)
    ranks[0].send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 20
    while not complete_checkpoints(run / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.05)
    saved = complete_checkpoints(run / "checkpoints")[0]
    wait_for_step(process, run, int(saved.name[5:]) + 2)
    everyone = tree(process)
    process.kill()  # only `deepspeed` itself: DeepSpeed alone would leave launch.py and the ranks running
    process.wait()
    assert gone(everyone, 30)
    assert complete_checkpoints(run / "checkpoints")[0] != saved


def test_a_killed_starter_saves_and_a_preempt_file_ends_the_restart(small_data, tmp_path, warm):
    """The process between `llmtrain launch` and the ranks is killed. A file that came
    before the restarted ranks was a mistake in their configuration, with exit code 2."""
    recipe, run, file = write_recipe(tmp_path, small_data), tmp_path / "run", tmp_path / "notice"
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = ("--train.max_steps", "100000", "--schedule.name", "constant", "--checkpoint.every_steps", "null")
    asked = ("--hostfile", str(tmp_path / "hosts"), "--max-restarts", "1", "--preempt-file", str(file))
    command = [sys.executable, "-m", "llmtrain", "launch", *asked, "--", str(recipe), *words]
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = warm.popen(command, cwd=tmp_path, env=environment(), start_new_session=True, **told)
    wait_for_step(process, run, 2)
    (between,) = (p for p in tree(process) if HOST in p.cmdline())
    between.kill()
    deadline = time.monotonic() + 60
    while "restart" not in (kinds := [row["kind"] for row in rows(run, "events.jsonl")]):
        assert time.monotonic() < deadline, kinds
        time.sleep(0.05)
    file.touch()
    code, output = finish(process, 120)
    # Either rank may be the first that sees it.
    assert code == 75 and f"launcher process {between.pid} is gone) at step" in output, output
    assert "someone or something outside" not in output and f"preempt file {file} is on" in output, output
    (restart,) = (row for row in rows(run, "events.jsonl") if row["kind"] == "restart")
    assert complete_checkpoints(run / "checkpoints")[-1].name == f"step-{restart['step']:08d}" and restart["step"] >= 2


def test_data_that_was_changed_is_never_saved_as_trained(small_data, tmp_path):
    """One token in 200 between two launches, in place: a resume ends at once, a new run before its first save."""
    data = shutil.copytree(small_data, tmp_path / "data")
    recipe, run = write_recipe(tmp_path, data), tmp_path / "run"
    forked.train(recipe, "--train.max_steps", "2")
    shard = next(data.glob("train-*.bin"))
    tokens = np.fromfile(shard, "<u2")
    tokens[::200] = tokens[100]
    tokens.tofile(shard)
    for words in (("--train.max_steps", "4"), ("--train.run_dir", str(tmp_path / "new"), "--train.max_steps", "40")):
        code, output = forked.finish(recipe, *words)
        assert code == 2 and f"{shard}: its checksum is not that of" in output and "Traceback" not in output, output
        assert output.count("error:") == 1
    assert complete_checkpoints(run / "checkpoints")[0].name == "step-00000002" and max(losses(run)) == 2
    assert not complete_checkpoints(tmp_path / "new" / "checkpoints")


def test_second_launch_into_a_live_run_is_refused(small_data, tmp_path):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    first = forked.Launch(recipe, "--train.max_steps", "100000", "--schedule.name", "constant")
    wait_for_step(first, run, 1)
    code, output = forked.finish(recipe)
    assert code == 2 and re.search(r"\(process \d+", output) and "train.run_dir" in output, output
    assert "Traceback" not in output
    first.kill()


def test_another_model_and_a_run_folder_that_holds_more_are_refused(undisturbed, small_data, tmp_path):
    """Other data, another optimizer and vocabulary: tests/ranks/test_damage.py."""
    run, _, _ = undisturbed
    recipe = write_recipe(tmp_path, small_data)
    common = ("--train.run_dir", str(run), "--train.max_steps", "250")
    code, output = forked.finish(recipe, *common, "--model.config.intermediate_size", "96", world_size=1)
    assert code == 2 and "intermediate_size: 64 -> 96" in output and "Traceback" not in output, output
    assert output.count("error:") == 1
    code, output = forked.finish(recipe, *common, "--resume", "none", world_size=1)
    assert code == 2 and "--resume auto" in output
    newest, older = complete_checkpoints(run / "checkpoints")
    code, output = forked.finish(recipe, *common, "--resume", str(older), world_size=1)
    assert code == 2 and newest.name in output and "train.run_dir" in output, output
    assert complete_checkpoints(run / "checkpoints") == [newest, older]


def count_models(rank: int) -> None:
    """Tell of every model that this rank lets transformers build from the run's configuration."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config

    def from_config(*args: Any, **kwargs: Any) -> Any:
        os.write(1, f"rank {rank} builds\n".encode())
        return plain(*args, **kwargs)

    AutoModelForCausalLM.from_config = from_config


def test_a_rank_builds_its_model_once_and_what_is_known_of_it_once(small_data, tmp_path):
    """One skeleton serves checks, sizes, names and initial weights; with it the model that trains."""
    words = ("--train.max_steps", "1", "--schedule.name", "constant", "--train.export", "false")
    code, output = forked.finish(write_recipe(tmp_path, small_data), *words, before=count_models)
    assert code == 0, output
    assert [output.count(f"rank {rank} builds") for rank in (0, 1)] == [2, 2]
