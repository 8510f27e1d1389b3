"""A run and its plan: the start is refused by it, and its end shows both figures; only rank 0's host has the plan."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from llmtrain import cli
from llmtrain.features.plan import auto
from tests.helpers import forked
from tests.helpers.launching import TINY, rows, write_run
from tests.helpers.memory_limit import Limit, memory_limits_work

MEASURED = r"memory: .*\d [KMG]iB.*\d [KMG]iB"
"""The line at a run's end: planned and measured."""


def own_cache(folder: str, rank: int) -> None:
    """Each rank is on a host of its own, as far as caches go."""
    os.environ["LLMTRAIN_CACHE"] = f"{folder}/cache-{rank}"


def test_a_run_is_held_against_its_plan(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 40_000}}
    train = {"max_steps": 2, "micro_batch": 2, "eval_sequences": 4, "export": False}
    recipe = write_run(tmp_path, small_data, tree, train, model={"config": TINY})
    before = functools.partial(own_cache, str(tmp_path))

    def launch(margin: str, code: int) -> str:
        ranks = forked.Launch(recipe, "--plan.memory_margin", margin, world_size=2, before=before)
        assert ranks.wait(240) == [code] * 2, ranks.output()
        return ranks.output()

    refused = launch("0.01", 2)
    assert "plan.memory_margin = 0.01" in refused and "`llmtrain plan`" in refused, refused
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache-0"))
    assert cli.main(["plan", str(recipe), "--slots", "2", "--device", "cpu"]) == 0
    capsys.readouterr()
    refused = launch("0.99999999", 2)
    assert "plan.memory_margin = 0.99999999" in refused and "plan of 20" in refused, refused
    assert re.search(MEASURED, launch("0.01", 0))
    events = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    [planned] = [event["step_s"] for event in events if event["kind"] == "planned"]
    assert planned["computing"] > 0 and planned["messages"] > 0


@pytest.mark.skipif(not memory_limits_work(), reason="needs root and control groups for memory")
def test_the_kernels_killer_is_explained_by_the_plan(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch below a limit of memory, of which the states of its ranks take more."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    large = {**TINY, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    train = {"max_steps": 2, "micro_batch": 1}
    recipe = write_run(tmp_path, small_data, {"zero_optimization": {"stage": 1}}, train, model={"config": large})
    assert cli.main(["plan", str(recipe), "--slots", "2", "--device", "cpu"]) == 0
    capsys.readouterr()
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    with Limit(f"llmtrain-{os.getpid()}") as limit:
        limit.set(2_600_000_000)
        words = ["launch", "--hostfile", str(tmp_path / "hosts"), "--max-restarts", "0", "--", str(recipe)]
        program = [sys.executable, "-m", "llmtrain", *words]
        done = subprocess.run(program, capture_output=True, text=True, timeout=300, preexec_fn=limit.enter)
    assert done.returncode == 1, done.stdout + done.stderr
    event = rows(tmp_path / "run", "events.jsonl")[-1]
    assert (event["kind"], event["cause"]) == ("fault", "out_of_memory"), done.stderr
    assert "(plan of 20" in event["text"] and event["text"] in done.stderr
    assert all(label in event["text"] for label in ("weights", "moments")), event["text"]


AUTO = ("--train.micro_batch", "auto", "--train.global_batch", "16")


def with_free(folder: str, free: int, rank: int) -> None:
    """So many bytes on rank 1, and twice as many on rank 0."""
    own_cache(folder, rank)
    auto.free_bytes = lambda _: free if rank else 2 * free  # type: ignore[assignment]


def without_answer(folder: str, rank: int) -> None:
    with_free(folder, 1 << 30, rank)
    auto.of_module = lambda *_: [sys.executable, "-c", "raise SystemExit(3)"]  # type: ignore[assignment]


def without_time(folder: str, rank: int) -> None:
    with_free(folder, 1 << 30, rank)
    auto.LIMIT_S = 0.5


@pytest.fixture
def recipe(small_data: str, tmp_path: Path) -> Path:
    tree = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 40_000}}
    train = {"max_steps": 2, "eval_sequences": 4, "export": False}
    return write_run(tmp_path, small_data, tree, train, model={"config": TINY})


def test_a_start_decides_the_micro_batch(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the smallest rank's memory allows; the next start finds the stored answer. Steps of another micro-batch
    continue the run."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache-plan"))
    words = ["plan", str(recipe), "--slots", "2", "--device", "cpu", "--begun", "--json", *AUTO[2:]]
    words += ["--train.micro_batch", "4"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    needed = found["peak"] + sum(each["high"] for each in found["other"])
    before = functools.partial(with_free, str(tmp_path), needed)

    def launch(steps: int, *words: str) -> tuple[str, float]:
        began_s = time.monotonic()
        ranks = forked.Launch(recipe, *words, "--train.max_steps", str(steps), world_size=2, before=before)
        assert ranks.wait(240) == [0] * 2, ranks.output()
        return ranks.output(), time.monotonic() - began_s

    first, first_s = launch(2, *AUTO)
    assert "train.micro_batch auto: rehearsing" in first and "train.micro_batch auto: micro-batch 4" in first, first
    config = next(tmp_path.glob("**/config.yaml"))
    train = yaml.safe_load(config.read_text())["train"]
    assert (train["global_batch"], train["micro_batch"], train["accumulation"]) == (16, 4, 2)
    again, again_s = launch(4, *AUTO)
    print(f"first start and 2 steps {first_s:.1f} s, second {again_s:.1f} s")
    assert "rehearsing" not in again and re.search(r"auto: micro-batch 4\b.*\(plan of 20", again), again
    assert re.search(MEASURED, again)
    assert "micro-batch 2 x accumulation 4" in launch(6, "--train.micro_batch", "2", *AUTO[2:])[0]


@pytest.mark.parametrize(("before", "why"), [(without_answer, "exit code 3"), (without_time, "after 0 s")])
def test_a_start_without_an_answer_takes_least_memory(recipe: Path, tmp_path: Path, before: Any, why: str) -> None:
    words = (*AUTO, "--model.recompute.layers", "auto")
    ranks = forked.Launch(recipe, *words, world_size=2, before=functools.partial(before, str(tmp_path)))
    assert ranks.wait(240) == [0] * 2, ranks.output()
    said = ranks.output()
    assert "train.micro_batch and model.recompute.layers auto: micro-batch 1, all layers" in said and why in said, said
    assert "`llmtrain plan RUN.yaml --hosts 1 --slots 2 --memory 1073741824 --begun --device cpu`" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_leaves_no_rehearsal(recipe: Path, tmp_path: Path, number: signal.Signals) -> None:
    before = functools.partial(with_free, str(tmp_path), 1 << 30)
    ranks = forked.Launch(recipe, *AUTO, world_size=2, before=before)
    plans: list[psutil.Process] = []
    until_s = time.monotonic() + 120
    while not plans and time.monotonic() < until_s:
        time.sleep(0.2)
        with contextlib.suppress(psutil.NoSuchProcess):  # of another kind, and gone
            children = psutil.Process(ranks.ranks[0].pid).children(recursive=True)
            plans = [each for each in children if "plan" in each.cmdline()]
    assert plans, ranks.output()
    time.sleep(1.0)
    plans += plans[0].children(recursive=True)
    for rank in ranks.ranks:
        os.kill(rank.pid, number)
    assert None not in ranks.wait(60), ranks.output()
    _, alive = psutil.wait_procs(plans, timeout=5)
    assert not alive
