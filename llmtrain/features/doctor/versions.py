"""`llmtrain doctor --versions`: do the installed torch, DeepSpeed and transformers train here as they should?

Small proofs, each by commands of llmtrain in a temporary folder, on the GPUs of this machine or on its CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from llmtrain.base import units, untrusted
from llmtrain.base.child import child_environment, ending_with_parent, of_module
from llmtrain.base.errors import CheckpointError, ConfigError
from llmtrain.base.files import scratch_folder
from llmtrain.base.imports import name_cpu
from llmtrain.checkpoint.format import Manifest, step_folder
from llmtrain.cluster.hosts.hostfile import on_visible_devices, this_machine
from llmtrain.commands import completion
from llmtrain.config.problems import COMMAND_LINE, stop
from llmtrain.engine.ranks.local_ranks import ending_on_sigterm
from llmtrain.tracking.environment import READ_DEEPSPEED, VERIFIED

_PACKAGES = ("torch", "deepspeed", "transformers", "peft", "accelerate")
_CLOSES_S = 60.0
"""How long a command has to end its ranks after Ctrl-C."""
_RUN = """
model:
  config: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4,
           num_attention_heads: 4, num_key_value_heads: 2}
data: {path: data, sequence_length: 32}
train: {global_batch: 16, micro_batch: 2, max_steps: 4, log_every: 1, eval: false, export: false}
checkpoint: {every_steps: 2}
tracking: {wandb: disabled}
"""
_STEPS, _HALF = 4, 2
_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
_JSONS: dict[str, dict[str, Any]] = {
    "zero1": {"bf16": {"enabled": True}, **_FP32_SUMS, "zero_optimization": {"stage": 1}},
    "zero3": {"bf16": {"enabled": True}, **_FP32_SUMS, "zero_optimization": {"stage": 3}, "sequence_parallel_size": 2},
    "pipeline": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}},
}
"""DeepSpeed's files. ZeRO 1 and 2 are one class of DeepSpeed; ZeRO 3 and a pipeline have others."""


def main(argv: list[str]) -> int:
    """Returns 0 if all proofs hold, else 1. Raises ConfigError for the command line."""
    parser = argparse.ArgumentParser(prog="llmtrain doctor --versions", description=__doc__, allow_abbrev=False)
    parser.add_argument("--versions", action="store_true", help="try the installed packages on this machine")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, at the end")
    completion.offer(parser)
    args, others = parser.parse_known_args(argv)
    if others:
        rule = "--versions examines the packages of this machine, without hosts and without a run, and goes with --json"
        raise stop("command line", others[0], rule, "leave it out, or leave --versions out", COMMAND_LINE)
    name_cpu()
    ranks = min(2, on_visible_devices(this_machine(), os.environ).slots)
    began, packages, proofs = time.monotonic(), _packages(), list[dict[str, Any]]()

    def say(*lines: str) -> None:
        if not args.json:
            print(*lines, sep="\n", flush=True)

    head = ("package", "installed", "allowed", "tested")
    say(*units.lines_of([head, *packages]), private := _private())
    with ending_on_sigterm(), scratch_folder("versions") as folder:
        for name, prove in _proofs(folder, ranks):
            start = time.monotonic()
            ok, figures, output = prove()
            proofs.append({"name": name, "ok": ok, "figures": figures, "output": output})
            took = units.duration(time.monotonic() - start)
            lines = () if ok else output.splitlines()[-30:]
            say(f"{'PASS' if ok else 'FAIL'}  {name}: {figures} ({took})", *(f"        {line}" for line in lines))
    failed = [proof["name"] for proof in proofs if not proof["ok"]]
    elapsed_s = time.monotonic() - began
    say(f"{units.duration(elapsed_s)}: " + (f"these do not hold: {', '.join(failed)}" if failed else "all hold"))
    if args.json:
        known = [dict(zip(head, package, strict=True)) for package in packages]
        report = {"ok": not failed, "elapsed_s": round(elapsed_s, 3), "packages": known, "private": private}
        print(json.dumps({**report, "proofs": proofs}, indent=1))
    return 1 if failed else 0


def _packages() -> list[tuple[str, str, str, str]]:
    """Return (package, its version here, what pyproject.toml allows, what the tests have run with) of each package."""
    allowed: dict[str, str] = {}
    for text in (metadata.requires("llmtrain") or []) if _version("llmtrain") else []:
        if match := re.match(r"([\w-]+)([<>=!~][^;\s]*)", text):
            allowed.setdefault(match[1], ",".join(sorted(match[2].split(","), reverse=True)))
    tested = {name: low if low == high else f"{low} to {high}" for name, (low, high) in VERIFIED.items()}
    return [(name, _version(name) or "-", allowed.get(name, "-"), tested.get(name, "-")) for name in _PACKAGES]


