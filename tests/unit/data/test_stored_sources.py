"""`llmtrain prepare --source URL`: what lies in a store gives the bytes that a local copy gives."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from llmtrain.commands.prepare import main
from llmtrain.data.manifest import Manifest, read_manifest
from llmtrain.data.prepare import sources
from llmtrain.data.shards import PreparedSet
from tests.unit.data import test_token_corpora


def texts(first: int, count: int) -> Iterator[str]:
    return (f"document {i}: " + f"some words {i % 13} to learn " * (3 + i % 5) for i in range(first, first + count))


def lines(first: int, count: int) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts(first, count)).encode()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of all kinds of files, and one that a wildcard does not take."""
    folder = tmp_path_factory.mktemp("store") / "corpus"
    (folder / "sub" / "saved").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(b"\n".join(lines(0, 300).split(b"\n")))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(300, 50), mtime=0))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines(350, 50)))
    (folder / "d.json").write_text(json.dumps([{"text": text} for text in texts(400, 50)]))
    with open(folder / "e.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([["text"], *([text] for text in texts(450, 50))])
    (folder / "sub" / "f.txt").write_text(" ".join(texts(500, 20)))
    pq.write_table(pa.table({"text": list(texts(520, 200))}), folder / "sub" / "g.parquet", row_group_size=20)
    (folder / ".hidden.jsonl").write_text("no JSON\n")
    (folder / "sub" / ".h").mkdir()
    (folder / "sub" / ".h" / "i.jsonl").write_text("no JSON\n")
    return folder


def prepared(out: Path, *source: str, more: tuple[str, ...] = ()) -> Manifest:
    words = ["--vocab-size", "300", "--shard-bytes", "8000", "--processes", "2"]
    assert main(["--source", *source, "--out", str(out), *words, *more]) == 0
    return read_manifest(out)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*-*.bin")}


@pytest.mark.parametrize("what", ["", "/**/*.[jp]*"])
def test_a_store_gives_the_bytes_of_a_local_copy(tree: Path, tmp_path: Path, what: str) -> None:
    here = prepared(tmp_path / "here", f"{tree}{what}")
    stored = prepared(tmp_path / "stored", f"file://{tree}{what}")
    assert stored.data_fingerprint == here.data_fingerprint and len(shards(tmp_path / "here")) > 10
    assert shards(tmp_path / "stored") == shards(tmp_path / "here")
    tables = [pq.read_table(tmp_path / name / "train-00003.origins.parquet") for name in ("here", "stored")]
    assert tables[0].column("record").equals(tables[1].column("record"))
    assert tables[1].column("file").unique().to_pylist() == [f"file://{tree}/a.jsonl"]


def test_a_saved_dataset_and_a_validation_source_in_a_store(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus" / "saved"
    folder.mkdir(parents=True)
    for name, first in (("data-0.arrow", 0), ("data-1.arrow", 100)):
        table = pa.table({"text": list(texts(first, 100))})
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=10)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"data-{i}.arrow"} for i in (1, 0)]}))
    (folder / "dataset_info.json").write_text("{}")
    fingerprints = {
        prepared(
            tmp_path / out, f"{sign}{folder}", more=("--validation-source", f"{sign}{tree}/c.jsonl.zst")
        ).data_fingerprint
        for out, sign in (("here", ""), ("stored", "file://"))
    }
    assert len(fingerprints) == 1


def test_token_ids_in_a_store_are_copied_as_they_would_be_used_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MIN_UNIT_BYTES", 1000)
    folder = tmp_path / "corpus"
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "a.jsonl").write_bytes(lines(0, 60))
    prepared(tmp_path / "texts", f"{folder}/text", more=("--validation-fraction", "0"))
    given = test_token_corpora.documents_of(tmp_path / "texts")
    layouts = ("megatron", "fairseq", "datatrove", "olmo", "numpy", "litdata", "litdata-items", "mds", "parquet")
    for name in layouts:
        (folder / name).mkdir()
        test_token_corpora.LAYOUTS[name][0](folder / name, given)
    made = []
    for out, sign in (("here", ""), ("stored", "file://")):
        words = ["--source", *(f"{sign}{folder}/{name}" for name in layouts), "--out", str(tmp_path / out)]
        words += ["--tokenizer", str(tmp_path / "texts" / "tokenizer"), "--format", "tokens", "--processes", "2"]
        assert main(words) == 0
        made.append(PreparedSet(tmp_path / out))
        made[-1].verify()
    assert made[0].manifest.data_fingerprint == made[1].manifest.data_fingerprint
    assert any(path.is_symlink() for path in (tmp_path / "here").glob("*.bin"))
    assert not any(path.is_symlink() for path in (tmp_path / "stored").glob("*.bin"))
