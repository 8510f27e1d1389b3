"""One family in one form through `llmtrain parity` and `llmtrain train`, as a user types them.

A cold start of a rank costs 10 s of processor time, so the processes are forked from this one, which has imported
everything: each calls the program's own main with the words of the command line and the variables that DeepSpeed's
launcher sets. The rest (parity's ranks, checkpoints and their writers, export) is the commands' own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.lab.namespaces import PR_SET_PDEATHSIG

FORMS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_optimization": {"stage": 3}},
    "pp2": {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}},
    "tp2": {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
    "sp2": {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2},
    "ep2": {"zero_optimization": {"stage": 1}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
}
"""The DeepSpeed JSON of each, for two ranks."""
RANKS = 2
STEPS = 10


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    outcome: str
    """passes, refused, stopped (after some steps), FAIL (parity: not the same training), traceback, time-out."""
    reason: str
    """What the command says of it."""
    seconds: float
    cpu_s: float


def write_run(
    folder: Path, model: dict[str, Any], form: str, attention: str, data: str, *, export: bool = True, preset: str = ""
) -> Path:
    """run.yaml and ds.json of a cell; returns the former. `preset`: expert_parallel.preset_model."""
    tree = FORMS[form]
    if preset:
        tree = {**tree, "expert_parallel": {**tree["expert_parallel"], "preset_model": preset}}
    (folder / "ds.json").write_text(json.dumps(tree))
    run = {
        "deepspeed": str(folder / "ds.json"),
        "model": {"config": model, "attention": attention},
        "data": {"path": data, "sequence_length": 32},
        "train": {
            "run_dir": str(folder / "run"),
            "micro_batch": 2,
            "accumulation": 2 if form == "pp2" else 1,
            "max_steps": STEPS,
            "log_every": 1,
            "eval_sequences": 4,
            "export": export,
        },
        "schedule": {"warmup_steps": 2},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(run, indent=1))  # JSON is YAML
    return path


def train(recipe: Path, limit_s: float) -> Ended:
    """Ten steps, a save, validation, export."""
    words = ["train", "--config", str(recipe)]
    port = _free_port()
    log = recipe.parent / "train.log"
    codes, seconds, cpu_s = _run([_launched(rank, port, words) for rank in range(RANKS)], log, limit_s)
    outcome, reason = _judged(codes, log.read_text(errors="replace"))
    if outcome == "passes":
        metrics = recipe.parent / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses = [row["loss"] for row in rows if "loss" in row]
        if len(losses) != STEPS or not all(math.isfinite(loss) for loss in losses):
            outcome, reason = "wrong losses", str(losses)
    return Ended(outcome, reason, seconds, cpu_s)


def parity(recipe: Path, steps: int, limit_s: float) -> Ended:
    """A comparison of `steps` steps on two ranks."""
    words = ["parity", str(recipe), "--ranks", str(RANKS), "--steps", str(steps), "--device", "cpu"]
    log = recipe.parent / "parity.log"

    def command() -> int:
        with _forking_ranks():
            return _main(words)

    codes, seconds, cpu_s = _run([command], log, limit_s)
    output = log.read_text(errors="replace")
    outcome, reason = _judged(codes, output)
    if codes == [1] and outcome != "traceback":
        outcome, reason = "FAIL", _after(output, "first parts")
    return Ended(outcome, reason, seconds, cpu_s)


def _judged(codes: list[int | None], output: str) -> tuple[str, str]:
    if "Traceback (most recent call last)" in output:
        return "traceback", _last_of_traceback(output)
    if all(code == 0 for code in codes):
        return "passes", ""
    if "error: after step" in output:
        return "stopped", _after(output, "error: ")
    if set(codes) & {2, 3}:
        return "refused", _after(output, "error: " if "error: " in output else "nothing is proved: ")
    if not any(codes):
        return "time-out", output.strip().splitlines()[-1] if output.strip() else ""
    return f"exit code {codes}", output.strip()[-300:]


def _after(output: str, mark: str) -> str:
    return output[output.rindex(mark) :].removeprefix("error: ").strip() if mark in output else output.strip()[-600:]


def _last_of_traceback(output: str) -> str:
    lines = output[output.index("Traceback (most recent call last)") :].splitlines()
    places = [line.strip() for line in lines if line.strip().startswith('File "') and "llmtrain" in line]
    errors = [line for line in lines[1:] if line and not line[0].isspace() and ":" in line]
    return " | ".join([*(errors[:1] or lines[-1:]), *places[-1:]])


def _launched(rank: int, port: int, words: list[str]) -> Callable[[], int]:
    """What DeepSpeed's launcher starts (launcher/launch.py): launch/train.py with these variables."""

    def start() -> int:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            CROSS_RANK="0",
            CROSS_SIZE="1",
            LOCAL_SIZE=str(RANKS),
            WORLD_SIZE=str(RANKS),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            WANDB_MODE="disabled",
        )
        return _main([*words, f"--local_rank={rank}"])

    return start


def _main(words: list[str]) -> int:
    from llmtrain.cli import main

    sys.argv = ["llmtrain", *words]
    return main(words)


def _run(starts: list[Callable[[], int]], log: Path, limit_s: float) -> tuple[list[int | None], float, float]:
    """(exit codes, seconds, processor seconds) of forked processes; a code is None where the time ran out."""
    began, spent = time.monotonic(), _cpu_s()
    pids = [_fork(start, log) for start in starts]
    codes: dict[int, int] = {}
    first_end = math.inf
    while len(codes) < len(pids) and time.monotonic() < min(began + limit_s, first_end + 10):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        first_end = min(first_end, time.monotonic())
        time.sleep(0.02)
    for pid in pids:  # and all that they started: each is the leader of a session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if pid not in codes:
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids], time.monotonic() - began, _cpu_s() - spent


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _fork(start: Callable[[], int], log: Path, before: Callable[[], Any] | None = None) -> int:
    """A child that calls `start` and ends with its exit code; its output goes to the log."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a job that is killed leaves no model in memory
        if before is not None:
            before()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = start()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def _forking_ranks() -> Iterator[None]:
    """Parity's own start of its ranks, with a fork in the place of a new interpreter."""
    from llmtrain.engine.ranks import local_ranks

    real = local_ranks.subprocess
    local_ranks.subprocess = types.SimpleNamespace(  # type: ignore[assignment]
        Popen=_ForkedPopen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT
    )
    try:
        yield
    finally:
        local_ranks.subprocess = real


class _ForkedPopen:
    """As much of subprocess.Popen as engine/ranks/local_ranks.py uses, for `python -m MODULE FOLDER`."""

    def __init__(self, words: list[str], *, env: dict[str, str], stdout: Any, preexec_fn: Any, **_: Any) -> None:
        module, folder = words[-2:]

        def start() -> int:
            import importlib

            os.environ.clear()
            os.environ.update(env)
            return int(importlib.import_module(module).main([folder]))

        self.pid = _fork(start, Path(stdout.name), preexec_fn)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
