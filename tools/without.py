"""Copies this clone without some features, and tries the copy.

    python tools/without.py --to FOLDER NAME...       the copy alone; `all` for every feature
    python tools/without.py --try RUN.yaml NAME...    for each NAME a copy that must import all its modules, check the
                                                      run's configuration, train 3 steps, save, and resume

A feature is a folder of llmtrain/features, its tests in tests/features, its page in docs and its benchmarks in
tools/bench. Without them the rest of the clone must work, but for what others say about the feature in words.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEATURES = sorted(path.parent.name for path in ROOT.glob("llmtrain/features/*/__init__.py"))

TRIAL = """
import os, sys, pkgutil, importlib
import torch, transformers, deepspeed  # once, for all children
import llmtrain
from llmtrain import cli

assert llmtrain.__file__.startswith(os.getcwd()), llmtrain.__file__

def child(what, function):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = function()
            sys.stdout.flush()
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"{what} ended with {status}"

def imports():
    for module in pkgutil.walk_packages(llmtrain.__path__, "llmtrain."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return 0

run, here = sys.argv[1], ["--train.run_dir", "trial", "--tracking.wandb", "disabled"]
child("the import of every module", imports)
child("config check", lambda: cli.main(["config", "check", run]))
child("a run of 3 steps", lambda: cli.main(["train", run, *here, "--train.max_steps", "3"]))
child("a resume", lambda: cli.main(["train", run, *here, "--train.max_steps", "5"]))
"""
"""Runs in the copy. Its argument: a run's YAML."""


def copy(names: Sequence[str], target: Path) -> None:
    """Copy this clone's files, changes included, without these features."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        source, there = ROOT / name, target / name
        if name and source.exists() and not _belongs(name, names):
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, there, follow_symlinks=False)
    table = target / "tests" / "targets.txt"
    rows = [row for row in table.read_text().splitlines(keepends=True) if not _belongs(row.strip(), names)]
    table.write_text("".join(rows))
    pages = [sys.executable, "-m", "llmtrain.config.pages", "docs"]  # tables of fields, rules and metrics
    subprocess.run(pages, cwd=target, env=os.environ | {"PYTHONPATH": str(target)}, check=True)


def _belongs(path: str, names: Sequence[str]) -> bool:
    """True for a file of one of these features."""
    either = "|".join(map(re.escape, names))
    return bool(names) and bool(
        re.match(rf"(llmtrain|tests)/features/({either})(/|::|$)|docs/({either})\.md$|tools/bench/({either})[_.]", path)
    )


def attempt(names: Sequence[str], run: Path) -> None:
    """Raise CalledProcessError if a copy without these features does not import, check, train, save and resume."""
    with tempfile.TemporaryDirectory() as folder:
        copy(names, Path(folder))
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", TRIAL, str(run.resolve())], cwd=folder, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", choices=[*FEATURES, "all"], help=", ".join(FEATURES))
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where the copy goes; it must not exist")
    parser.add_argument("--try", dest="run", type=Path, metavar="RUN.yaml", help="a small run that each copy trains")
    args = parser.parse_args()
    if args.to is not None:
        args.to.mkdir(parents=True)
        copy(FEATURES if "all" in args.names else args.names, args.to)
    for name in args.names if args.run is not None else ():
        attempt(FEATURES if name == "all" else [name], args.run)
        print(f"without {name}: imports, check, 3 steps, save and resume passed", flush=True)


if __name__ == "__main__":
    main()
