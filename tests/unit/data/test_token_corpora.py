"""`llmtrain prepare --format tokens`: corpora that are token ids already, in the layouts that others write."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtrain.commands.prepare import main
from llmtrain.data.prepare import sources
from llmtrain.data.shards import PreparedSet

Documents = list[np.ndarray]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of 60 documents, whose tokenizer has 300 ids."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [{"text": f"document {i}: " + f"some words {i} to learn from, " * (5 + i % 7)} for i in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--source", str(folder / "a.jsonl"), "--vocab-size", "300", "--out", str(folder / "set")]
    assert main([*words, "--validation-fraction", "0"]) == 0
    return folder / "set"


def documents_of(folder: Path) -> Documents:
    """Of both splits, each with its end token."""
    data = PreparedSet(folder)
    found: Documents = []
    for split in ("train", "validation"):
        stream = data.split(split)  # type: ignore[arg-type]
        ids = stream.read(0, stream.tokens).astype(np.int64)
        found += np.split(ids, np.flatnonzero(ids == data.manifest.separator_id)[:-1] + 1) if len(ids) else []
    return found


def megatron(folder: Path, given: Documents, dtype: str = "<u2", code: int = 8) -> None:
    lengths = np.array([len(ids) for ids in given], "<i4")
    np.concatenate(given).astype(dtype).tofile(folder / "a.bin")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(given), len(given) + 1) + lengths.tobytes()
    starts = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    index += starts.astype("<i8").tobytes() + np.arange(len(given) + 1, dtype="<i8").tobytes()
    (folder / "a.idx").write_bytes(index)


def fairseq(folder: Path, given: Documents) -> None:
    """The version of Megatron's first years, with two sequences in a document."""
    lengths = [half for ids in given for half in (1, len(ids) - 1)]
    np.concatenate(given).astype("<i4").tofile(folder / "a.bin")
    index = b"TNTIDX\x00\x00" + struct.pack("<6Q", 1, 4, 4, len(lengths), len(lengths), len(given) + 1)
    for numbers in (range(len(lengths) + 1), np.cumsum([0, *lengths]), lengths, range(0, len(lengths) + 1, 2)):
        index += np.array(numbers, "<i8").tobytes()
    (folder / "a.idx").write_bytes(index)


def datatrove(folder: Path, given: Documents) -> None:
    np.concatenate(given).astype("<u4").tofile(folder / "a.ds")
    np.cumsum([len(ids) for ids in given]).astype("<u8").tofile(folder / "a.ds.index")


def columns(folder: Path, given: Documents) -> None:
    table = pa.table({"input_ids": [ids.tolist() for ids in given], "url": ["somewhere"] * len(given)})
    pq.write_table(table, folder / "a.parquet", row_group_size=7)


LAYOUTS: dict[str, tuple[Callable[[Path, Documents], Any], str | None]] = {
    "megatron": (megatron, "uint16"),
    "megatron-int32": (lambda folder, given: megatron(folder, given, "<i4", 4), "uint32"),
    "megatron-int64": (lambda folder, given: megatron(folder, given, "<i8", 5), None),
    "fairseq": (fairseq, "uint32"),
    "datatrove": (datatrove, "uint32"),
    "olmo": (lambda folder, given: np.concatenate(given).astype("<u2").tofile(folder / "a.npy"), "uint16"),
    "olmo-uint32": (
        lambda folder, given: np.concatenate(given).astype("<u4").tofile(folder / "a.uint32.npy"),
        "uint32",
    ),
    "numpy": (lambda folder, given: np.save(folder / "a.npy", np.concatenate(given).astype("<u2")), "uint16"),
    "parquet": (columns, None),
}
"""Writers from the formats' descriptions -> the type of the ids, if they can be used in place."""


def prepare(source: Path, out: Path, tokenizer: Path, *more: str) -> int:
    words = ["--source", str(source), "--tokenizer", str(tokenizer / "tokenizer"), "--out", str(out)]
    return main([*words, "--processes", "1", *([] if "--format" in more else ["--format", "tokens"]), *more])


