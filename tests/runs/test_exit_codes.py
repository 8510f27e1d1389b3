"""The table of exit codes in docs/training.md, row by row: what a rank ends with, and what launch makes of that.

DeepSpeed's launcher ends with the first code of a rank that is not 0, or with 1 after Ctrl-C (test_training.py).
"""

from __future__ import annotations

import functools
import os
import re
import signal
from pathlib import Path

import pytest

from llmtrain import cli
from llmtrain.base.rank import messages
from llmtrain.cluster.launch.attempts import Attempt
from tests.helpers import forked
from tests.helpers.launching import REPO, rows, write_recipe

MINE = """
import os, signal, sys, time
from dataclasses import dataclass
from llmtrain import ByToken, Metric, Part, Request

@dataclass(kw_only=True)
class Mine(Part, entry="mine"):
    how: str = ""

    def request(self):
        return Request(stop=self.how == "asks")

    def begin(self, position):
        self._act("begin")

    def after_step(self, done):
        self._act("after_step")
        if self.how == "mutes":
            sys.stdout.close()
        if self.how == "closes":
            os.close(1)
        if self.how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.how))

    def to_json(self):
        self._act("to_json")

    def close(self, error):
        self._act("close")
        time.sleep(600 if self.how == "stays" else 0)

    def _act(self, method):
        if self.how == method:
            raise RuntimeError("as asked")

@dataclass(kw_only=True)
class Wrong(Metric, entry="wrong"):
    def values(self, nll, labels):
        raise RuntimeError("as asked")

@dataclass(frozen=True, kw_only=True)
class Mute(ByToken, choice="mute"):
    def terms(self, nll):
        sys.stdout.close()
        return (nll,)

@dataclass(frozen=True, kw_only=True)
class Loss(ByToken, choice="loss"):
    def terms(self, nll):
        return (nll * (float("nan") if len(nll) > 8 else 1.0),)  # not of the few numbers of the check
"""
PART, STOPPED, HERE = "--parts.mine.how", "was asked to stop by", "--fault.preempt_file"
CASES: dict[str, tuple[str, list[str], str]] = {
    "complete": ("is complete", [], ""),
    "mute": ("meets an exception in a plugin's objective", ["--objective.name", "mute"], ""),
    "time": ("is complete", ["--train.max_steps", "null", "--train.max_minutes", "1e-9"], ""),
    "asks": (f"{STOPPED} a plugin's part", [PART, "asks"], "parts.mine asked to stop"),
    "SIGTERM": (f"{STOPPED} SIGTERM", [PART, "SIGTERM"], "SIGTERM"),
    "SIGHUP": (f"{STOPPED} SIGTERM", [PART, "SIGHUP"], "SIGHUP"),
    "preempted": (f"{STOPPED} SIGTERM", [HERE, "/proc/version"], "preempt file /proc/version is on "),
    "SIGINT": (f"{STOPPED} Ctrl-C", [PART, "SIGINT"], "Ctrl-C"),
    "mistake": ("refuses a mistake", ["--optim.lr", "-1"], ""),
    "import": ("refuses a mistake", ["--plugin", "mute.py"], ""),
    "metric": ("meets an exception in a plugin's objective", ["--metrics.wrong", "--train.eval", "true"], ""),
    "begin": ("meets an exception in a plugin's part", [PART, "begin"], ""),
    "after_step": ("meets an exception in a plugin's part", [PART, "after_step"], "parts.mine: after_step at step 1: "),
    "mutes": ("meets an exception in a plugin's part", [PART, "mutes"], "it has closed sys.stdout, where"),
    "closes": ("meets an exception in a plugin's part", [PART, "closes"], "it has closed sys.stdout, where"),
    "to_json": ("meets an exception in a plugin's part", [PART, "to_json"], "parts.mine: to_json at step 3: "),
    "close": ("meets an exception in a plugin's part", [PART, "close"], ""),
    "skipped": ("ends itself", ["--objective.name", "loss", "--fault.max_skipped", "2"], "2 steps in a row"),
    "stays": ("stays in a method", [PART, "stays", "--fault.stall_timeout_s", "1"], ""),
}
"""Name -> (beginning of the table's row, words of the run, the reason in its event `stop`)."""
ELSEWHERE = {
    "has ranks that no longer agree": "tests/runs/test_consistency.py, tests/unit/cluster/test_launch_attempts.py",
    "stays in a method": "under a launcher: tests/runs/test_plugin.py",
    "has lost a rank or a host": "tests/features/watch/test_watch_runs.py, tests/unit/cluster/test_launch_supervise.py",
}


def run_all(folder: Path, data: str, rank: int) -> None:
    """Each case in turn, in the process of a rank; its output between two lines."""
    os.environ |= {"MASTER_PORT": "0", messages.SUPERVISED: "1"}
    os.chdir(folder)
    Path("mute.py").write_text("import sys; sys.stdout.close()")
    for name, (_, words, _) in CASES.items():
        (folder / name).mkdir()
        recipe = str(write_recipe(folder / name, data))
        print(f"== {name}", flush=True)
        code = cli.main(
            [
                "train",
                recipe,
                "--train.eval",
                "false",
                "--train.max_steps",
                "3",
                "--schedule.name",
                "constant",
                "--plugin",
                str(folder / "mine.py"),
                *words,
            ]
        )
        print(f"== code {code}", flush=True)


@pytest.mark.timeout(300)
def test_each_way_to_end_has_the_code_of_the_table(small_data: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    recipe = write_recipe(tmp_path, small_data)
    code, output = forked.finish(recipe, "--no", world_size=1, before=functools.partial(run_all, tmp_path, small_data))
    assert code == 2
    page = (REPO / "docs/training.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    table = {cells[0]: cells[1:] for line in re.findall(r"^\| (.*) \|$", page, re.M) if (cells := line.split(" | "))}
    told = dict(re.findall(r"^== (\w+)\n(.*?^== code \d+)$", output, re.M | re.S))
    assert told.keys() == CASES.keys(), output
    covered = set()
    for name, (begins, _, reason) in CASES.items():
        (row,) = [each for each in table if each.startswith(begins)]
        covered.add(row)
        own, supervised = ended(name, told[name])
        assert own == table[row][0] and (supervised == table[row][2] or name == "stays"), (name, told[name])
        stops = [
            event["reason"] or "" for event in rows(tmp_path / name / "run", "events.jsonl") if event["kind"] == "stop"
        ]
        assert not reason or [each for each in stops if reason in each], (name, stops, told[name])
    assert {row for row in table if not row.startswith(tuple(ELSEWHERE))} <= covered | {"a run that", "---"}
    stays = told["stays"]
    line = 1 + next(at for at, each in enumerate(MINE.splitlines()) if "time.sleep(600" in each)
    assert f"parts.mine: close at step 3: {tmp_path}/mine.py line {line}: TimeoutError: it has not returned" in stays


def ended(name: str, text: str) -> tuple[str, str]:
    """The exit code of a run, and that of a launch of it."""
    own = int(re.findall(r"^== code (\d+)$", text, re.M)[0])
    attempt = Attempt(began_s=0.0, asked=signal.SIGINT if name == "SIGINT" else None)
    for line in text.splitlines():
        if (message := messages.parse(line)) is not None:
            attempt.hear(message, 0.0)
    return str(own), str(attempt.outcome(own).code)
