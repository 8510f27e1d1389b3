"""Stands in for srun where there is no Slurm: starts real tasks with the variables that Slurm gives them.

One process a node is the tasks' parent, as slurmstepd is; on other nodes ssh starts it. Knows the flags that llmtrain
uses. As srun does, it ends its tasks with SIGKILL at a SIGTERM and at two SIGINT. SIGUSR2, from the stand-in for
scancel, sends them SIGTERM; that finds it by FAKE_SLURM/steps/PID, which holds the step's name.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path


def stepd() -> int:
    """On one node: start the tasks that standard input tells of, hand on the signals that follow, wait."""
    what = json.loads(sys.stdin.readline())
    tasks = []
    for local, number in enumerate(what["tasks"]):
        task = {**what["env"], "SLURM_PROCID": str(number), "SLURM_LOCALID": str(local)}
        tasks.append(subprocess.Popen(what["argv"], env=task, cwd=what["cwd"], stdin=subprocess.DEVNULL))

    def listen() -> None:
        for line in sys.stdin:
            for each in tasks:
                if each.poll() is None:
                    each.send_signal(int(line))

    threading.Thread(target=listen, daemon=True).start()
    codes = [each.wait() for each in tasks]
    return max((code if code >= 0 else 128 - code for code in codes), default=0)


def srun(words: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--nodes", "--ntasks"):
        parser.add_argument(flag, type=int, required=True)
    for flag in ("--distribution", "--export", "--kill-on-bad-exit", "--wait", "--nodelist", "--job-name"):
        parser.add_argument(flag)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("argv", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    if given.nodelist:
        places = [given.nodelist] * given.ntasks
    else:
        places = Path(os.environ["SLURM_HOSTFILE"]).read_text().split()
    counts = Counter(places)
    assert (len(counts), len(places)) == (given.nodes, given.ntasks), (counts, given)
    tasks_per_node = ",".join(map(str, counts.values()))
    steps = []
    for node, name in enumerate(counts):
        env = {
            **os.environ,
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_NODES": str(given.nodes),
            "SLURM_STEP_NUM_TASKS": str(given.ntasks),
            "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        }
        mine = [number for number, place in enumerate(places) if place == name]
        command = [sys.executable, str(Path(__file__).resolve()), "stepd"]
        if name != os.uname().nodename:
            command = ["ssh", "-oBatchMode=yes", "-oConnectTimeout=5", name, shlex.join(command)]
        step = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True)
        assert step.stdin is not None
        step.stdin.write(json.dumps({"env": env, "argv": given.argv, "cwd": os.getcwd(), "tasks": mine}) + "\n")
        step.stdin.flush()
        steps.append(step)
    interrupts = 0

    def forward(number: int, _: object) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if number != signal.SIGINT or interrupts == 2:
            for step in steps:
                assert step.stdin is not None
                step.stdin.write(f"{signal.SIGTERM if number == signal.SIGUSR2 else signal.SIGKILL:d}\n")
                step.stdin.flush()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, forward)
    if given.job_name:
        (Path(os.environ["FAKE_SLURM"]) / "steps" / str(os.getpid())).write_text(given.job_name)
    return max(step.wait() for step in steps)


if __name__ == "__main__":
    sys.exit(stepd() if sys.argv[1:] == ["stepd"] else srun(sys.argv[1:]))
