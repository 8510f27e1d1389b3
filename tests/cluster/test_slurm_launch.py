"""`--launcher slurm` and launch/slurm.sbatch, with a stand-in for srun that starts real tasks. Needs no Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from llmtrain.cluster.hosts.hostfile import Host
from llmtrain.cluster.launch import slurm
from llmtrain.cluster.launch.slurm import command
from tests.cluster.launched import Launched, write_recipe
from tests.helpers.launching import REPO, environment
from tests.helpers.warm import WarmCommands
from tools.lab.lab import Lab

pytestmark = pytest.mark.timeout(1500)
SRUN = Path(__file__).with_name("fake_srun.py")


STAND_INS = {
    "srun": f'FAKE_SLURM={{folder}} exec {sys.executable} {SRUN} "$@"',
    "scontrol": 'echo "$@" >> {folder}/scontrol.log',
    "squeue": """case "$*" in
*--steps*) cd {folder}/steps && for step in *; do kill -0 $step 2>&- && echo "$step $(cat $step)"; done; true;;
*) echo R;;
esac""",
    "scancel": '[ "$1" = --signal=TERM ] && kill -s USR2 "$2"',
}


@pytest.fixture
def slurm_bin(tmp_path: Path) -> Path:
    """A folder for PATH with stand-ins for Slurm's commands. scontrol writes down what it is asked."""
    folder = tmp_path / "slurm-bin"
    folder.mkdir()
    (tmp_path / "steps").mkdir()
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text.format(folder=tmp_path)}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.slow
def test_the_batch_script_saves_before_its_time_is_over_and_is_queued_again(
    small_data: str, tmp_path: Path, slurm_bin: Path
) -> None:
    recipe = write_recipe(tmp_path, small_data)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("")
    env = environment(
        WANDB_MODE="disabled",
        SLURM_SUBMIT_DIR=str(tmp_path),
        SLURM_JOB_ID="77",
        SLURM_JOB_NODELIST=os.uname().nodename,
        SLURM_TASKS_PER_NODE="2",
    )
    env["PATH"] = f"{slurm_bin}:{env['PATH']}"
    word = "a \"b\" $(touch x) 'c' %h"
    words = ["bash", str(REPO / "launch/slurm.sbatch"), str(recipe), "--tracking.name", word]
    log = tmp_path / "log"
    with log.open("w") as output:
        job = subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until = time.monotonic() + 240
        while not list((tmp_path / "run/checkpoints").glob("step-*/manifest.json")):
            assert time.monotonic() < until and job.poll() is None, log.read_text()[-4000:]
            time.sleep(0.2)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(120) == 75, log.read_text()[-4000:]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    text = log.read_text()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 77\n"
    assert "rank 1 -> " in text and "2 ranks are asked" in text
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["tracking"]["name"] == word
    assert not (tmp_path / "x").exists()


def test_the_batch_script_is_valid_bash() -> None:
    script = REPO / "launch/slurm.sbatch"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    options = re.findall(r"^#SBATCH (--[a-z-]+)", script.read_text(), flags=re.M)
    assert {"--nodes", "--ntasks-per-node", "--signal", "--requeue"} <= set(options)


def test_on_fewer_hosts_than_were_given_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    hosts = [Host(name=f"n{number}", slots=1, devices=(0,), line=number) for number in (1, 2, 3)]
    assert "--overlap" not in command(hosts, ["a"], "s") and "--overlap" in command(hosts[:2], ["a"], "s")


def test_why_the_ranks_were_not_asked_is_said(monkeypatch: pytest.MonkeyPatch, slurm_bin: Path) -> None:
    monkeypatch.setattr(slurm, "_PAUSE_S", 0.0)
    monkeypatch.setenv("PATH", f"{slurm_bin}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert "SLURM_JOB_ID" in (slurm.ask_to_leave("llmtrain-1") or "")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert slurm.ask_to_leave("llmtrain-1") == "Slurm does not know their step"
    (slurm_bin / "squeue").write_text(
        "#!/bin/sh\necho slurm_load_jobs error: Unable to contact slurm controller >&2\nexit 1\n"
    )
    assert "Unable to contact" in (slurm.ask_to_leave("llmtrain-1") or "")


def test_three_nodes_without_ssh_lose_a_rank(
    lab3: Lab, small_data: str, tmp_path: Path, slurm_bin: Path, warm: WarmCommands
) -> None:
    recipe = write_recipe(tmp_path, small_data)
    extra = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[1-3]", "SLURM_TASKS_PER_NODE": "1(x3)"}
    with Launched(lab3, recipe, "--launcher", "slurm", warm=warm, path=slurm_bin, env=extra) as run:
        run.wait_for(r"^rank 2 -> node-3")
        run.wait_for_step(7)
        tasks = [p for p in lab3.hosts[1].processes() if "llmtrain" in p.cmdline()]
        tasks[0].kill()
        told = run.wait_for(r"error: fault after step")
        assert "node-2" in run.lines[told][1]
        met = run.wait_for(r"^rank 2 -> node-3", told)
        run.wait_for_step(run.rows("events.jsonl", "fault")[-1]["step"] + 1)
        assert "restarting" in "\n".join(line for _, line in run.lines[told:met])
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75
        assert run.newest_checkpoint() == run.step()
