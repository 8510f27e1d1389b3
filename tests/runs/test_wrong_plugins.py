"""Plugins that break the rules without an exception of their own: each is named with the method, and nothing hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from llmtrain.cli import main
from tests.helpers.forked import finish
from tests.helpers.launching import finish as finish_process
from tests.helpers.launching import launch, losses, write_recipe
from tests.helpers.warm import WarmCommands

WRONG = """
import os, random, signal, sys
from dataclasses import dataclass, replace
import numpy, torch
import torch.distributed as dist
from llmtrain import ByToken, Metric, Part, Request, Schedule

RANK = int(os.environ["RANK"])

@dataclass(frozen=True, kw_only=True)
class Loss(ByToken, choice="loss"):
    how: str = "nan"

    def terms(self, nll):
        if self.how == "raises on a rank" and RANK == 1 and nll.requires_grad and len(nll) > 8:  # in a step
            raise ValueError("as asked")
        if self.how == "exits":
            sys.exit(3)
        if self.how == "interrupts":
            raise KeyboardInterrupt
        later = float("nan") if len(nll) > 8 else 1.0  # the check tries eight numbers
        forms = {"nan": nll * later, "sum": nll.sum(), "bool": nll > 1, "detached": nll.detach(), "number": 3.0}
        return (forms.get(self.how, nll * 1),)

@dataclass(frozen=True, kw_only=True)
class Rate(Schedule, choice="rate"):
    needs_length = False
    how: str = "nan"

    def after_warmup(self, step, max_steps):
        return {"nan": float("nan"), "word": "fast", "differs": 1.0 + RANK}[self.how]

@dataclass(kw_only=True)
class Value(Metric, entry="value"):
    def values(self, nll, labels):
        sys.exit(3)

@dataclass(kw_only=True)
class Mine(Part, entry="mine"):
    how: str = "right"

    def open(self, launch):
        self.launch, self.model = launch, launch.setup.engine.module
        self.one = next(each for each in self.model.parameters() if each.ndim == 2)

    def request(self):
        more = Request(sums={"mine": [1]} if RANK else {})
        return {"sums": more, "word": Request(stop="no")}.get(self.how, Request())

    def after_step(self, done):
        if done.position.step == 6:
            return getattr(self, f"_{self.how}", lambda done: None)(done)

    def figures(self, done):
        return {"object": {"x": object()}, "key": {3: 1.0}, "tensor": {"x": torch.ones(1)}}.get(self.how, {})

    def to_json(self):
        return {"set": {1, 2}, "keys": {(1, 2): 3}}.get(self.how)

    def state(self):
        return {"text": ["x"], "none": None}.get(self.how, [])

    def _forks(self, done):
        if RANK == 1:
            os.fork()

    def _seeds(self, done):
        random.seed(RANK), numpy.random.seed(RANK), torch.manual_seed(5 + RANK)

    def _clears(self, done):
        os.environ.clear()

    def _no_grad(self, done):
        torch.set_grad_enabled(False)

    def _dtype(self, done):
        torch.set_default_dtype(torch.float64)

    def _evaluates(self, done):
        self.model.eval()

    def _ignores(self, done):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _moves(self, done):
        os.chdir("/")

    def _freezes(self, done):
        if RANK == 1:
            self.one.requires_grad_(False)

    def _resizes(self, done):
        self.one.data = self.one.data[:-1].clone()

    def _destroys(self, done):
        if RANK == 1:
            dist.destroy_process_group()

    def _gathers(self, done):
        if RANK == 1:
            dist.all_reduce(torch.ones(1))

    @torch.no_grad()
    def _adds(self, done):
        if RANK == 1:
            self.one.add_(1)

    def _rewinds(self, done):
        return replace(done.position, step=1) if RANK == 1 else None

    def _unlinks(self, done):
        if RANK == 0:
            (self.launch.folder.path / "metrics.jsonl").unlink()
            (self.launch.folder.path / "config.yaml").unlink()
