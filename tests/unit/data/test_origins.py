"""Where each document of a prepared folder comes from, and which sequences of a run hold it."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtrain import cli
from llmtrain.base.errors import DataError
from llmtrain.commands.prepare import main
from llmtrain.config.stages import DataConfig
from llmtrain.data.manifest import SPLITS
from llmtrain.data.origins import Origins, origins_path
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.order import permute, position_of
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenize import Encoder


def write_jsonl(path: Path, name: str, count: int) -> dict[tuple[str, int], str]:
    """Lines, some of them blank or broken; returns the text of each record."""
    texts, lines, opened = {}, [], gzip.open if name.endswith(".gz") else open
    for number in range(1, count + 1):
        text = f"{name} line {number} " + "and some words " * (number % 5)
        blank, broken = number % 7 == 0, number % 50 == 0
        lines.append("" if blank else "{broken" if broken else json.dumps({"text": text}))
        if not (blank or broken):
            texts[name, number] = text
    with opened(path / name, "wt") as stream:  # type: ignore[operator]
        stream.write("\n".join(lines))
    return texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, int], str]]:
    """Several files of several kinds, in many shards -> the text of each record."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = write_jsonl(folder, "a.jsonl", 900) | write_jsonl(folder, "b.jsonl.gz", 100)
    texts |= write_jsonl(folder, "c.jsonl", 500)
    rows = [f"row {number} of a table" for number in range(200)]
    pq.write_table(pa.table({"text": rows}), folder / "d.parquet", row_group_size=30)
    texts |= {("d.parquet", number): text for number, text in enumerate(rows)}
    (folder / "e.txt").write_text("a text of its own")
    return folder, texts | {("e.txt", 1): "a text of its own"}


@pytest.fixture(scope="module")
def prepared(corpus: tuple[Path, dict[tuple[str, int], str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "set"
    words = ["--source", str(corpus[0]), "--vocab-size", "300", "--out", str(out), "--shard-bytes", "3000"]
    assert main([*words, "--max-rejected", "100", "--validation-fraction", "0.1"]) == 0
    return out


def test_each_document_is_of_the_record_that_it_names(
    prepared: Path, corpus: tuple[Path, dict[tuple[str, int], str]]
) -> None:
    data, seen = PreparedSet(prepared), set()
    encoder = Encoder(data.tokenizer_dir)
    for split in SPLITS:
        stream, shards = data.split(split), data.manifest.shards[split]
        assert len(shards) > 20
        known = Origins(prepared, shards)
        every = list(known.within(0, stream.tokens))
        assert [origin.index for origin in every] == list(range(data.manifest.documents[split]))
        assert [origin.begin for origin in every] == [0, *(origin.end for origin in every[:-1])]
        for origin in every:
            text = encoder.decode(stream.read(origin.begin, origin.end - origin.begin - 1).tolist())
            assert text == corpus[1][origin.file, origin.record]
            seen.add((origin.file, origin.record))
        for origin in every[::97]:
            assert list(known.find(origin.file, origin.record)) == [origin]
            assert list(known.of_rows([origin.index])) == [origin]
            assert list(known.within(origin.begin, origin.begin + 1)) == [origin]
            assert origin in list(known.within(origin.end - 1, origin.end + 1))
    assert seen == set(corpus[1])


def test_documents_of_a_list_do_not_enter_the_corpus(
    prepared: Path, corpus: tuple[Path, dict[tuple[str, int], str]], tmp_path: Path
) -> None:
    """In each kind of file, also after its first unit; the others keep their sides and places."""
    gone = {("a.jsonl", 1), ("a.jsonl", 622), ("b.jsonl.gz", 8), ("c.jsonl", 499), ("d.parquet", 0), ("d.parquet", 131)}
    lines = [
        f'  {file}:{record}, 24 tokens: "and, some: words"' if record == 622 else f"{file}:{record}"
        for file, record in sorted(gone)
    ]
    (tmp_path / "LIST").write_text("\n\n".join(lines))
    words = ["--source", str(corpus[0]), "--tokenizer", str(prepared / "tokenizer"), "--shard-bytes", "3000"]
    words += ["--max-rejected", "100", "--validation-fraction", "0.1", "--out", str(tmp_path / "set")]
    assert main([*words, "--exclude", str(tmp_path / "LIST")]) == 0
    before, after = PreparedSet(prepared), PreparedSet(tmp_path / "set")
    for split in SPLITS:
        every, others = (
            [(each.file, each.record) for each in data.origins(split).within(0, data.split(split).tokens)]
            for data in (before, after)
        )
        assert others == [each for each in every if each not in gone]
    assert gone <= corpus[1].keys() and sum(after.manifest.documents.values()) == len(corpus[1]) - len(gone)
    assert after.manifest.settings["exclude"] == [f"{file}:{record}" for file, record in sorted(gone)]
    assert after.manifest.data_fingerprint != before.manifest.data_fingerprint
    assert main([*words, "--exclude", str(tmp_path / "LIST")]) == 0 and main(words) == 2  # complete; other settings


def test_the_tokenizer_does_not_learn_from_an_excluded_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{word * 400} {n}"}) + "\n" for n, word in enumerate(["abc", "xyz", "abc"]))
    )
    (tmp_path / "LIST").write_text("a.jsonl:2")
    words = ["--source", str(tmp_path / "a.jsonl"), "--vocab-size", "270", "--validation-fraction", "0"]
    assert main([*words, "--out", str(tmp_path / "set"), "--exclude", str(tmp_path / "LIST")]) == 0
    learned = (tmp_path / "set/tokenizer/tokenizer.json").read_text()
    assert '"abc"' in learned and '"xyz"' not in learned


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a.jsonl:900", "line 3: a.jsonl:900 is no document of --source; lines count from 1"),
        ("a.jsonl:7", "line 3: a.jsonl:7 is no document"),  # a blank line
        ("z.jsonl:1", "line 3: 'z.jsonl:1' is no FILE:RECORD of a source; write lines such as a.jsonl:1"),
        ("a.jsonl", "line 3: 'a.jsonl' is no FILE:RECORD"),
    ],
)
def test_a_line_that_matches_nothing_is_refused(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path, "a.jsonl", 40)
    (tmp_path / "LIST").write_text(f"a.jsonl:1\n\n{line}\n")
    words = ["--source", str(tmp_path / "a.jsonl"), "--vocab-size", "270", "--out", str(tmp_path / "set")]
    assert main([*words, "--exclude", str(tmp_path / "LIST"), "--shard-bytes", "400"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "set").exists()
    assert main([*words, "--exclude", str(tmp_path / "none")]) == 2
    assert f"{tmp_path}/none: " in capsys.readouterr().err


def test_two_files_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.jsonl").write_text("".join(f'{{"text": "{name} {n}"}}\n' for n in range(3)))
    sources = [str(tmp_path / name) for name in ("a", "b")]
    words = ["--source", *sources, "--vocab-size", "258", "--out", str(tmp_path / "set"), "--validation-fraction", "0"]
    assert main(words) == 0
    data = PreparedSet(tmp_path / "set")
    known, stream = Origins(tmp_path / "set", data.manifest.shards["train"]), data.split("train")
    (found,) = known.find(f"{sources[1]}/part.jsonl", 2)
    assert Encoder(data.tokenizer_dir).decode(stream.read(found.begin, 3).tolist()).startswith("b 1")
    assert not list(known.find("part.jsonl", 2))


def test_the_sequences_of_a_run_lead_to_their_documents_and_back(prepared: Path) -> None:
    config = DataConfig(path=str(prepared), sequence_length=48, seed=3)
    data = TrainData(config)
    sequences, stream = data.reader_of(0), data.streams("train")[0]
    known = Origins(prepared, data.manifests[0].shards["train"])
    until = 3 * data.sequences_per_epoch
    for index in range(0, until, 37):
        _, sequence = data.place_of(index)
        origins = list(sequences.origins(sequence, known))
        read = np.concatenate([stream.read(origin.begin, origin.end - origin.begin) for origin in origins])
        inputs, at = data.sequence(index)[0], sequence * 48 - origins[0].begin
        assert (read[at : at + 48] == inputs).all()
        assert index in data.sequences_with(0, sequence, until)
        assert len(list(data.sequences_with(0, sequence, until))) == 3
        assert all(sequence in sequences.sequences_of(origin) for origin in origins)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 100, 1023])
