"""What a rank gets: sequences, labels, masks, order, mixtures, batches; and what the data refuses."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.base.errors import DataError
from llmtrain.config.run import DataConfig
from llmtrain.data.batches import MicroBatch
from llmtrain.data.manifest import check_vocabulary
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.loader import TrainLoader, validation_batches
from llmtrain.data.stream.train_data import TrainData
from tests.helpers.loaders import loader_of
from tests.helpers.prepared import random_shards, write_prepared

T = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data") / "set"
    return write_prepared(made, random_shards(0, 4, 30), random_shards(1, 2, 8))


@pytest.fixture(scope="module")
def data(folder: Path) -> TrainData:
    return TrainData(DataConfig(path=str(folder), sequence_length=T))


def stream_of(shards: list[list[list[int]]]) -> list[int]:
    return [token for documents in shards for document in documents for token in (*document, 0)]


def naive_sequences(stream: list[int]) -> list[tuple[list[int], list[int]]]:
    sequences = []
    for start in range(0, len(stream) - T, T):
        inputs, labels = stream[start : start + T], stream[start + 1 : start + T + 1]
        sequences.append((inputs, [-100 if i == 0 else label for i, label in zip(inputs, labels, strict=True)]))
    return sequences


def as_lists(pair: tuple[np.ndarray, np.ndarray]) -> tuple[list[int], list[int]]:
    assert pair[0].dtype == pair[1].dtype == np.int64
    return pair[0].tolist(), pair[1].tolist()


def key(sequence: tuple[list[int], list[int]]) -> tuple[int, ...]:
    return (*sequence[0], *sequence[1])


def test_an_epoch_is_every_sequence_once_with_shifted_masked_labels(data: TrainData) -> None:
    sequences = naive_sequences(stream_of(random_shards(0, 4, 30)))
    assert data.sequences_per_epoch == len(sequences)
    for epoch in range(2):
        first = epoch * len(sequences)
        served = [as_lists(data.sequence(first + i)) for i in range(len(sequences))]
        assert sorted(map(key, served)) == sorted(map(key, sequences))
        assert served != sequences
    again = [as_lists(data.sequence(i)) for i in range(len(sequences))]
    assert again != served  # the second epoch has another order
    valid = naive_sequences(stream_of(random_shards(1, 2, 8)))
    assert data.validation_sequences == len(valid)
    assert sorted(key(as_lists(data.validation_sequence(i))) for i in range(len(valid))) == sorted(map(key, valid))


def test_without_the_mask_every_label_counts(folder: Path) -> None:
    data = TrainData(DataConfig(path=str(folder), sequence_length=T, mask_document_starts=False))
    inputs, labels = data.sequence(0)
    assert (labels >= 0).all() and (inputs[1:] == labels[:-1]).all()


def test_positions_begin_anew_after_each_separator(folder: Path) -> None:
    data = TrainData(DataConfig(path=str(folder), sequence_length=T, isolate_documents=True))
    with loader_of(data, global_batch=8, micro_batch=4, accumulation=2, rank=0, data_parallel=1) as loader:
        micros = next(loader).micro_batches
    (*_, last) = validation_batches(data, sequences=5, micro_batch=2, rank=0, data_parallel=2)
    for micro in (*micros, last):
        assert micro.positions is not None and micro.positions.dtype == torch.int64
        for tokens, positions in zip(micro.inputs.tolist(), micro.positions.tolist(), strict=True):
            want, position = [], 0
            for token in tokens:
                want.append(position)
                position = 0 if token == data.separator_id else position + 1
            assert positions == want
    assert sum(int((micro.positions == 0).sum()) for micro in micros) > 8  # some rows hold several documents


@pytest.mark.parametrize("layout", [(1, 1, 12), (2, 3, 2), (3, 1, 4), (4, 3, 1), (1, 4, 3), (6, 2, 1)])
def test_the_union_over_the_ranks_is_the_global_batch(data: TrainData, layout: tuple[int, int, int]) -> None:
    ranks, accumulation, micro = layout
    rows: dict[int, tuple[list[int], list[int]]] = {}
    for rank in range(ranks):
        with loader_of(
            data,
            global_batch=12,
            micro_batch=micro,
            accumulation=accumulation,
            rank=rank,
            data_parallel=ranks,
            start_index=24,
        ) as loader:
            step = next(loader)
        assert step.first_index == 24 and loader.next_index == 36
        assert len(step.micro_batches) == accumulation
        for m, batch in enumerate(step.micro_batches):
            assert batch.inputs.shape == batch.labels.shape == (micro, T) and batch.inputs.dtype == torch.int64
            first = 24 + (m * ranks + rank) * micro
            assert batch.sequences == list(range(first, first + micro))
            for row, index in enumerate(batch.sequences):
                rows[index] = (batch.inputs[row].tolist(), batch.labels[row].tolist())
    assert rows == {index: as_lists(data.sequence(index)) for index in range(24, 36)}


def of_four(data: TrainData, start: int = 0) -> TrainLoader:
    return loader_of(data, global_batch=4, micro_batch=2, accumulation=2, rank=0, data_parallel=1, start_index=start)


def test_a_seek_gives_what_iterating_gives(data: TrainData) -> None:
    with of_four(data) as loader:
        steps = [next(loader) for _ in range(12)]
        state = loader.next_index
        expected = next(loader)
    with of_four(data, start=state) as resumed:
        found = next(resumed)
    assert state == 48 and found.first_index == expected.first_index == 48
    for a, b in zip(found.micro_batches, expected.micro_batches, strict=True):
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels)
    assert not torch.equal(steps[0].micro_batches[0].inputs, found.micro_batches[0].inputs)


def test_the_state_is_what_was_taken_not_what_was_read_ahead(data: TrainData) -> None:
    with of_four(data) as loader:
        next(loader)
        time.sleep(0.1)  # the thread is steps ahead by now
        assert loader.next_index == 4


def test_closing_ends_the_thread(data: TrainData) -> None:
    loader = of_four(data)
    next(loader)
    loader.close()
    assert not any(thread.name == "data" for thread in threading.enumerate())
    with pytest.raises(StopIteration):
        next(loader)
    assert loader.data_wait_s > 0


def test_a_fault_in_the_thread_reaches_the_consumer(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "set", random_shards(0, 1, 30), random_shards(1, 1, 5))
    data = TrainData(DataConfig(path=str(folder), sequence_length=T))
    shard = folder / "train-00000.bin"
    shard.write_bytes(b"\xff" * shard.stat().st_size)  # ids 65535 in a vocabulary of 50
    loader = of_four(data)
    with pytest.raises(DataError, match="65535"):
        next(loader)


@pytest.mark.parametrize(("ranks", "micro", "sequences"), [(1, 4, 5), (2, 2, 5), (3, 1, 7), (4, 2, 1), (2, 3, 10**6)])
def test_validation_gives_every_rank_the_same_shapes(data: TrainData, ranks: int, micro: int, sequences: int) -> None:
    per_rank: list[list[MicroBatch]] = [
        list(validation_batches(data, sequences=sequences, micro_batch=micro, rank=r, data_parallel=ranks))
        for r in range(ranks)
    ]
    total = min(sequences, data.validation_sequences)
    assert {len(batches) for batches in per_rank} == {math.ceil(total / (ranks * micro))}
    seen: list[int] = []
    counted = 0
    for batch in (batch for batches in per_rank for batch in batches):
        assert batch.inputs.shape == batch.labels.shape == (micro, T)
        seen += batch.sequences
        counted += int((batch.labels != -100).sum())
        for row, index in enumerate(batch.sequences):
            assert (batch.inputs[row].tolist(), batch.labels[row].tolist()) == as_lists(data.validation_sequence(index))
    assert sorted(seen) == list(range(total))
    assert counted == sum(int((data.validation_sequence(i)[1] != -100).sum()) for i in range(total))


# --- mixtures


def test_a_mixture_takes_each_set_in_its_share_and_its_own_epochs(tmp_path: Path) -> None:
    # Set a has ids 1..24, set b 25..49: every sequence tells where it is from.
    halves = {
        "a": [[[1 + (i + j) % 24 for j in range(30)] for i in range(20)]],
        "b": [[[25 + (i + j) % 25 for j in range(30)] for i in range(6)]],
    }
    for name, shards in halves.items():
        write_prepared(tmp_path / name, shards, shards)
    config = DataConfig(mixture={str(tmp_path / "a"): 3, str(tmp_path / "b"): 1}, sequence_length=T)
    data = TrainData(config)
    sizes = {name: len(naive_sequences(stream_of(shards))) for name, shards in halves.items()}
    served: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}
    for index in range(4 * sizes["a"]):
        sequence = as_lists(data.sequence(index))
        served["a" if max(sequence[0]) < 25 else "b"].append(key(sequence))
        assert abs(len(served["a"]) - (index + 1) * 0.75) <= 1
    for name, size in sizes.items():
        own_epoch = Counter(map(key, naive_sequences(stream_of(halves[name]))))
        assert Counter(served[name][:size]) == own_epoch
    assert data.sequences_per_epoch == min(int(sizes["a"] / 0.75), int(sizes["b"] / 0.25))
    assert data.fingerprint != TrainData(DataConfig(path=str(tmp_path / "a"), sequence_length=T)).fingerprint
    validation = [max(data.validation_sequence(i)[0]) < 25 for i in range(data.validation_sequences)]
    assert abs(sum(validation) - 0.75 * len(validation)) <= 1 and len(validation) >= 3 * sizes["b"]


def test_the_fingerprint_is_of_data_length_seed_and_mixture(folder: Path, tmp_path: Path) -> None:
    def fingerprint(path: Path = folder, **more: int) -> str:
        return TrainData(DataConfig(path=str(path), **{"sequence_length": T, **more})).fingerprint

    other = write_prepared(tmp_path / "other", random_shards(5, 4, 30), random_shards(1, 2, 8))
    moved = write_prepared(tmp_path / "same", random_shards(0, 4, 30), random_shards(1, 2, 8))
    assert fingerprint() == fingerprint(moved)  # where it lies does not matter
    assert len({fingerprint(), fingerprint(other), fingerprint(sequence_length=8), fingerprint(seed=1)}) == 4


# --- refusals


def test_refusals_name_the_folder_and_the_remedy(folder: Path, tmp_path: Path) -> None:
    def refusal(**fields: object) -> str:
        with pytest.raises(DataError) as caught:
            TrainData(DataConfig(**fields))  # type: ignore[arg-type]
        return str(caught.value)

    assert "llmtrain prepare" in refusal(path=str(tmp_path / "nowhere"))
    for fields in ({}, {"path": str(folder), "mixture": {str(folder): 1.0}}):
        assert "data.path" in (both := refusal(**fields)) and "data.mixture" in both
    assert "positive" in refusal(mixture={str(folder): 0.0})
    assert str(folder) in (short := refusal(path=str(folder), sequence_length=10**6)) and "1000000" in short
    foreign = write_prepared(tmp_path / "f", random_shards(0, 1, 9), [], tokenizer="{ }")
    mixed = refusal(mixture={str(folder): 1.0, str(foreign): 1.0}, sequence_length=T)
    assert str(folder) in mixed and str(foreign) in mixed
    no_validation = TrainData(DataConfig(path=str(foreign), sequence_length=T))
    with pytest.raises(DataError, match="--validation-fraction"):
        validation_batches(no_validation, sequences=1, micro_batch=1, rank=0, data_parallel=1)
    (foreign / "manifest.json").write_text('{"format": "llmtrain-data", "version": 99}')
    assert "version is 99" in refusal(path=str(foreign))
    (foreign / "manifest.json").write_text("[]")
    assert f"{foreign}/manifest.json" in refusal(path=str(foreign))


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    manifest = PreparedSet(folder).manifest
    check_vocabulary(manifest, 50)
    check_vocabulary(manifest, 64)
    with pytest.raises(DataError, match=r"vocab_size.* 49 .* 50"):
        check_vocabulary(manifest, 49)


def test_damaged_shards_are_found(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "set", random_shards(0, 2, 20), random_shards(1, 1, 5))
    PreparedSet(folder).verify()
    shard = folder / "train-00001.bin"
    good = shard.read_bytes()
    shard.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    with pytest.raises(DataError, match=f"{shard}: .*checksum"):
        PreparedSet(folder).verify()
    shard.write_bytes(good[:-2])
    with pytest.raises(DataError, match=f"{shard}: .*{len(good) - 2}.*{len(good)}"):
        PreparedSet(folder)
    shard.unlink()
    with pytest.raises(DataError, match=f"{shard}: .*missing"):
        PreparedSet(folder)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    shards = [[[70_000, 5, 131_071], [65_536] * 20]]
    folder = write_prepared(tmp_path / "set", shards, shards, vocab_size=131_072)
    assert PreparedSet(folder).dtype.itemsize == 4
    PreparedSet(folder).verify()
    data = TrainData(DataConfig(path=str(folder), sequence_length=4, mask_document_starts=False))
    assert sorted(t for i in range(6) for t in data.sequence(i)[0].tolist()) == sorted(stream_of(shards)[:24])


def test_a_loader_goes_on_elsewhere(data: TrainData) -> None:
    with loader_of(data, global_batch=4, micro_batch=2, accumulation=2, rank=0, data_parallel=1) as loader:
        next(loader)
        thread = loader._thread
        loader.seek(4)
        assert loader._thread is thread and next(loader).first_index == 4  # what was read ahead is kept
        loader.seek(40)
        batch = next(loader)
        assert batch.first_index == 40 and loader.next_index == 44
        assert [index for micro in batch.micro_batches for index in micro.sequences] == [40, 41, 42, 43]
        assert next(loader).first_index == 44 and not thread.is_alive()
