"""Sequences that a run leaves out keep their places, count no token, and come again in no epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.load import refuse_other_run
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.stages import Batch, DataConfig, Stage, StageConfig, Stages, data_of
from llmtrain.data.sequences import IGNORED
from llmtrain.data.stream.loader import Course, StepBatch, TrainLoader
from llmtrain.data.stream.train_data import TrainData
from llmtrain.engine.losses.named import loss_of
from llmtrain.objectives.preferences import Dpo, Kto
from llmtrain.optim.schedules import Constant
from tests.helpers.preference import prepared_preferences, prepared_unpaired
from tests.helpers.prepared import random_shards, write_prepared

T, BATCH = 16, 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = tmp_path_factory.mktemp("data")
    return [
        str(write_prepared(made / f"{seed}", random_shards(seed, 2, 30), random_shards(9, 1, 8))) for seed in (0, 1)
    ]


def course_of(config: DataConfig, ranks: int = 1) -> Course:
    batch = Batch(
        global_batch=BATCH, micro_batch=BATCH // ranks // 2, accumulation=2, data_parallel=ranks, sequence_length=T
    )
    return Course(
        Stages((Stage(first_step=0, data=config, batch=batch, schedule=Constant(), schedule_from=0),)),
        [TrainData(config)],
    )


def steps_of(config: DataConfig, steps: int, rank: int = 0, ranks: int = 1) -> list[StepBatch]:
    course = course_of(config, ranks)
    with TrainLoader(course, rank=rank) as loader:
        return [loader.build(step) for step in range(steps)]


def rows_of(steps: list[StepBatch]) -> dict[int, tuple[list[int], list[int]]]:
    return {
        index: (inputs, labels)
        for step in steps
        for micro in step.micro_batches
        for index, inputs, labels in zip(micro.sequences, micro.inputs.tolist(), micro.labels.tolist(), strict=True)
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_sequence_is_left_out_of_every_epoch_and_no_other_row_changes(
    folders: list[str], mixed: bool, ranks: int
) -> None:
    """Compared with the text of each row: the same sequence has another place in each epoch."""
    sets: dict[str, Any] = {"mixture": {folders[0]: 1.0, folders[1]: 2.0}} if mixed else {"path": folders[0]}
    config = DataConfig(sequence_length=T, **sets)
    whole = TrainData(config)
    count = 3 * whole.sequences_per_epoch // BATCH
    before = rows_of(steps_of(config, count))
    wanted = (5, 6, BATCH * 7 + 1)
    texts = [before[index][0] for index in wanted]
    after: dict[int, tuple[list[int], list[int]]] = {}
    tokens = []
    for rank in range(ranks):
        steps = steps_of(replace(config, exclude=wanted), count, rank, ranks)
        after |= rows_of(steps)
        tokens.append([step.tokens for step in steps])
    gone = [index for index, (inputs, _) in before.items() if inputs in texts]
    assert len(gone) > len(wanted) and {*wanted} <= {*gone}
    for index, row in before.items():
        assert after[index] == (([whole.separator_id] * T, [IGNORED] * T) if index in gone else row)
    here = [sum(index // BATCH == step for index in gone) for step in range(count)]
    assert tokens == [[(BATCH - out) * T for out in here]] * ranks


def test_a_skipped_step_counts_nothing_and_its_rows_come_again(folders: list[str]) -> None:
    config = DataConfig(path=folders[0], sequence_length=T)
    before, steps = rows_of(steps_of(config, 20)), steps_of(replace(config, skip_steps=(3,)), 20)
    after = rows_of(steps)
    assert [index for index in before if before[index] != after[index]] == [8, 9, 10, 11]
    assert all({*after[index][1]} == {IGNORED} for index in (8, 9, 10, 11))
    assert [step.tokens for step in steps[:4]] == [BATCH * T, BATCH * T, 0, BATCH * T]


def answers_of(folder: str, **more: Any) -> list[Any]:
    """The two micro-batches of a step: sequences 0 and 1, 2 and 3."""
    config = DataConfig(path=folder, sequence_length=160, isolate_documents=True, **more)
    course = course_of(config)
    sequences: Any = course.data[0].reader_of(0)
    sequences.reference = -np.arange(1000, dtype=np.float32)
    with TrainLoader(course, rank=0) as loader:
        return loader.build(0).micro_batches


@pytest.mark.parametrize("judged", [False, True])
def test_answers_are_left_out_in_pairs_and_alone(judged: bool, tmp_path: Path) -> None:
    """The answers that stay keep rows, references and labels; a micro-batch of nothing has no answer."""
    folder = (prepared_unpaired if judged else prepared_preferences)(tmp_path, 60)
    (before, _), (after, nothing) = answers_of(folder), answers_of(folder, exclude=(0, 2, 3))
    loss: Any = loss_of(Kto() if judged else Dpo())
    kept = [int(each) for each in before.answers[1].unique() if each < len(before.rows)]
    assert kept and len(kept) < len(before.rows)
    for name in ("rows", "reference"):
        assert getattr(after, name).tolist() == getattr(before, name)[kept].tolist()
    assert list(after.facts) == (["desirable"] if judged else [])
    assert all(after.facts[name].tolist() == each[kept].tolist() for name, each in before.facts.items())
    assert torch.equal(after.labels[1], before.labels[1]) and (after.labels[0] == IGNORED).all()
    assert (after.answers[0] == len(kept)).all()
    want = torch.where(before.answers[1] < len(before.rows), before.answers[1] - kept[0], len(kept))
    assert torch.equal(after.answers[1], want)
    assert loss.weight(after) == len(kept) // (1 if judged else 2) and loss.weight(nothing) == 0
    if judged:
        assert loss.weight(after.mismatched) == len(kept) and loss.weight(nothing.mismatched) == 0


def test_stages_with_the_same_data_leave_out_the_same_sequences() -> None:
    stages = [
        StageConfig(from_step=2, path="b", exclude=(9,)),
        StageConfig(from_step=4, path="./a", exclude=(2,)),
        StageConfig(from_step=6, sequence_length=8),
    ]
    found = data_of(DataConfig(path="a", exclude=(1,), stages=stages))
    assert [each.exclude for each in found] == [(1, 2), (9,), (1, 2), None]


def test_a_checkpoint_continues_the_order_with_other_exclusions(folders: list[str]) -> None:
    plain = DataConfig(path=folders[0], sequence_length=T)
    prints, record = [], course_of(plain).record(5, 20)
    saved = TrainerState(step=5, data_stages=record, data_fingerprint=record[0]["fingerprint"])
    for exclude in ((7,), (7, 30), None):
        course = course_of(replace(plain, exclude=exclude))
        data = course.data[0]
        now = TrainerState(data_fingerprint=data.fingerprint, orders={data.fingerprint: data.order})
        refuse_other_run(saved, now, Path("step-5"))
        course.go_on(5, saved.with_names_of(now).data_stages)
        assert course.at(5).index == 20 and course.first_number == 0
        record = course.record(6, 24)
        assert record[-1].get("exclude") == (None if exclude is None else [*exclude])
        record[-1]["next"] = 20
        saved = replace(now, step=5, data_stages=record)
        prints.append(course.data[0].fingerprint)
    assert len({*prints}) == 3 and prints[2] == TrainData(plain).fingerprint == TrainData(plain).order


@pytest.mark.parametrize(
    ("now", "own", "message"),
    [
        ({"exclude": [3], "skip_steps": [9]}, True, ""),  # step 9 comes later
        ({"exclude": [4]}, False, ""),
        ({"exclude": [4]}, True, r"data.exclude is \[\[3\]\] .* \[\[4\]\].*--resume step-5"),
        ({"exclude": [3], "skip_steps": [5]}, True, r"data.skip_steps is \[\] .* \[5\]"),
        ({"path": "other"}, False, "data_fingerprint was 'a3'"),
    ],
)
def test_a_run_keeps_its_exclusions_and_a_branch_may_have_others(now: Any, own: bool, message: str) -> None:
    def state(**data: Any) -> TrainerState:
        name = "b" if "path" in data else f"a{data['exclude'][0]}"
        return TrainerState(
            step=5, run={"data": data}, data_fingerprint=name, orders={} if name == "b" else {name: "a"}
        )

    if not message:
        assert refuse_other_run(state(exclude=[3]), state(**now), Path("step-5"), own=own) == []
        return
    with pytest.raises(CheckpointError, match=message):
        refuse_other_run(state(exclude=[3]), state(**now), Path("step-5"), own=own)
