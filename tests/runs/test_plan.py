"""A run and its plan: the start is refused by it, and its end shows both figures; only rank 0's host has the plan."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from llmtrain import cli
from tests.helpers import forked
from tests.helpers.launching import TINY, write_run


def own_cache(folder: str, rank: int) -> None:
    """Each rank is on a host of its own, as far as caches go."""
    os.environ["LLMTRAIN_CACHE"] = f"{folder}/cache-{rank}"


def test_a_run_is_held_against_its_plan(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    json = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 40_000}}
    train = {"max_steps": 2, "micro_batch": 2, "eval_sequences": 4, "export": False}
    recipe = write_run(tmp_path, small_data, json, train, model={"config": TINY})
    before = functools.partial(own_cache, str(tmp_path))

    def launch(margin: str, code: int) -> str:
        ranks = forked.Launch(recipe, "--train.memory_margin", margin, world_size=2, before=before)
        assert ranks.wait(240) == [code] * 2, ranks.output()
        return ranks.output()

    assert "has no plan of the run" in launch("0.01", 2)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache-0"))
    assert cli.main(["plan", str(recipe), "--slots", "2", "--device", "cpu"]) == 0
    capsys.readouterr()
    refused = launch("0.99999999", 2)
    assert "train.memory_margin = 1: the device has" in refused and "the plan is" in refused, refused
    assert "memory: planned" in launch("0.01", 0)
