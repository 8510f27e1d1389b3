"""trainer.json as a typed value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.trainer_state import TrainerState
from tests.helpers.checkpoints import trainer_state

FILE = Path("step-00000005/trainer.json")


def test_a_state_is_written_as_it_was_read() -> None:
    tree = trainer_state(5, evaluation={"step": 5}, reference=["v", "w"], plan=[[0, "a", {}, 8]])
    again = TrainerState.from_json(tree, FILE).to_json()
    assert {key: again[key] for key in tree} == tree and TrainerState.from_json(again, FILE).to_json() == again


def test_a_conversion_may_record_little() -> None:
    state = TrainerState.from_json({"step": 5, "tokens": 0, "run": None, "source": {"files": {}}}, FILE)
    assert state.section("adapter") == {} and state.source == {"files": {}} and state.optimizer_step is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step is -1, but it must be a whole number, 0 or more"),
        ({"step": True}, "step is True, but it must be"),
        ({"tokens": None}, "tokens is None, but it must be"),
        ({"sample_index": 1.5}, "sample_index is 1.5, but it must be a number"),
        ({"run": "x"}, "run is 'x', but it must be a map"),
        ({"data_stages": [5]}, r"data_stages is \[5\], but it must be a list"),
        ({"separator_id": {}}, "separator_id is {}, but it must be a number or a list"),
        ({"run_id": 3}, "run_id is 3, but it must be text.*take another checkpoint"),
    ],
)
def test_a_wrong_type_is_refused_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"trainer.json: {message}"):
        TrainerState.from_json({**trainer_state(5), **change}, FILE)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_file_that_is_no_map_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"trainer.json"):
        TrainerState.parse(content, FILE)


def test_differences_are_of_what_both_record() -> None:
    run = {"optim": {"lr": 0.003}}
    there, here = TrainerState(run=run, versions={"torch": "2"}), TrainerState(run={"optim": {"lr": 0.002}})
    assert there.differences(here) == ["run.optim.lr: 0.003 -> 0.002"]
    assert json.dumps(run) == json.dumps(there.run), "a comparison changes neither"
