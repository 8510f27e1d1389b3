"""A teacher's column: where its places are, and which columns a run refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmtrain.base.errors import DataError
from llmtrain.config.run import DataConfig
from llmtrain.data.kinds import packing
from llmtrain.data.manifest import Split
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream import reference_and_teacher
from llmtrain.data.stream.reference_and_teacher import ColumnWriter
from llmtrain.data.stream.train_data import TrainData
from llmtrain.objectives.by_token import Distill
from tests.helpers.chat import KINDS, workers_here, write_tokenizer
from tests.helpers.preference import preferences

K, WORDS = 3, 400
DISTILL = Distill(teacher="t", top_k=K, temperature=2.0)


def prepare(folder: Path, records: list[dict[str, object]], *form: str) -> str:
    from llmtrain.commands.prepare import main

    write_tokenizer(folder / "tokenizer", KINDS["chatml"])
    source = folder / "some.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = ["--source", str(source), "--tokenizer", str(folder / "tokenizer"), "--out", str(folder / "data")]
    with workers_here():
        assert main([*given, "--validation-fraction", "0.2", *form]) == 0
    return str(folder / "data")


@pytest.fixture(params=["chat", "text"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> DataConfig:
    made = preferences(60)
    if request.param == "text":
        folder = prepare(tmp_path, [{"text": f"{each['prompt']} {each['chosen']}"} for each in made])
    else:
        folder = prepare(
            tmp_path, [{"prompt": each["prompt"], "completion": each["chosen"]} for each in made], "--format", "chat"
        )
    return DataConfig(path=folder, sequence_length=96, isolate_documents=True, seed=3)


def sequences(data: TrainData) -> Iterator[tuple[Split, int, np.ndarray]]:
    """Each sequence, with the labels that it counts."""
    for index in range(data.sequences_per_epoch):
        labels = data.sequence_at(index).labels
        yield "train", index, labels[labels >= 0]
    for index in range(data.validation_sequences):
        labels = data.validation_sequence_at(index).labels
        yield "validation", index, labels[labels >= 0]


def said(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words and logarithms that tell by their values of which label they are."""
    words = (labels[:, None] + np.arange(K)) % WORDS
    share = (1 + labels[:, None] % 7) / 100
    return words, np.log(np.concatenate([share, share, share, 1 - 3 * share], axis=1)).astype(np.float32)


def write(config: DataConfig, vocabulary: int = WORDS) -> TrainData:
    data = TrainData(config)
    [column] = data.teacher_columns(DISTILL, vocabulary, "fp32", "of these weights")
    writer = ColumnWriter(PreparedSet(str(config.path)), column)
    for split, index, labels in sequences(data):
        writer.write(split, data.places(split, index), *said(labels))
    writer.finish()
    return data


@pytest.mark.parametrize("vocabulary", [WORDS, 70_000])
def test_each_label_finds_its_own_words(config: DataConfig, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another order than they were written in, of rows also in other sequences; rows are read a few at a time."""
    monkeypatch.setattr(packing, "_AT_ONCE", 64)
    places = [data.places(split, index) for data in [write(config, vocabulary)] for split, index, _ in sequences(data)]
    assert all(len(each) for each in places)
    texts = PreparedSet(str(config.path)).manifest.chat is None  # rows may lie in longer sequences, texts may not
    data = TrainData(replace(config, seed=5, sequence_length=96 if texts else 160))
    assert data.take_teacher(data.teacher_columns(DISTILL, vocabulary, "bf16")) == ["of these weights"]
    seen = 0
    for index in range(2 * data.sequences_per_epoch):
        sequence = data.sequence_at(index)
        counted = sequence.labels >= 0
        found = sequence.by_token
        words, logs = said(sequence.labels[counted])
        assert np.array_equal(found["words"][counted], words) and np.array_equal(found["logs"][counted], logs)
        assert not found["words"][~counted].any() and not found["logs"][~counted].any()
        seen += int(counted.sum())
    assert seen > 500
    folder = Path(str(config.path))
    assert not [*folder.glob("*.tmp")]
    [column] = data.teacher_columns(DISTILL, vocabulary, "bf16")
    size = sum(path.stat().st_size for path in folder.glob("teacher-*.[fw]*"))
    assert size == sum(column.places.values()) * column.bytes_a_place
    assert column.bytes_a_place == 4 * (K + 1) + K * (2 if vocabulary == WORDS else 4)


def refused(config: DataConfig, objective: Distill = DISTILL, vocabulary: int = WORDS) -> str:
    data = TrainData(config)
    with pytest.raises(DataError) as caught:
        data.take_teacher(data.teacher_columns(objective, vocabulary, "fp32"))
        for _ in sequences(data):
            pass
    assert "`llmtrain reference RUN.yaml`" in str(caught.value)
    return str(caught.value)


def test_a_column_of_something_else_is_refused(config: DataConfig) -> None:
    folder = Path(str(config.path))
    assert f"{folder}: has no column" in refused(config)
    write(config)
    assert "objective.top_k: 3" in refused(config, replace(DISTILL, top_k=2))
    assert "objective.temperature: 2.0" in refused(config, replace(DISTILL, temperature=1.0))
    assert "400 there, and 500" in refused(config, vocabulary=500)
    with pytest.raises(DataError, match=r"objective\.top_k.*3"):
        TrainData(config).teacher_columns(DISTILL, 2, "fp32")
    stem = "teacher" if [*folder.glob("*.rows")] else "teacher-96"
    if stem == "teacher-96":  # texts: a column for each length
        assert "64 tokens" in refused(replace(config, sequence_length=64))
        assert "data.sequence_length, isolate" in refused(replace(config, isolate_documents=False))
    made = folder / f"{stem}.json"
    text = made.read_text()
    made.write_text(text.replace(json.loads(text)["data"], "0" * 32))
    assert f"{made}: was made from other data" in refused(config)
    made.write_text(text[:-20])
    assert f"{made}: cannot be read" in refused(config)
    made.write_text(text.replace('"top_k": 3', '"top_k": "3"'))
    assert "type" in refused(config)
    made.write_text(text)
    numbers = folder / f"{stem}-train.f32"
    data = bytearray(numbers.read_bytes())
    numbers.write_bytes(bytes(len(data)))  # all of them: probabilities of 1
    assert "hold" in refused(config) and "damaged" in refused(config)
    numbers.write_bytes(data[:-4])
    assert f"does not have the {len(data):,} bytes" in refused(config)


def test_no_room_and_no_half_column(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    data, folder = TrainData(config), Path(str(config.path))
    [column] = data.teacher_columns(DISTILL, WORDS, "fp32")
    with monkeypatch.context() as full:
        full.setattr(reference_and_teacher.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
        with pytest.raises(DataError, match=r"(?s)100.*objective\.top_k"):
            ColumnWriter(PreparedSet(folder), column)
    before = {path.name for path in folder.iterdir()}
    ColumnWriter(PreparedSet(folder), column).discard()
    assert {path.name for path in folder.iterdir()} == before
