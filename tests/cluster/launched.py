"""A run that `llmtrain launch` started in a lab: what it prints and when, its ranks, its files."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from llmtrain.cluster.launch.placement import HOST
from tests.helpers.launching import RECIPE, REPO, environment
from tests.helpers.warm import WarmCommands
from tools.lab.lab import Lab, LabHost

MET_S, FAULT_S = 240.0, 90.0  # limits for a test machine with other work
EVERY = 5  # steps between checkpoints
DETECTED_S, GONE_S = 15.0, 10.0  # what docs/cluster.md promises


def write_recipe(folder: Path, data: str) -> Path:
    """A run without an end, for 1, 2, 3 or 6 ranks; a checkpoint every 5 steps, complete before the next step.

    Without dropout, whose random numbers depend on the number of ranks: the losses do not.
    """
    text = RECIPE.format(repo=REPO, data=data, run=folder / "run")
    text = text.replace("global_batch: 8", "global_batch: 12").replace("max_steps: 240", "max_steps: 1000000")
    text = text.replace("attention_dropout: 0.1", "attention_dropout: 0.0")
    text = text.replace("keep: 2", "keep: 2\n  mode: sync")
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


class Launched:
    """Started on the first host of a lab. Use as a context manager: it ends, whatever the test did."""

    def __init__(
        self,
        lab: Lab,
        recipe: Path,
        *options: str,
        warm: WarmCommands | None = None,
        path: Path | None = None,
        env: dict[str, str] | None = None,
        words: tuple[str, ...] = (),
    ) -> None:
        """`warm`: what forks the commands; without it their interpreters start. `path`: a folder for the front of
        PATH. `env`: further variables. `words`: of the run, behind its YAML."""
        self.lab, self.folder, self.run_dir = lab, recipe.parent, recipe.parent / "run"
        self.checkpoints = self.run_dir / "checkpoints"
        hosts = () if "slurm" in options else ("--hostfile", str(lab.hostfile()))
        command = ["llmtrain", "launch", *hosts, *options, "--", str(recipe), *words]
        variables = (warm.on_hosts if warm else environment)(WANDB_MODE="disabled", **(env or {}))
        if path is not None:
            variables["PATH"] = f"{path}:{variables['PATH']}"
        self.process = lab.hosts[0].popen(
            command,
            env=variables,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            for host in self.lab.hosts:
                for process in self.job_on(host):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait_for(self, pattern: str, after: int = 0, within_s: float = MET_S) -> int:
        """The index of the first line at or after `after` in which `pattern` is found."""
        until = time.monotonic() + within_s
        seen = after
        while True:
            while seen < len(self.lines):
                if re.search(pattern, self.lines[seen][1]):
                    return seen
                seen += 1
            if time.monotonic() > until or (self.process.poll() is not None and not self._reader.is_alive()):
                raise AssertionError(f"no line {pattern!r} within {within_s:.0f} s in:\n{self.text[-6000:]}")
            time.sleep(0.05)

    def finish(self, within_s: float = MET_S) -> int:
        """Its exit code."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {within_s:.0f} s:\n{self.text[-6000:]}") from None
        self._reader.join(5)
        return code

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        return max((row["step"] for row in self.rows("metrics.jsonl")), default=0)

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + MET_S
        while self.step() < step:
            assert time.monotonic() < until and self.process.poll() is None, self.text[-6000:]
            time.sleep(0.05)

    def rows(self, name: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl or events.jsonl."""
        path = self.run_dir / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if kind is None or row.get("kind") == kind]

    def newest_checkpoint(self) -> int:
        found = (path.parent.name for path in self.checkpoints.glob("step-*/manifest.json"))
        return max(
            (int(name.removeprefix("step-")) for name in found if name.removeprefix("step-").isdigit()), default=0
        )

    def ranks_on(self, host: LabHost) -> list[psutil.Process]:
        """The ranks of a host, not what they have started."""
        found = []
        for process in host.processes():
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                from_launcher = parent is not None and HOST in parent.cmdline()
                if from_launcher and "llmtrain" in process.cmdline():
                    found.append(process)
        return found

    @staticmethod
    def job_on(host: LabHost) -> list[psutil.Process]:
        """Everything of the run on a host but `llmtrain launch` itself."""
        found = []
        for process in host.processes():
            with contextlib.suppress(psutil.Error):
                if "LLMTRAIN_LAUNCH" in process.environ():
                    found.append(process)
        return found

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def assert_nothing_left(self) -> None:
        """No process of the run and no folder of its watch, on any host."""
        left = {host.name: [p.cmdline() for p in self.job_on(host)] for host in self.lab.hosts}
        assert not any(left.values()), left
        for host in self.lab.hosts:
            folders = host.run(["sh", "-c", "ls -d /dev/shm/llmtrain-watch-* 2>/dev/null || true"]).stdout
            assert folders == "", (host.name, folders)


def kill_rank(run: Launched, host: LabHost) -> None:
    random.choice(run.ranks_on(host)).kill()


def kill_all_ranks(run: Launched, host: LabHost) -> None:
    for rank in run.ranks_on(host):
        rank.kill()


def cut(run: Launched, host: LabHost) -> None:
    host.cut()


def one_fault(run: Launched, kind: str, host: LabHost, nth: int) -> dict[str, float]:
    """Inject a fault into a run that goes on, and hold what follows against the promises. The times in seconds."""
    begin = len(run.lines)
    at_step, injected = run.step(), time.monotonic()
    {"rank": kill_rank, "host": kill_all_ranks, "link": cut}[kind](run, host)
    told = run.wait_for(r"error: fault after step", begin, FAULT_S)
    assert host.name in run.lines[told][1], run.lines[told][1]
    while any(run.ranks_on(each) for each in run.lab.hosts):
        assert time.monotonic() - run.lines[told][0] < FAULT_S
        time.sleep(0.1)
    gone_s = time.monotonic() - run.lines[told][0]
    gone = run.wait_for(rf"launch: restart {nth} of", told, FAULT_S)
    again = run.wait_for(r"launch: restarting from step", gone, FAULT_S)
    resumed = int(re.search(r"from step (\d+)", run.lines[again][1])[1])  # type: ignore[index]
    fault = run.rows("events.jsonl", "fault")[-1]
    assert fault["step"] - resumed <= EVERY, (fault["step"], resumed)
    assert fault["step"] >= at_step
    if kind == "link":
        assert f"without {host.name}" in run.lines[again][1]
    met = run.wait_for(r"^rank 0 -> node-1", again)
    run.wait_for_step(fault["step"] + 1)
    detected_s = run.lines[told][0] - injected
    assert detected_s <= DETECTED_S and gone_s <= GONE_S, (kind, detected_s, gone_s)
    return {
        "detected": detected_s,
        "gone": gone_s,
        "restarted": run.lines[met][0] - run.lines[gone][0],
        "redone": fault["step"] - resumed,
    }
