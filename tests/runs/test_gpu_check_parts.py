"""Every part of tools/gpu_check.sh to its end at a CPU's size, as a bare machine runs it: packages on PYTHONPATH alone,
no git, no .venv. tests/unit/test_gpu_check.py has what the script itself does, and one test for each fault found."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests.helpers.launching import REPO, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
TREE = ("llmtrain", "tools", "tests", "ds_configs", "launch", "pyproject.toml")
PROGRAMS = "bash sh cat cmp df dirname env gcc g++ grep ls mkdir mktemp mv rm sleep tail tar tee timeout"
SMALLER = {
    "facts.py": "--device cpu --size 64",
    "train_speed.py": "--preset small --rounds 1 --steps 1 --sequence 32 --micro-batch 1 --accumulation 1",
    "posttraining.py": "--rounds 1 --steps 1 --hidden 64 --layers 1 --sequence 256 --batch 2",
    "checkpoint.py": "--preset tiny",
    "experts.py": "--preset small --experts 4 --zero 1 --rounds 1 --steps 1",
    "long_context.py": "--preset small --tokens 64 --limit-gib 4",
    "llmtrain": "--device cpu --steps 2",
    "pytest": "-k test_chunked_loss_is_the_one_of_transformers",
}
SHRINK = """
import os, sys
words, smaller = sys.argv[1:], {smaller!r}
name = os.path.basename(words[1] if words[0] == "-m" else words[0])
if name == "posttraining.py" and "--preset" in words:  # it has the sizes of its own
    at = words.index("--preset")
    del words[at : at + 2]
os.execv({python!r}, [{python!r}, *words, *smaller.get(name, "").split()])
"""


def test_every_part_ends_on_a_bare_machine(tmp_path: Path) -> None:
    clone, bin_, out = tmp_path / "clone", tmp_path / "bin", tmp_path / "out"
    clone.mkdir()
    for each in TREE:
        copy = shutil.copytree if (REPO / each).is_dir() else shutil.copy
        copy(REPO / each, clone / each)
    bin_.mkdir()
    for name in PROGRAMS.split():
        if found := shutil.which(name):
            (bin_ / name).symlink_to(found)
    python = str(Path(sys.base_prefix) / "bin/python3")
    (tmp_path / "shrink.py").write_text(SHRINK.format(smaller=SMALLER, python=python))
    (bin_ / "python3").write_text(f'#!/bin/sh\nexec {python} {tmp_path}/shrink.py "$@"\n')
    (bin_ / "python3").chmod(0o755)
    (out / "cache").mkdir(parents=True)
    (out / "cache/site-packages").symlink_to(sysconfig.get_paths()["purelib"])
    env = {name: value for name, value in environment().items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env |= {"PATH": str(bin_), "LLMTRAIN_GPU_TESTS_ON_CPU": "1"}
    text = (clone / "tools/gpu_check.sh").read_text()
    every = re.search(r"^all=\(([^)]*)\)", text, re.MULTILINE)
    assert every is not None
    parts = every[1].split()
    words = ["bash", "tools/gpu_check.sh", "--seconds", "2900", "--keep", str(tmp_path / "kept"), str(out), *parts]
    done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "gpu-check: passed" in said, said[-6000:]
    assert re.findall(r"gpu-check: (\S+): ended after", said) == parts
    assert re.search(r"tests/gpu: [1-9]\d* passed, 0 failed, 0 skipped", said), said[-3000:]
    assert "not measured" not in said and "No such file or directory: 'git'" not in said
    with tarfile.open(tmp_path / "kept/figures.tar") as tar:
        found = {name.removeprefix("./") for name in tar.getnames()}
        assert {f"{part}.json" for part in parts if part != "tests"} <= found
        assert {"tests.xml", "gpu-check.log"} <= found
        assert not any("cache" in name for name in found)
    for part in parts:
        if part not in ("tests", "parity", "facts", "saves", "moe", "context-1b", "context-8b"):
            figures = json.loads((out / f"{part}.json").read_text())["contestants"]
            assert all(one["tokens_per_s"] > 0 and one["attention"] for one in figures.values()), part
            asked = re.search(rf"{re.escape(part)}\)[^;]*--contestants ([\w,-]+)", text)
            assert asked is None or len(figures) == len(asked[1].split(",")), part
