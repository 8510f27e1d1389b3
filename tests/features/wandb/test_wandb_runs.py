"""W&B over several launches of a run: whatever was online, offline or killed, each step stands there once, in order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from llmtrain.checkpoint.format import complete_checkpoints
from tests.features.wandb.wandb_files import read_back
from tests.features.wandb.wandb_server import serving
from tests.helpers import forked
from tests.helpers.launching import environment, rows, write_recipe
from tests.runs.test_trackers import two_launches

COMMON = ("--schedule.name", "constant", "--train.eval_every", "4")


def with_variables(variables: dict[str, str], rank: int) -> None:
    os.environ.update(variables)


def files(run: Path) -> list[Path]:
    """W&B's folders, the newest last."""
    return sorted((run / "wandb").glob("*run-*"), key=lambda folder: folder.name.partition("run-")[2])


def kill_between_checkpoints(launch: forked.Launch, run: Path, left: str) -> None:
    """SIGKILL at a step that no checkpoint holds, so the next launch repeats it; W&B's file is torn, or left empty."""
    began, launches = time.monotonic(), len(files(run))
    while not (
        complete_checkpoints(run / "checkpoints")
        and rows(run)[-1]["step"] % 5 == 3
        and len(files(run)) > launches
        and list(files(run)[-1].glob("*.wandb"))  # W&B makes the folder first
        and read_back(files(run)[-1])["rows"]
    ):
        assert launch.alive() and time.monotonic() < began + 240, launch.output()
        time.sleep(0.002)
    children = psutil.Process(launch.ranks[0].pid).children(recursive=True)
    launch.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, alive
    (path,) = files(run)[-1].glob("*.wandb")
    os.truncate(path, 0 if left == "empty" else path.stat().st_size - 5)


@pytest.mark.parametrize(
    "modes",
    [
        "online kill, offline kill, online",
        pytest.param("offline kill, offline kill empty, offline", marks=pytest.mark.slow),
    ],
)
def test_each_step_of_all_launches_stands_in_wandb_once_and_in_order(small_data, tmp_path, modes):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    printed = ""
    with serving() as (server, variables):
        for mode in modes.split(", "):
            # A killed launch reaches an unknown step, so the limit is counted from there.
            stop = (
                "1000000" if "kill" in mode else str((max((row["step"] for row in rows(run)), default=0) // 5 + 2) * 5)
            )
            options = (*COMMON, "--tracking.wandb", mode.split()[0], "--train.max_steps", stop)
            launch = forked.Launch(recipe, *options, world_size=1, before=partial(with_variables, variables))
            if "kill" in mode:
                kill_between_checkpoints(launch, run, mode.split()[-1])
            else:
                assert launch.wait(300) == [0], launch.output()
            printed = launch.output()
        if "offline" in mode:
            (command,) = re.findall("To upload later: (wandb sync .*)", printed)
        else:  # what the earlier launches left was sent by the last: there is nothing to do
            command = f"wandb sync {run}/wandb/offline-run-*"
        done = subprocess.run(
            ["bash", "-c", command.replace("sync", "sync --yes")],
            cwd=tmp_path,  # it writes its log to wandb/
            env=environment(**variables),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        print(done.stdout, done.stderr)
    saved = json.loads((complete_checkpoints(run / "checkpoints")[0] / "trainer.json").read_text())
    assert server.runs == {saved["run_id"]}
    assert server.overwritten == 0
    history, local = server.rows(), {}
    for row in rows(run):
        local[row["step"]] = local.get(row["step"], {}) | row
    assert [row["_step"] for row in history] == [row["step"] for row in history] == sorted(local)
    assert any("eval/loss" in row for row in history)
    for key in ("loss", "eval/loss"):
        assert [row.get(key) for row in history] == [local[step].get(key) for step in sorted(local)]


LAUNCH = """
    import os, sys
    from pathlib import Path
    from llmtrain.features.wandb import TrackingConfig
    from llmtrain.features.wandb.sink import WandB
    from llmtrain.tracking.local import JsonLines

    run, step = Path(sys.argv[1]), int(sys.argv[2])
    sink = WandB(tracking=TrackingConfig(wandb="offline"))
    if step == 1:  # `wandb.init` has returned
        sink._catch_up = lambda *_: (JsonLines(run / "metrics.jsonl").write({"step": 1}), os.kill(os.getpid(), 9))
    sink.open(run, "r", {}, step - 1)
    assert sink._run.settings.x_transaction_log_flush_interval == 1  # seconds; of 15 a kill would take the rows
    sink.log({"step": step}, more=False)
    sink.close(exit_code=0)
"""


def test_a_kill_while_wandb_starts_costs_no_row(tmp_path):
    with serving() as (server, variables):
        sync = ["bash", "-c", "wandb sync --yes wandb/offline-run-*"]
        python = [sys.executable, "-c", textwrap.dedent(LAUNCH), str(tmp_path)]
        for command, code in (([*python, "1"], -9), ([*python, "2"], 0), (sync, 0)):
            done = subprocess.run(command, cwd=tmp_path, env=environment(**variables), capture_output=True, text=True)
            assert done.returncode == code, done.stderr
    assert [row["_step"] for row in server.rows()] == [row["step"] for row in server.rows()] == [1, 2]


def test_an_offline_file_holds_the_configuration(small_data, tmp_path):
    recipe, run = write_recipe(tmp_path, small_data), tmp_path / "run"
    forked.train(recipe, *COMMON, "--tracking.wandb", "offline", "--train.max_steps", "2", world_size=1)
    (folder,) = (run / "wandb").glob("offline-run-*")
    session = read_back(folder)
    assert session["config"]["run"]["data"]["sequence_length"] == 32
    assert session["config"]["deepspeed"]["zero_optimization"]["stage"] == 1
    assert session["exit"] == 0
    parameters = json.loads((run / "environment.json").read_text())["parameters"]
    assert session["config"]["parameters"] == parameters > 0
    assert session["config"]["units"]["loss"] == "nats/token" and session["config"]["units"]["max_memory_gib"] == "GiB"


def test_both_launches_of_a_run_have_its_group_and_its_job_type(small_data, tmp_path):
    two_launches(
        tmp_path,
        small_data,
        "--tracking.wandb",
        "offline",
        "--tracking.group",
        "sweep",
        "--tracking.job_type",
        "pretrain",
    )
    launches = [read_back(folder) for folder in (tmp_path / "run/wandb").glob("offline-run-*")]
    assert [(sent["group"], sent["job_type"]) for sent in launches] == [("sweep", "pretrain")] * 2


def test_a_fault_is_in_the_run_of_its_ranks(small_data, tmp_path):
    stalls = pytest.importorskip("tests.features.watch.stalls")
    words = ("--train.max_steps", "100000", "--fault.stall_timeout_s", "4", "--tracking.wandb", "offline")
    job = forked.Launch(write_recipe(tmp_path, small_data), *words, before=stalls.raises)
    assert None not in job.wait(120), job.output()[-3000:]
    deadline, told = time.monotonic() + 20, []
    while not told and time.monotonic() < deadline:
        time.sleep(0.5)
        folders = [folder for folder in files(tmp_path / "run") if any(folder.glob("*.wandb"))]
        told = [found for folder in folders if "fault" in (found := read_back(folder))["summary"]]
    assert len(told) == 1 and "ValueError: token 600" in told[0]["summary"]["fault"]
    # By the folders: on a busy machine rank 0's is ended before anything of it is in its file.
    assert {folder.name.rpartition("-")[2] for folder in folders} == {told[0]["id"]}
