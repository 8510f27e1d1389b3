"""Which sequences a step reads in a run with stages, and that a checkpoint of any step goes on with the same ones."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.stages import Batch, DataConfig, StageBatch, StageConfig, stages_of
from llmtrain.data.stream.loader import Course
from llmtrain.optim.schedules import Constant

A, B, LONG = (SimpleNamespace(fingerprint=name) for name in ("a", "b", "long"))
CONFIG = DataConfig(
    path="a",
    sequence_length=8,
    stages=[
        StageConfig(from_step=3, path="b"),
        StageConfig(from_step=5, train=StageBatch(global_batch=8)),
        StageConfig(from_step=6, path="a"),
        StageConfig(from_step=8, sequence_length=16),
        StageConfig(from_step=9, sequence_length=8),
    ],
)
READS = [
    ("a", 0),
    ("a", 4),
    ("a", 8),
    ("b", 0),
    ("b", 4),
    ("b", 8),
    ("a", 12),
    ("a", 20),
    ("long", 0),
    ("a", 28),
    ("a", 36),
]
"""Of each step: data and first sequence; 4 sequences a step, 8 from step 5 on."""


def course(data: Any = (A, B, B, A, LONG, A), config: DataConfig = CONFIG) -> Course:
    counts, lengths = [4, 4, 8, 8, 8, 8], [8, 8, 8, 8, 16, 8]
    batches = [
        Batch(global_batch=count, micro_batch=count, accumulation=1, data_parallel=1, sequence_length=length)
        for count, length in zip(counts, lengths, strict=True)
    ]
    return Course(stages_of(config, Constant(), batches[: len(config.stages) + 1]), data)


def reads(found: Course, first: int, last: int = len(READS)) -> list[tuple[str, int]]:
    return [(each.data.fingerprint, each.index) for each in map(found.at, range(first, last))]


def saved(found: Course, step: int) -> list[dict[str, Any]]:
    """As a checkpoint of that step has it."""
    made: list[dict[str, Any]] = json.loads(json.dumps(found.record(step, found.at(step).index)))
    return made


def test_data_begins_at_its_first_sequence_and_goes_on_where_it_was_left() -> None:
    assert reads(course(), 0) == READS
    assert [course().at(step).batch.global_batch for step in (4, 5)] == [4, 8]


@pytest.mark.parametrize("first", range(len(READS)))
def test_a_checkpoint_of_any_step_goes_on_with_the_same_sequences(first: int) -> None:
    """Also from a second one, some steps later: what it tells of the first launch is kept."""
    again = course()
    again.go_on(first, saved(course(), first))
    assert reads(again, first) == READS[first:]
    for second in range(first, len(READS)):
        assert again.record(second, again.at(second).index) == course().record(second, course().at(second).index)
        third = course()
        third.go_on(second, saved(again, second))
        assert reads(third, second) == READS[second:]


def test_the_record_tells_what_was_trained() -> None:
    record = course().record(9, 28)
    told = [(e["stage"], e["from_step"], e["fingerprint"], e["global_batch"], e["next"]) for e in record]
    assert told == [(0, 0, "a", 4, 12), (1, 3, "b", 4, 8), (2, 5, "b", 8, 16), (3, 6, "a", 8, 28), (4, 8, "long", 8, 8)]


def test_a_run_may_change_what_lies_ahead() -> None:
    new = SimpleNamespace(fingerprint="new")
    config = DataConfig(
        path="a", sequence_length=8, stages=[StageConfig(from_step=8, path="new"), StageConfig(from_step=10, path="b")]
    )
    other = course((A, new, B), config)
    other.go_on(7, saved(course(), 7))
    assert reads(other, 7) == [("a", 20), ("new", 0), ("new", 4), ("b", 16)]


def test_other_data_is_a_further_stage() -> None:
    """resume_data: new, in a run that knows one data set; and back to the data of the beginning."""
    one, back = DataConfig(path="b", sequence_length=8), DataConfig(path="a", sequence_length=8)
    there = course((B,), one)
    there.go_on(2, saved(course(), 2))
    assert reads(there, 2, 5) == [("b", 0), ("b", 4), ("b", 8)] and there.first_number == 1
    again = course((A,), back)
    again.go_on(5, saved(there, 5))
    assert reads(again, 5, 7) == [("a", 8), ("a", 12)] and again.first_number == 2
    assert [entry["stage"] for entry in again.record(6, 12)] == [0, 1, 2]


def test_checkpoints_of_runs_without_stages_go_on() -> None:
    """Those of versions before: one integer, and the fingerprint; an imported one does not tell even that."""
    for told in ("a", None):
        found = course()
        found.go_on(1, TrainerState(step=1, sample_index=40, data_fingerprint=told).record("a"))
        assert reads(found, 1, 4) == [("a", 40), ("a", 44), ("b", 0)]


def test_a_part_of_the_run_may_move_the_position() -> None:
    found = course()
    found.seek(2, 100)
    assert reads(found, 2, 7) == [("a", 100), ("b", 0), ("b", 4), ("b", 8), ("a", 104)]
