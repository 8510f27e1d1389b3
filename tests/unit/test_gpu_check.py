"""tools/gpu_check.sh and its table: parts, what a cut-off part leaves, on a machine that only seems to have a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
# A python3 with a GPU: it notes what it is asked to run, and pytest takes too long.
case "$*" in
  -c*) exit 0;;
  *gpu_table.py*) exec REAL "$@";;
  *tools/*|*"-m pytest"*|*"-m llmtrain parity"*) echo "$*" >> LOG;;
esac
case "$*" in *"-m pytest"*) exit 1;; esac
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
    assert "tests/gpu" in asked[0] and "--preset 8b --only llmtrain" in asked[1] and len(asked) == 6
    assert all("parity launch/recipes/quickstart.yaml" in line for line in asked[2:])
    assert json.loads((tmp_path / "out/parity.json").read_text())["passed"] == ["zero1", "zero2", "zero3", "zero1_fp32"]
    assert (
        "not measured: 0.5b, 1.2b, 8b, host, checkpoints, context-1b, context-8b, sft-1b, lora-1b, tests" in done.stdout
    )


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
    assert shown.endswith("not measured: 1.2b, 8b, host, parity, context-1b, sft-1b")
