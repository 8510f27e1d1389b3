"""What the start of `config check` and of a rank imports, opens and lists: counts, which hold on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import REPO

PROGRAM = """
import collections, json, os, sys
events = collections.Counter()
sys.addaudithook(lambda event, _: events.update([event]) if event in ("open", "os.listdir", "os.scandir") else None)
from llmtrain.base.rank.heartbeat import heart
from llmtrain.cli import main

def report(*_):
    late = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "torchao")
    folders = events["os.listdir"] + events["os.scandir"]
    print(json.dumps([[name for name in late if name in sys.modules], len(sys.modules), events["open"], folders]))
    sys.stdout.flush()
    os._exit(0)

plain = heart.end_step
heart.end_step = lambda step: report() if step == 2 else plain(step)
code = main(sys.argv[1:])
report() if sys.argv[1] == "config" and code == 0 else sys.exit(code or 1)
"""
"""The modules that are loaded late, and numbers of modules, of files opened and of folders listed."""

MOST = {"check": (2_300, 2_650, 500), "train": (2_480, 2_900, 600)}
"""Without load_late of base/imports.py: 3,200 modules."""


def counted(words: list[str], cache: Path) -> list[list[str] | int]:
    env = {**os.environ, "LLMTRAIN_CACHE": str(cache), "WANDB_MODE": "disabled", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], env=env, cwd=REPO, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts: list[list[str] | int] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_start_imports_what_it_uses(command: str, small_data: str, tmp_path: Path) -> None:
    recipe = "launch/recipes/quickstart.yaml"
    words = ["config", "check", recipe] if command == "check" else ["train", "--config", recipe]
    words += ["--data.path", small_data, "--model.config.vocab_size=512"]
    counted([*words, "--train.run_dir", str(tmp_path / "run")], tmp_path)  # fills the cache folder
    late, *counts = counted([*words, "--train.run_dir", str(tmp_path / "again")], tmp_path)
    assert not late
    assert all(count <= most for count, most in zip(counts, MOST[command], strict=True)), counts