def bytes_of(given: Documents) -> list[bytes]:
    return sorted(ids.astype(np.int64).tobytes() for ids in given)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_documents_of_each_layout_are_there_once_and_in_place_where_that_can_be(
    layout: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "_MIN_UNIT_BYTES", 1000)  # several shards of a small file
    write, in_place = LAYOUTS[layout]
    (tmp_path / "corpus").mkdir()
    given = documents_of(texts)
    write(tmp_path / "corpus", given)
    assert prepare(tmp_path / "corpus", tmp_path / "set", texts, "--validation-fraction", "0.1") == 0
    assert "100.0% of" in capsys.readouterr().out
    data = PreparedSet(tmp_path / "set")
    data.verify()
    assert bytes_of(documents_of(tmp_path / "set")) == bytes_of(given)
    assert data.manifest.documents["validation"] > 0 and sum(data.manifest.documents.values()) == len(given)
    shards = [shard for split in data.manifest.shards.values() for shard in split]
    links = [(tmp_path / "set" / shard.file).is_symlink() for shard in shards]
    assert len(shards) > 2
    assert all(links) if in_place else not any(links)
    assert data.manifest.dtype == (in_place or "uint16")


@pytest.mark.parametrize("layout", ["megatron", "numpy", "parquet"])
def test_a_document_of_ids_is_left_out(
    layout: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MIN_UNIT_BYTES", 1000)
    (tmp_path / "corpus").mkdir()
    given = documents_of(texts)
    LAYOUTS[layout][0](tmp_path / "corpus", given)
    (name,) = [path.name for path in (tmp_path / "corpus").iterdir() if path.suffix in (".bin", ".npy", ".parquet")]
    record = 40 if layout == "parquet" else sum(map(len, given[:40]))
    (tmp_path / "LIST").write_text(f"{name}:{record}")
    assert prepare(tmp_path / "corpus", tmp_path / "set", texts, "--exclude", str(tmp_path / "LIST")) == 0
    assert bytes_of(documents_of(tmp_path / "set")) == bytes_of([*given[:40], *given[41:]])


def test_a_file_in_place_that_changed_afterwards_is_named(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    megatron(tmp_path / "corpus", documents_of(texts))
    assert prepare(tmp_path / "corpus", tmp_path / "set", texts) == 0
    ids = np.memmap(tmp_path / "corpus/a.bin", "<u2", "r+")
    ids[5] += 1
    ids.flush()
    back = re.escape(f"put {tmp_path / 'corpus/a.bin'} back as it was")
    with pytest.raises(Exception, match=rf"train-00000\.bin: its checksum is not that of .*{back}"):
        PreparedSet(tmp_path / "set").verify()
    with open(tmp_path / "corpus/a.bin", "ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(Exception, match=rf"train-00000\.bin: has \d+ bytes, the manifest says .*{back}"):
        PreparedSet(tmp_path / "set")


def test_documents_without_an_end_token_are_copied_and_get_one(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    given = documents_of(texts)
    megatron(tmp_path / "corpus", [ids[:-1] for ids in given])
    assert prepare(tmp_path / "corpus", tmp_path / "set", texts) == 0
    assert bytes_of(documents_of(tmp_path / "set")) == bytes_of(given)
    assert not any(path.is_symlink() for path in (tmp_path / "set").iterdir())


def test_a_document_that_validation_has_too_is_left_out_of_training(texts: Path, tmp_path: Path) -> None:
    given = documents_of(texts)
    for name, part in (("corpus", given), ("held", given[3:5]), ("other", given[10:12])):
        (tmp_path / name).mkdir()
        megatron(tmp_path / name, part)
    assert prepare(tmp_path / "corpus", tmp_path / "a", texts, "--validation-source", str(tmp_path / "held")) == 0
    assert PreparedSet(tmp_path / "a").manifest.documents == {"train": len(given) - 2, "validation": 2}
    np.random.default_rng(0).shuffle(given)
    (tmp_path / "rest").mkdir()
    megatron(tmp_path / "rest", [ids for ids in given if not any(np.array_equal(ids, held) for held in given[10:12])])
    megatron(tmp_path / "other", given[10:12])
    assert prepare(tmp_path / "rest", tmp_path / "b", texts, "--validation-source", str(tmp_path / "other")) == 0
    assert (tmp_path / "b/train-00000.bin").is_symlink()  # nothing of it is held out


def test_ids_of_another_tokenizer_are_told(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = documents_of(texts)
    separator = PreparedSet(texts).manifest.separator_id
    wrong = {
        "outside": (
            [np.where(ids == given[0][0], 3000, ids) for ids in given],
            r"% of its first \d+ ids are outside the tok",
        ),
        "endless": ([ids[ids != separator] for ids in given], "no end token"),
    }
    for name, (documents, message) in wrong.items():
        (tmp_path / name).mkdir()
        np.concatenate(documents).astype("<u2").tofile(tmp_path / name / "a.npy")
        assert prepare(tmp_path / name, tmp_path / "set", texts) == 2
        said = capsys.readouterr().err
        assert re.search(message, said), said
        assert not (tmp_path / "set/manifest.json").exists()
    for name in ("a.npy", "a.ds"):  # their types are told nowhere
        (tmp_path / "wide").mkdir(exist_ok=True)
        np.concatenate(given).astype("<u4").tofile(tmp_path / "wide" / name)
        assert prepare(tmp_path / "wide" / name, tmp_path / "set", texts) == 2
        assert "4 bytes" in (error := capsys.readouterr().err) and "2 bytes" in error
    (tmp_path / "mixed").mkdir()
    mapping = np.random.default_rng(0).permutation(300)  # a vocabulary of the same size
    mapping[[separator, int(np.flatnonzero(mapping == separator)[0])]] = separator, mapping[separator]
    megatron(tmp_path / "mixed", [mapping[ids] for ids in given])
    assert prepare(tmp_path / "mixed", tmp_path / "other", texts) == 0
    said = "".join(capsys.readouterr())
    assert "this tokenizer?" in said and "100.0%" not in said


def spoil_documents(index: Path) -> None:
    """The first document begins at the third sequence."""
    data = bytearray(index.read_bytes())
    count, borders = struct.unpack_from("<QQ", data, 18)
    assert borders == count + 1
    struct.pack_into("<q", data, 34 + 12 * count, 3)
    index.write_bytes(data)


def test_damaged_files_are_named_without_a_traceback(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, spoil in {
        "cut.idx": lambda folder: (folder / "a.idx").write_bytes((folder / "a.idx").read_bytes()[:100]),
        "long.bin": lambda folder: (folder / "a.bin").write_bytes((folder / "a.bin").read_bytes() + b"\0\0"),
        "documents": lambda folder: spoil_documents(folder / "a.idx"),
        "short.bin": lambda folder: (folder / "a.bin").write_bytes((folder / "a.bin").read_bytes()[:101]),
        "magic": lambda folder: (folder / "a.idx").write_bytes(b"nothing" * 20),
    }.items():
        (tmp_path / name).mkdir()
        megatron(tmp_path / name, documents_of(texts))
        spoil(tmp_path / name)
        assert prepare(tmp_path / name, tmp_path / "set", texts) == 2
        said = capsys.readouterr().err
        assert f"{name}/a.bin: cannot be read as Megatron (" in said and "Traceback" not in said
    assert main(["--source", str(tmp_path / "cut.idx"), "--vocab-size", "300", "--out", str(tmp_path / "set")]) == 2
    assert "--format tokens" in capsys.readouterr().err


def test_a_loss_mask_beside_the_ids_is_not_passed_over(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus").mkdir()
    datatrove(tmp_path / "corpus", documents_of(texts))
    (tmp_path / "corpus/a.ds.loss").write_bytes(b"\1")
    assert prepare(tmp_path / "corpus", tmp_path / "set", texts) == 2
    assert "a.ds.loss" in capsys.readouterr().err


def test_rows_say_which_tokens_are_counted(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[5, 6, 7, 8], [9, 10, 11]]
    marked = [{"input_ids": rows[0], "labels": [-100, -100, 7, 8]}, {"input_ids": rows[1], "loss_mask": [0, 1, 1]}]
    wrong = [
        {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1]},
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, "2"], "loss_mask": [0, 1]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (*marked, *wrong)))
    rest = ("--format", "token-rows", "--validation-fraction", "0", "--max-rejected", "4")
    assert prepare(tmp_path / "a.jsonl", tmp_path / "set", texts, *rest) == 0
    stream = PreparedSet(tmp_path / "set").split("train")
    assert stream.row_lengths().tolist() == [4, 3]
    assert stream.read(0, 7).tolist() == [*rows[0], *rows[1]]
    assert (stream.counted(0, 7) == [False, False, True, True, False, True, True]).all()
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "set/rejected.jsonl").read_text().splitlines()]
    for reason, expected in zip(reasons, ("do not shift", "3 input_ids and 2", "neither", "not a list"), strict=True):
        assert expected in reason
    capsys.readouterr()
    assert prepare(tmp_path / "a.jsonl", tmp_path / "plain", texts) == 2
    assert "--format token-rows" in capsys.readouterr().err


def test_bad_documents_are_named_by_their_place_in_the_file(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "_MIN_UNIT_BYTES", 1000)
    (tmp_path / "corpus").mkdir()
    given = documents_of(texts)
    given.insert(40, np.empty(0, np.int64))
    datatrove(tmp_path / "corpus", given)
    assert prepare(tmp_path / "corpus", tmp_path / "set", texts) == 2
    assert f"a.ds, token {sum(map(len, given[:40]))}: empty document" in capsys.readouterr().err
    records = [{"input_ids": ids.tolist()} for ids in given[:30]] + [{"input_ids": [5, 300]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert prepare(tmp_path / "a.jsonl", tmp_path / "other", texts) == 2
    assert "a.jsonl, line 31" in capsys.readouterr().err


def test_padding_is_left_out_and_rows_that_teach_nothing_are_refused(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"input_ids": [0, 0, 5, 6, 7], "labels": [-100, -100, -100, 6, 7], "attention_mask": [0, 0, 1, 1, 1]},
        {"input_ids": [8, 9, 0], "loss_mask": [0, 1, 0], "attention_mask": [1, 1, 0]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rest = ("--format", "token-rows", "--validation-fraction", "0")
    assert prepare(tmp_path / "a.jsonl", tmp_path / "set", texts, *rest) == 0
    stream = PreparedSet(tmp_path / "set").split("train")
    assert stream.row_lengths().tolist() == [3, 2] and stream.read(0, 5).tolist() == [5, 6, 7, 8, 9]
    assert (stream.counted(0, 5) == [False, True, True, False, True]).all()
    for record in records:
        record.pop("labels", None), record.pop("loss_mask", None)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert prepare(tmp_path / "b.jsonl", tmp_path / "plain", texts, "--validation-fraction", "0") == 0
    assert [ids[:-1].tolist() for ids in documents_of(tmp_path / "plain")] == [[5, 6, 7], [8, 9]]
    (tmp_path / "c.jsonl").write_text(json.dumps({"input_ids": [5, 6], "labels": [-100, -100]}))
    capsys.readouterr()
    assert prepare(tmp_path / "c.jsonl", tmp_path / "none", texts, *rest) == 2
    assert "counted" in capsys.readouterr().err


def test_a_file_in_place_that_is_gone_is_named(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    megatron(tmp_path / "out", documents_of(texts))
    assert prepare(tmp_path / "out", tmp_path / "set", texts, "--validation-fraction", "0") == 0
    assert PreparedSet(tmp_path / "set").manifest.data_fingerprint == PreparedSet(texts).manifest.data_fingerprint
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(Exception, match=r"train-00000\.bin"):
        PreparedSet(tmp_path / "set")
