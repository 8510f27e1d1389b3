"""Saving, resuming at another layout and exporting, against DeepSpeed's and PyTorch's own ways, in one run.

    python tools/bench/checkpoint.py                     # CPU: 0.11 B parameters, two ranks, 7 GB of disk
    python tools/bench/checkpoint.py --preset 0.4b
    python tools/bench/checkpoint.py --preset 0.5b --only saves  # one GPU, 30 GB of disk or memory

Training is bf16 with ZeRO 1. Contestants take turns, round by round, on the same state; medians are printed. A save
blocks the loop while it is inside its calls or waits before the optimizer; the time lost is that and what the steps
take longer meanwhile. DeepSpeed's checkpoint is not durable when its call returns; the others are when they are done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from machine import Card, about, write  # noqa: E402
from train_speed import QWEN_HALF_B  # noqa: E402

_SMALL = {
    "model_type": "llama",
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_MEDIUM = {
    **_SMALL,
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
SAVERS = ("llmtrain", "deepspeed", "dcp thread", "dcp process")
# model, tokens of a sequence, sequences of a micro-batch, micro-batches of a step: on a GPU the copy of the state takes
# as long as a step of 20,000 tokens.
PRESETS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "tiny": ({**_SMALL, "num_hidden_layers": 2, "vocab_size": 2048}, 64, 1, 1),
    "0.1b": (_SMALL, 128, 2, 1),
    "0.4b": (_MEDIUM, 128, 2, 1),
    "0.5b": (QWEN_HALF_B, 4096, 2, 4),
}
_MEASURED = """
import os, sys, json, subprocess, time
def io():
    fields = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(fields["rchar"]), int(fields["wchar"])
