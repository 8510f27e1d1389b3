"""What a run with measured shares is refused for, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmtrain import features
from llmtrain.config.load import load
from llmtrain.config.run import RunConfig
from tests.helpers.config_workplace import write

MEASURED = {"balance": {"mode": "measured"}}


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"train": {"balance": "measured"}}, ('train.balance = "measured"', "balance.mode")),
        ({"balance": {"mode": "fair"}}, ("balance.mode", "fair")),
        (
            {**MEASURED, "model": {"config": {"model_type": "mixtral", "num_local_experts": 4}}},
            ('balance.mode = "measured"',),
        ),
        (
            {
                **MEASURED,
                "model": {"attention": "sdpa"},
                "data": {"isolate_documents": True, "sequence_length": 1024},
                "train": {"micro_batch": 4096, "global_batch": 8192, "accumulation": 1},
            },
            ("data.sequence_length = 1024", "8 GiB (8192"),
        ),
    ],
)
def test_check_names_key_value_and_remedy(
    refused: Callable[[dict[str, Any]], str], run: dict[str, Any], says: tuple[str, ...]
) -> None:
    told = refused(run)
    assert all(words in told for words in says), told


def test_ranks_that_work_on_the_same_sequences_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, MEASURED)
    note = "balance.mode measured has no effect: all ranks of this run work on the same sequences"
    assert [note in load(["run.yaml"], ranks).notes for ranks in (1, 2)] == [True, False]


def test_proofs_have_equal_shares_and_replays_those_of_the_run() -> None:
    section = replace(features.defaults()["balance"], mode="measured")
    run = RunConfig(deepspeed="", balance=section)
    assert features.shortened(run, 3)["balance"] == features.defaults()["balance"]
    assert "balance" not in features.observing()
