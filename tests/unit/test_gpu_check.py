"""tools/gpu_check.sh and its table: parts, what a cut-off part leaves, on a machine that only seems to have a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_bench import load

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
# A python3 with a GPU: it notes what it is asked to run, and pytest takes too long.
case "$*" in
  -c*) exit 0;;
  *gpu_table.py*) exec REAL "$@";;
  *tools/*|*"-m pytest"*|*"-m llmtrain parity"*) echo "$*" >> LOG;;
esac
case "$*" in *"-m pytest"*) exit 1;; *"--preset 8b"*) exit 3;; esac
exit 0
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A clone without .venv, and a python3 that has CUDA and all packages."""
    text = PYTHON.replace("REAL", sys.executable).replace("LOG", str(tmp_path / "log"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(text)
    (tmp_path / "bin/python3").chmod(0o755)
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone/tools").symlink_to(ROOT / "tools")
    script = tmp_path / "clone/check.sh"
    script.write_text(
        (ROOT / "tools/gpu_check.sh").read_text().replace('cd "$(dirname "$0")/.."', f"cd {tmp_path}/clone")
    )
    return {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def check(tmp_path: Path, env: dict[str, str], *parts: str) -> subprocess.CompletedProcess[str]:
    argv = ["bash", str(tmp_path / "clone/check.sh"), str(tmp_path / "out"), *parts]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_the_parts_that_are_asked_for_run_and_a_failed_one_is_named(tmp_path: Path, machine: dict[str, str]) -> None:
    done = check(tmp_path, machine, "tests", "8b", "parity")
    asked = (tmp_path / "log").read_text().splitlines()
    assert done.returncode == 1 and "FAILED: tests;" in done.stdout, done.stdout + done.stderr
    assert "gpu-check: 8b: skipped, it does not fit this GPU" in done.stdout
    assert "tests/gpu" in asked[0] and "--preset 8b --only llmtrain" in asked[1] and len(asked) == 6
    assert all("parity launch/recipes/quickstart.yaml" in line for line in asked[2:])
    assert json.loads((tmp_path / "out/parity.json").read_text())["passed"] == ["zero1", "zero2", "zero3", "zero1_fp32"]
    assert (
        "not measured: 0.5b, 1.2b, 8b, 1.2b-fp8, 8b-fp8, host, checkpoints, context-1b, context-8b, sft-1b, lora-1b, "
        "packing, packing-dpo, tests" in done.stdout
    )


@pytest.mark.parametrize(
    ("gib", "part", "contestants", "together"),
    [
        (139, "0.5b", 3, True), (139, "1.2b", 3, True), (139, "8b", 1, True), (139, "sft", 3, True),
        (78, "0.5b", 3, False), (78, "1.2b", 3, False), (78, "8b", 0, True), (78, "sft", 3, False),
    ],
)  # fmt: skip
def test_each_part_fits_an_h100_and_an_h200(gib, part, contestants, together, capsys) -> None:
    """Three contestants at a time took 82 GiB of an H100's 78: the part died, and ours was not measured either.

    The counts are held to tensors without memory by tests/unit/models/test_fake_steps.py.
    """
    speed, tuning = load("train_speed"), load("posttraining")
    names = speed.NAMES if part in ("0.5b", "1.2b") else (speed.OURS,)
    if part == "sft":
        options = tuning.arguments(["--only", "sft", "--preset", "1.2b"])
        options.batch, needs, alike = tuning.what_fits(options, ("llmtrain full", "trainer full", "trl sft"), gib)
        assert options.batch == (4 if together else 2) and alike is together
        assert all(need.alone <= gib for need in needs)
        return
    preset = speed.PRESETS[part]
    task = speed.Task(
        folder="", model=preset.model, sequence=preset.sequence, micro_batch=preset.micro_batch, accumulation=1,
        bf16=True, eager=False, contestants=names, threads=1, steps_per_round=1, rounds=1,
    )  # fmt: skip
    left, at_a_time = speed.arrange(preset, part, task, float(gib))
    assert (len(left), at_a_time) == (contestants, together)
    said = capsys.readouterr().out
    assert ("8b: llmtrain needs 128 GiB, this GPU has 78: skipped" in said) is (contestants == 0)
    assert ("each alone" in said) is not together


def test_a_peer_that_dies_leaves_our_figures_and_one_after_another_is_a_race_too(capsys) -> None:
    speed = load("train_speed")
    task = SimpleNamespace(contestants=("llmtrain", "plain", "trainer"), rounds=3, threads=1)
    for together in (True, False):
        seen: list[dict[str, int]] = []
        found = speed.race(
            task, lambda r, seen=seen: seen.append({k: len(v) for k, v in r.items()}), _contestant, together=together
        )
        assert {name: len(rounds) for name, rounds in found.items()} == {"llmtrain": 2, "trainer": 2}
        assert seen[0] == ({"llmtrain": 1, "trainer": 1} if together else {"llmtrain": 1})
        assert "plain: its process died; its own output above says why: left out" in capsys.readouterr().out


def _contestant(name: str, pipe: Any, task: Any) -> None:
    """One that answers each word; plain dies in its second round."""
    pipe.send(None)
    for turn in range(task.rounds):
        pipe.recv()
        if name == "plain" and turn:
            os._exit(1)
        pipe.send(turn)
    pipe.recv()
    pipe.send("end")


def test_an_unknown_part_is_refused_with_those_that_there_are(tmp_path: Path, machine: dict[str, str]) -> None:
    done = check(tmp_path, machine, "2b")
    assert done.returncode == 2 and "no part 2b; there are tests 0.5b" in done.stderr
    assert not (tmp_path / "log").exists()


def test_the_table_shows_what_is_there(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from gpu_table import table  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    ours = {"tokens_per_s": 112345.6, "ms_per_step": 291.7, "peak_gib": 61.2}
    speed = {
        "machine": {"torch": "2.13.0", "device": "NVIDIA H200"},
        "task": {"steps_per_round": 10},
        "contestants": {"llmtrain": ours, "trainer": {**ours, "tokens_per_s": 70000.0}},
        "speed_of_ours_over": {"trainer": 1.61},
        "losses": [1.0] * 22,
    }
    (tmp_path / "0.5b.json").write_text(json.dumps(speed))
    save = {"blocked_s": 0.02, "lost_s": 0.031, "bytes": 24.0}
    (tmp_path / "checkpoints.json").write_text(json.dumps({"saves": {"llmtrain": save}, "parameters": 2}))
    row = {**ours, "ours_over_it": 0.5, "loss_difference": 2e-3}
    (tmp_path / "lora-1b.json").write_text(json.dumps({"contestants": {"llmtrain lora": row, "trl lora": row}}))
    packed = {**ours, "counted_per_s": 30123.0, "ours_over_it": 0.25, "loss_difference": 2e-3, "held_out": 1.5}
    (tmp_path / "packing.json").write_text(json.dumps({"contestants": {"llmtrain full": packed, "trl sft": packed}}))
    (tmp_path / "context-8b.json").write_text(json.dumps({"llmtrain": {"tokens": 196608}}))
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="30" failures="1" errors="0" skipped="2" time="201.4"/></testsuites>'
    )
    shown = table(tmp_path)
    assert shown.startswith("torch 2.13.0, device NVIDIA H200\ntests/gpu: 27 passed, 1 failed, 2 skipped, 201 s\n")
    assert "| 0.5b (2 rounds) | llmtrain | 112,346 | 291.7 | 61.2 |  | 110,000 |" in shown
    assert "| 0.5b (2 rounds) | trainer | 70,000 | 291.7 | 61.2 | 1.61 | 1.5 |" in shown
    assert "| llmtrain | 0.020 | 0.031 | 12.000 |" in shown and "196,608 tokens: did not fit" in shown
    assert "| lora-1b | llmtrain lora | 112,346 | 291.7 | 61.2 |  |  |" in shown
    assert "| lora-1b | trl lora | 112,346 | 291.7 | 61.2 | 2.00 | 2.0e-03 |" in shown
    assert "| packing | llmtrain full | 30,123 | 61.2 |  |  | 1.50000 |" in shown
    assert "| packing | trl sft | 30,123 | 61.2 | 4.00 | 2.0e-03 | 1.50000 |" in shown
    assert shown.endswith("not measured: 1.2b, 8b, 1.2b-fp8, 8b-fp8, host, parity, context-1b, sft-1b, packing-dpo")