def _version(package: str) -> str:
    """Return a package's version; empty: it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _private() -> str:
    """Return the line on the private code that llmtrain replaces: what is off with the installed one, and its cost."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger writes there
            from llmtrain.engine.deepspeed import patches, zero_step
        patches.check()
        note = zero_step.own_step()
    except ConfigError as error:
        return str(error)
    except Exception as error:  # a package that cannot be imported may fail in any way
        return f"DeepSpeed's private code cannot be examined: {untrusted.first_line(error, 200)}"
    if note:
        return f"{note}. Muon with fp32 sums of gradients is refused"
    return f"DeepSpeed's private code that llmtrain replaces is that of {READ_DEEPSPEED}: nothing is off"


def _proofs(folder: Path, ranks: int) -> Iterator[tuple[str, Any]]:
    """Yield (name, a function that returns (it holds, what was compared and differs by how much, the output))."""
    for name, tree in _JSONS.items():
        tree = {key: value for key, value in tree.items() if ranks > 1 or key != "sequence_parallel_size"}
        (folder / f"{name}.json").write_text(json.dumps(tree))
    (folder / "run.yaml").write_text(_RUN)
    (folder / "hosts").write_text(f"localhost slots={ranks}\n")
    (folder / "text.txt").write_text("\n\n".join(f"{number} squared is {number**2}." for number in range(2000)))
    adapter = ("--adapter.r", "4") if _version("peft") else ()
    yield "parity of ZeRO 1", lambda: _parity(folder, "zero1", ranks)
    shared = " with shared sequences" * (ranks > 1)
    yield f"parity of ZeRO 3{shared}", lambda: _parity(folder, "zero3", ranks, "--data.isolate_documents", "true")
    yield f"parity of a pipeline{' with LoRA' * bool(adapter)}", lambda: _parity(folder, "pipeline", 2, *adapter)
    yield "save and resume of ZeRO 1", lambda: _resume(folder)


def _parity(folder: Path, name: str, ranks: int, *more: str) -> tuple[bool, str, str]:
    words = ("run.yaml", "--deepspeed", f"{name}.json", "--ranks", str(ranks), "--steps", str(_STEPS))
    code, output = _command(folder, "parity", *words, *more)
    pattern = r"(\w+) against plain PyTorch.*\n +loss +(\S+) of (\S+)"
    losses = [f"{precision} loss off by {got} of {most}" for precision, got, most in re.findall(pattern, output)]
    return code == 0, f"{_STEPS} steps beside plain PyTorch, {', '.join(losses) or 'no answer'}", output


def _resume(folder: Path) -> tuple[bool, str, str]:
    """Train, and train the second half once more from the checkpoint in the middle."""
    train = ("launch", "--hostfile", "hosts", "--max-restarts", "0", "--", "run.yaml", "--deepspeed", "zero1.json")
    whole, resumed = folder / "whole", folder / "resumed"
    middle = str(step_folder(whole / "checkpoints", _HALF))
    for words in (
        ("prepare", "--source", "text.txt", "--vocab-size", "512", "--processes", "1", "--out", "data"),
        (*train, "--train.run_dir", str(whole)),
        (*train, "--train.run_dir", str(resumed), "--resume", middle),
    ):
        code, output = _command(folder, *words)
        if code:
            return False, f"`llmtrain {words[0]}` ended with exit code {code}", output
    try:
        sums, others = (Manifest.read(step_folder(run / "checkpoints", _STEPS)).checksums() for run in (whole, resumed))
    except CheckpointError as error:
        return False, "a checkpoint cannot be read", str(error)
    differ = sum(sums.get(key) != others.get(key) for key in sums | others)
    what = f"{differ} of {len(sums | others)} tensors after {_STEPS} steps differ from those of a run without the break"
    return not differ, what, output


def _command(folder: Path, *words: str) -> tuple[int, str]:
    """Return (exit code, output) of a command of llmtrain. Ctrl-C, or the end of this process, ends it."""
    process = subprocess.Popen(
        of_module("llmtrain", *words),
        cwd=folder,
        env=child_environment(TMPDIR=str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes to this process alone, which hands it on
        preexec_fn=ending_with_parent(signal.SIGINT),
    )
    try:
        output, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_CLOSES_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, untrusted.shown(output, lines=True)