"""
slow = pytest.mark.slow
LOSS, RATE = "objective.name loss: terms", "schedule.name rate: after_warmup returns"
PART = "parts.mine: after_step at step 6"
SAVED = "The run has saved; fix the plugin"
ENDED: list[tuple[str, str, tuple[str, ...]]] = [
    ("loss", "sum", (f"{LOSS} gives [()]; it must return",)),
    ("loss", "number", (f"{LOSS} gives (float); it must return",)),
    ("loss", "bool", (f"{LOSS} gives a loss of torch.bool without a gradient",)),
    ("loss", "detached", (f"{LOSS} gives a loss of torch.float32 without a gradient",)),
    ("loss", "exits", (f"{LOSS}: ", "mine.py line ", "SystemExit: 3")),
    ("loss", "interrupts", (f"{LOSS}: ", "mine.py line ", "KeyboardInterrupt")),
    ("loss", "nan", ("step 3 skipped: non-finite loss of the plugin's objective.name loss", "3 steps in a row")),
    ("rate", "nan", (f"{RATE} nan at step 0",)),
    ("rate", "word", (f"{RATE} 'fast' at step 0",)),
    ("rate", "differs", ("learning-rate factor of the step", "such as that of the plugin mine")),
    ("value", "", ("metrics.value: values: ", "mine.py line ", "SystemExit: 3")),
    ("mine", "sums", ("parts.mine: request at step 0: TypeError: it returns Request(", SAVED)),
    ("mine", "word", ("parts.mine: request at step 0: TypeError: it returns Request(", SAVED)),
    ("mine", "object", ("parts.mine: figures at step 1: TypeError: it returns object as x", SAVED)),
    ("mine", "key", ("parts.mine: figures at step 1: TypeError: it returns int", SAVED)),
    ("mine", "set", ("parts.mine: to_json at step 5: TypeError: Object of type set is not JSON", SAVED)),
    ("mine", "keys", ("parts.mine: to_json at step 5: TypeError: keys must be", SAVED)),
    ("mine", "text", ("parts.mine: state at step 0: TypeError: it returns str, but must return StateTensor",)),
    ("mine", "none", ("parts.mine: state at step 0: TypeError: 'NoneType' object is not iterable",)),
    ("mine", "no_grad", (f"{PART}: RuntimeError: it has changed torch.set_grad_enabled", SAVED)),
    ("mine", "dtype", (f"{PART}: RuntimeError: it has changed torch.set_default_dtype", SAVED)),
    ("mine", "evaluates", (f"{PART}: RuntimeError: it has changed train() or eval() of the model", SAVED)),
    ("mine", "ignores", (f"{PART}: RuntimeError: it has changed the handlers of the signals", SAVED)),
    ("mine", "moves", (f"{PART}: RuntimeError: it has changed the working directory", SAVED)),
    ("mine", "freezes", (f"rank 1: {PART}: RuntimeError: it has changed requires_grad of parameters", SAVED)),
    ("mine", "adds", (f"rank 1: {PART}: RuntimeError: it has changed the values of ", SAVED)),
    ("mine", "rewinds", (f"rank 1: {PART}: TypeError: it returns Position, but must return None", SAVED)),
    ("mine", "resizes", (f"{PART}: it has changed the shape of ",)),
]
_AT_ONCE = ("detached", "sums", "no_grad", "keys")


def words_of(folder: Path, entry: str, how: str) -> list[str]:
    """The words of a run with the plugin, of which this entry takes part in this way."""
    (mine := folder / "mine.py").write_text(WRONG)
    names = {
        "loss": ["--objective.name", "loss", "--objective.how", how],
        "value": ["--metrics.value"],
        "rate": ["--schedule.name", "rate", "--schedule.how", how],
        "mine": ["--parts.mine.how", how],
    }
    return [
        "--plugin",
        str(mine),
        *names[entry],
        "--train.max_steps",
        "8",
        "--fault.max_skipped",
        "3",
        "--checkpoint.mode",
        "sync",
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("entry", "how", "told"),
    [pytest.param(*each, marks=() if each[1] in _AT_ONCE else slow) for each in ENDED],
)
def test_a_plugin_that_breaks_a_rule_is_named_and_what_was_saved_is_intact(
    small_data: str, tmp_path: Path, entry: str, how: str, told: tuple[str, ...]
) -> None:
    code, output = finish(write_recipe(tmp_path, small_data), *words_of(tmp_path, entry, how))
    assert code in (2, 3) and "Traceback" not in output, output
    assert not [each for each in told if each not in output], output
    checkpoints = tmp_path / "run/checkpoints"
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    assert SAVED not in told or any(checkpoints.iterdir())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["seeds", pytest.param("clears", marks=slow), pytest.param("unlinks", marks=slow)])
def test_what_a_plugin_may_do_without_harm_leaves_the_losses_as_they_are(
    small_data: str, tmp_path: Path, how: str
) -> None:
    """To random numbers, the environment and the run's own files."""
    found = []
    for each in ("right", how):
        (folder := tmp_path / each).mkdir()
        code, output = finish(write_recipe(folder, small_data), *words_of(folder, "mine", each))
        assert code == 0, output
        found.append({step: loss for step, loss in losses(folder / "run").items() if step > 6})
        assert (folder / "run/config.yaml").is_file()
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("entry", "how", "codes", "told"),
    [
        (
            "loss",
            "raises on a rank",
            (1, 2),
            f"rank 1 on HOST has ended with an error that the others do not have: {LOSS}",
        ),
        ("mine", "forks", (0,), "parts.mine: after_step: has forked its rank, and the new process returns from it"),
        pytest.param("mine", "destroys", (1, 2), f"{PART}: it has destroyed the process groups of the run", marks=slow),
        pytest.param("mine", "gathers", (247,), "rank 1 on HOST is in parts.mine: after_step at ", marks=slow),
    ],
)
def test_what_one_rank_does_alone_is_named_and_leaves_no_process(
    small_data: str, tmp_path: Path, entry: str, how: str, codes: tuple[int, ...], told: str, warm: WarmCommands
) -> None:
    words = [*words_of(tmp_path, entry, how), "--fault.stall_timeout_s", "5"]
    process = launch(write_recipe(tmp_path, small_data), *words, warm=warm)
    found, output = finish_process(process, timeout_s=120)
    assert found in codes, output
    assert told.replace("HOST", os.uname().nodename) in output and "mine.py" in output, output
    deadline = time.monotonic() + 60  # the watch's agent ends after the ranks
    while any(str(tmp_path) in str(each.info["cmdline"]) for each in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline
        time.sleep(0.2)
