"""Copies this clone without some features, and tries the copy.

    python tools/without.py --to FOLDER NAME...       the copy alone; `all` for every feature
    python tools/without.py --try RUN.yaml NAME...    for each NAME a copy of the package that must import all its
                                                      modules, check the run's configuration, train 3 steps, save,
                                                      and resume

A feature is a folder of llmtrain/features, its tests in tests/features, its page in docs and its benchmarks in
tools/bench. Without them the rest of the clone must work, but for what others say about the feature in words.
"""

from __future__ import annotations

import argparse
import itertools
import math
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
import contextlib, os, sys, pkgutil, importlib

for name in ("torch", "transformers.modeling_utils", "deepspeed", "peft", "torchao.float8"):  # once, for all children
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

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
    for module in pkgutil.walk_packages(sys.modules["llmtrain"].__path__, "llmtrain."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return 0

def trial(folder, run):
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    import llmtrain
    from llmtrain import cli
    assert llmtrain.__file__.startswith(folder), llmtrain.__file__
    here = ["--train.run_dir", "trial"]
    child("the import of every module", imports)
    child("config check", lambda: cli.main(["config", "check", run]))
    child("a run of 3 steps", lambda: cli.main(["train", run, *here, "--train.max_steps", "3"]))
    child("a resume", lambda: cli.main(["train", run, *here, "--train.max_steps", "5"]))
    return 0

answers = os.fdopen(int(sys.argv[1]), "w")
for line in sys.stdin:
    try:
        child("the trial", lambda: trial(*line.rstrip("\\n").split("\\t")))
        answer = "passed"
    except AssertionError as error:
        answer = str(error)
    print(answer, file=answers, flush=True)
"""
"""Tries each copy that a line of its input names: folder, tab, a run's YAML."""


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
    pages = [sys.executable, "-m", "tools.pages", "docs"]  # tables of fields, rules and metrics
    subprocess.run(pages, cwd=target, env=os.environ | {"PYTHONPATH": str(target)}, check=True)


def copy_package(names: Sequence[str], target: Path) -> None:
    """Copy the package alone, without these features; compiled files too, which Python takes for those of the copy."""
    for source in (ROOT / "llmtrain").rglob("*"):
        name = source.relative_to(ROOT)
        if source.is_file() and not _belongs(str(name), names):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def sets_of_features() -> list[list[str]]:
    """Few sets, so that of any two features some set has the one and not the other; and the set of all.

    Each feature is in half of the sets, no two in the same half (Sperner's theorem).
    """
    count = next(count for count in range(1, 99) if math.comb(count, count // 2) >= len(FEATURES))
    halves = dict(zip(FEATURES, itertools.combinations(range(count), count // 2), strict=False))
    return [[name for name in FEATURES if index in halves[name]] for index in range(count)] + [FEATURES]


def _belongs(path: str, names: Sequence[str]) -> bool:
    """True for a file of one of these features."""
    either = "|".join(map(re.escape, names))
    return bool(names) and bool(
        re.match(rf"(llmtrain|tests)/features/({either})(/|::|$)|docs/({either})\.md$|tools/bench/({either})[_.]", path)
    )


class Trials:
    """A process that has imported torch, transformers and DeepSpeed, and tries copies in children."""

    def __init__(self) -> None:
        read, write = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        command = [sys.executable, "-P", "-c", TRIAL, str(write)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, pass_fds=[write], env=environment)
        os.close(write)
        self._answers = os.fdopen(read)

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()

    def attempt(self, names: Sequence[str], run: Path) -> str:
        """Return "passed" if the package without these features imports, checks, trains, saves and resumes."""
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            copy_package(names, Path(folder))
            print(folder, run.resolve(), sep="\t", file=self._process.stdin, flush=True)
            return self._answers.readline().strip() or "its process has died"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", choices=[*FEATURES, "all"], help=", ".join(FEATURES))
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where the copy goes; it must not exist")
    parser.add_argument("--try", dest="run", type=Path, metavar="RUN.yaml", help="a small run that each copy trains")
    args = parser.parse_args()
    if args.to is not None:
        args.to.mkdir(parents=True)
        copy(FEATURES if "all" in args.names else args.names, args.to)
    if args.run is None:
        return 0
    with Trials() as trials:
        answers = {name: trials.attempt(FEATURES if name == "all" else [name], args.run) for name in args.names}
    for name, answer in answers.items():
        print(f"without {name}: import, check, 3 steps, save and resume: {answer}", flush=True)
    return 0 if {*answers.values()} == {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main())