def test_an_epoch_has_every_sample_once_and_the_position_is_the_inverse_of_the_order(n: int) -> None:
    for epoch in (0, 5):
        order = [permute(n, 9, epoch, 1, at) for at in range(n)]
        assert sorted(order) == list(range(n)) == [position_of(n, 9, epoch, 1, sample) for sample in order]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, r"keeps no origins of its documents \(train-00000\.origins\.parquet is not there\); prepare it"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), r"train-00000\.origins\.parquet: is damaged"),
    ],
)
def test_a_folder_without_origins_and_a_damaged_one_are_named(
    spoil: Callable[[Path], object], message: str, prepared: Path
) -> None:
    shards = PreparedSet(prepared).manifest.shards["train"]
    path = origins_path(prepared / shards[0].file)
    before = path.read_bytes()
    spoil(path)
    try:
        with pytest.raises(DataError, match=message):
            list(Origins(prepared, shards).within(0, 1))
    finally:
        path.write_bytes(before)


def test_where_reads_what_another_version_has_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A field that is gone; and one of another type, for which a sentence is printed."""
    saved = Path(__file__).parents[2] / "data/saved-0.1.0"
    for name in ("data/text", "runs/quickstart"):
        shutil.copytree(saved / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    events = tmp_path / "runs/quickstart/events.jsonl"
    text = events.read_text()
    for given, code in (('"data":{"former":3,', 0), ('"data":{"sequence_length":"x","former":3,', 2)):
        lines = [line.replace('"data":{', given) for line in text.splitlines()]
        if code:
            lines = [line.replace('"sequence_length":32,', "") for line in lines]
        events.write_text("\n".join(lines) + "\n")
        assert cli.main(["data", "where", "data/text", "--run", "runs/quickstart", "--step", "1"]) == code
    said = capsys.readouterr()
    assert "step 1: 4 sequences" in said.out and "'kind': 'reads'" in said.err