began, before = time.monotonic(), io()
process = subprocess.Popen(sys.argv[2:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
after = io()
json.dump([os.waitstatus_to_exitcode(status), time.monotonic() - began, usage.ru_maxrss * 1024,
           after[0] - before[0], after[1] - before[1]], open(sys.argv[1], "w"))
"""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    import torch

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="0.5b" if on_gpu else "0.1b")
    parser.add_argument("--only", choices=("saves",), help="no durable write, resume and export")
    parser.add_argument("--savers", nargs="+", choices=SAVERS, default=list(SAVERS), help="with --only saves: these")
    parser.add_argument("--ranks", type=int, default=1 if on_gpu else 2)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3); one more warms up")
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    found = parser.parse_args(argv)
    if found.savers[0] != SAVERS[0] or (found.only is None and len(found.savers) < len(SAVERS)):
        parser.error("--savers: llmtrain first, and with --only saves")
    return found


def command(folder: Path, *words: str) -> dict[str, float]:
    """Run a program: its seconds, peak memory of one process, bytes read and written (its children included)."""
    out, said = folder / "measured.json", folder / "said.txt"
    with open(said, "w") as log:
        subprocess.run([sys.executable, "-c", _MEASURED, str(out), *words], check=True, stdout=log, stderr=log)
    code, seconds, peak, read, written = json.loads(out.read_text())
    if code:
        raise SystemExit(f"{' '.join(words)} ended with {code}:\n{said.read_text()[-2000:]}")
    return {"seconds": seconds, "peak_bytes": peak, "read": read, "written": written}


def python(folder: Path, *words: str) -> dict[str, float]:
    return command(folder, sys.executable, *words)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def measure_saves(pool: Any, task: Any) -> dict[str, Any]:
    """See savers.figures."""
    import savers

    return savers.figures(pool.run(savers.saves, task, timeout_s=1800.0))


def measure_writes(pool: Any, task: Any) -> dict[str, float]:
    """Seconds of a durable save of ours, and of a plain write of its bytes."""
    import savers

    rounds = pool.run(savers.writes, task, timeout_s=1800.0)[0]
    return {
        "ours_s": _median([ours for ours, _ in rounds]),
        "plain_s": _median([plain for _, plain in rounds]),
        "speed": _median([plain / ours for ours, plain in rounds]),
    }


def import_source(task: Any) -> Path:
    """DeepSpeed's checkpoint as one of ours: equal values on both sides of what follows."""
    folder = Path(task.folder)
    (folder / "source" / "config.json").write_text(json.dumps(task.model))
    python(folder, "-m", "llmtrain", "checkpoint", "from-deepspeed", str(folder / "source"), str(folder / "run"))
    (path,) = (folder / "run" / "checkpoints").iterdir()
    return path


def measure_resumes(pool: Any, task: Any, path: Path) -> dict[str, list[dict[str, float]]]:
    """Resume on one rank with ZeRO 2, by turns: ours, and DeepSpeed's conversion with the load of it."""
    import savers

    folder = Path(task.folder)
    tag = (folder / "source" / "latest").read_text()
    rounds: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for _ in range(task.rounds):
        ((seconds, read),) = pool.run(savers.resume_ours, task, str(path), timeout_s=1800.0)
        rounds["ours"].append({"seconds": seconds, "read": read})
        out = folder / "universal" / tag
        words = ("--input_folder", str(folder / "source" / tag), "--output_folder", str(out))
        converted = python(folder, "-m", "deepspeed.checkpoint.ds_to_universal", *words, "--inject_missing_state")
        ((seconds, read),) = pool.run(savers.resume_universal, task, str(folder / "universal"), timeout_s=1800.0)
        rounds["theirs"].append({"seconds": converted["seconds"] + seconds, "read": converted["read"] + read})
        shutil.rmtree(folder / "universal")
    return rounds


def measure_exports(task: Any, path: Path) -> dict[str, list[dict[str, float]]]:
    """To bf16 safetensors, by turns: ours without the proof, ours with it, DeepSpeed's zero_to_fp32 (in fp32)."""
    folder = Path(task.folder)
    out = folder / "exported"
    ours = ("-m", "llmtrain", "checkpoint", "to-hf", str(path), str(out), "--dtype", "bf16")
    programs = {
        "ours": (*ours, "--check", "none"),
        "proved": ours,
        "theirs": ("-m", "deepspeed.utils.zero_to_fp32", str(folder / "source"), str(out), "--safe_serialization"),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for _ in range(task.rounds):
        for name, words in programs.items():
            rounds[name].append(python(folder, *words))
            shutil.rmtree(out)
    rounds["start"] = [
        python(folder, "-c", "import llmtrain.checkpoint.hf, transformers; transformers.LlamaForCausalLM")
    ]
    rounds["their start"] = [python(folder, "-c", "import deepspeed.utils.zero_to_fp32")]
    return rounds


class Table:
    """Lines of what, ours, theirs, their ratio, and the target with whether it is met."""

    def __init__(self) -> None:
        self.lines = [("", "llmtrain", "against", "ratio", "target")]
        self.missed = False

    def row(
        self, what: str, sides: Sequence[float], unit: str, limit: float | None = None, *, least: bool = False
    ) -> None:
        """`sides`: ours and theirs. `limit`: the largest ratio that meets the target, or with `least` the smallest."""
        ours, theirs = sides
        ratio, target = ours / theirs, ""
        if limit is not None:
            met = ratio >= limit if least else ratio <= limit
            target = f"{'>=' if least else '<='} {limit:.3g} {'met' if met else 'MISSED'}"
            self.missed = self.missed or not met
        self.lines.append((what, f"{ours:,.3f} {unit}", f"{theirs:,.3f} {unit}", f"{ratio:.3f}", target))

    def __str__(self) -> str:
        return "\n".join(f"{w:<34}{ours:>16}{theirs:>16}{ratio:>9}  {t}" for w, ours, theirs, ratio, t in self.lines)


def add_saves(table: Table, found: dict[str, Any], parameters: int, on_gpu: bool) -> None:
    """Blocked time, bytes, speed of the disk."""
    ours = found["saves"]["llmtrain"]
    for name, limit in (("deepspeed", 1 / 20), ("dcp thread", 1 / 3), ("dcp process", 1 / 3)):
        if (theirs := found["saves"].get(name)) is None:
            continue
        table.row(f"loop blocked: {name}", (ours["blocked_s"], theirs["blocked_s"]), "s", limit)
        table.row(f"time lost: {name}", (ours["lost_s"], theirs["lost_s"]), "s")
    if on_gpu:
        table.row("time lost: 50 ms", (ours["lost_s"], 0.050), "s", 1)  # the GPU's own wait is in it
    saves = found["saves"]
    bytes_each = [saves[name]["bytes"] / parameters for name in ("llmtrain", "deepspeed") if name in saves]
    if len(bytes_each) == 2:
        table.row("bytes per parameter: deepspeed", bytes_each, "B")
    table.row("bytes per parameter: 12", (bytes_each[0], 12), "B", 1.005)  # headers, manifest and trainer.json
    if "writes" not in found:
        return
    speeds = [ours["bytes"] / 1e9 / found["writes"][key] for key in ("ours_s", "plain_s")]
    table.row("durable write: plain O_DIRECT", speeds, "GB/s", 0.85, least=True)


def add_conversions(table: Table, found: dict[str, Any], parameters: int) -> None:
    """Resume at another layout, and the export."""

    def middle(part: str, name: str, key: str) -> float:
        return _median([one[key] for one in found[part][name]])

    def both(part: str, key: str, unit_of: float = 1.0, ours: str = "ours") -> tuple[float, float]:
        return middle(part, ours, key) / unit_of, middle(part, "theirs", key) / unit_of

    table.row("resume: conversion + load", both("resumes", "seconds"), "s", 0.5)
    table.row("resume: bytes needed", (middle("resumes", "ours", "read") / 1e9, 12 * parameters / 1e9), "GB", 1.05)
    table.row("resume: bytes of the conversion", both("resumes", "read", 1e9), "GB")
    table.row("to-hf: zero_to_fp32", both("exports", "seconds"), "s", 1 / 3)
    table.row("to-hf with proof: zero_to_fp32", both("exports", "seconds", ours="proved"), "s", 0.8)
    starts = [middle("exports", name, "seconds") for name in ("start", "their start")]
    net = [value - start for value, start in zip(both("exports", "seconds"), starts, strict=True)]
    table.row("to-hf less imports: zero_to_fp32", net, "s")
    table.row("to-hf: its peak memory", both("exports", "peak_bytes", 1e9), "GB", 1 / 5)
    table.row("to-hf with proof: its peak memory", both("exports", "peak_bytes", 1e9, ours="proved"), "GB", 0.5)
    moved = sum(middle("exports", "ours", key) - middle("exports", "start", key) for key in ("read", "written"))
    table.row("to-hf: bytes read and written", (moved / 1e9, 6 * parameters / 1e9), "GB", 1.05)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; 1 when a target is missed, but 0 with --only: its figures are the result."""
    options = arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from savers import Task

    from llmtrain.base.imports import let_segments_grow
    from llmtrain.config.run import ModelConfig
    from llmtrain.models.spec import ModelSpec
    from tests.helpers.ranks import RankPool

    model, sequence, micro_batch, accumulation = PRESETS[options.preset]
    parameters = ModelSpec.of(ModelConfig(config=model)).facts.parameters
    machine = about()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-", dir=options.folder) as folder:
        task = Task(
            folder=folder,
            model=model,
            sequence=sequence,
            micro_batch=micro_batch,
            accumulation=accumulation,
            stage=1,
            rounds=options.rounds,
            parameters=parameters,
            savers=tuple(options.savers),
            source=options.only is None,
            figures="" if options.json is None else str(options.json.resolve()),
        )
        print(
            f"{parameters / 1e9:.3f} B parameters, {options.ranks} rank(s), bf16, ZeRO 1, {options.rounds} rounds",
            flush=True,
        )
        began_s = time.monotonic()

        def keep() -> None:
            head = {"machine": machine, "task": {**asdict(task), "folder": "", "figures": ""}, "ranks": options.ranks}
            write(options.json, {**head, "parameters": parameters, **found, **card.figures()})

        found: dict[str, Any] = {}
        let_segments_grow()
        pool = RankPool(options.ranks)
        try:
            with Card() as card:
                keep()
                found |= measure_saves(pool, task)
            keep()
            if task.source:
                found["writes"] = measure_writes(pool, task)
                keep()
        finally:
            pool.close()
        if task.source:
            path = import_source(task)
            found["exports"] = measure_exports(task, path)
            keep()
            pool = RankPool(1)
            try:
                found["resumes"] = measure_resumes(pool, task, path)
                keep()
            finally:
                pool.close()
    table = Table()
    add_saves(table, found, parameters, on_gpu)
    if task.source:
        add_conversions(table, found, parameters)
    print(f"an undisturbed step takes {found['step_s']:.2f} s; measured in {time.monotonic() - began_s:.0f} s")
    print(table)
    return int(table.missed and task.source)


if __name__ == "__main__":
    raise SystemExit(main())
