"""`llmtrain prepare --source URL`: what lies in a store gives the bytes that a local copy gives."""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from llmtrain.commands.prepare import main
from llmtrain.data.manifest import Manifest, read_manifest
from llmtrain.data.prepare import inputs, pools, sources
from llmtrain.data.prepare.out_folder import StoredFolder
from llmtrain.data.shards import PreparedSet
from llmtrain.storage.object_store import Store, StoreError
from tests.helpers.chat import workers_here
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
    (folder / "sub" / "h.json").write_bytes(lines(720, 20))
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
    with workers_here():
        here = prepared(tmp_path / "here", f"{tree}{what}")
    with workers_here() if what else contextlib.nullcontext():
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
    made = []
    for out, sign in (("here", ""), ("stored", "file://")):
        validation = ("--validation-source", f"{sign}{tree}/c.jsonl.zst")
        with workers_here():
            made.append(prepared(tmp_path / out, f"{sign}{folder}", more=validation).data_fingerprint)
    assert made[0] == made[1]


def test_token_ids_in_a_store_are_copied_as_they_would_be_used_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MIN_UNIT_BYTES", 1000)
    folder = tmp_path / "corpus"
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "a.jsonl").write_bytes(lines(0, 60))
    with workers_here():
        prepared(tmp_path / "texts", f"{folder}/text", more=("--validation-fraction", "0"))
    given = test_token_corpora.documents_of(tmp_path / "texts")
    layouts = ("megatron", "fairseq", "datatrove", "olmo", "numpy", "parquet")
    for name in layouts:
        (folder / name).mkdir()
        test_token_corpora.LAYOUTS[name][0](folder / name, given)
    made = []
    for out, sign in (("here", ""), ("stored", "file://")):
        words = ["--source", *(f"{sign}{folder}/{name}" for name in layouts), "--out", str(tmp_path / out)]
        words += ["--tokenizer", str(tmp_path / "texts" / "tokenizer"), "--format", "tokens"]
        with workers_here():
            assert main(words) == 0
        made.append(PreparedSet(tmp_path / out))
        made[-1].verify()
    assert made[0].manifest.data_fingerprint == made[1].manifest.data_fingerprint
    assert any(path.is_symlink() for path in (tmp_path / "here").glob("*.bin"))
    assert not any(path.is_symlink() for path in (tmp_path / "stored").glob("*.bin"))


def meddling(monkeypatch: pytest.MonkeyPatch, meddle: Callable[[], object]) -> None:
    """Something else happens when the sources have been listed, before they are read."""
    run_units = pools.run_units

    def after(*given: Any) -> None:
        meddle()
        run_units(*given)

    monkeypatch.setattr(pools, "run_units", after)


def test_a_file_that_changes_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(0, 40))
    words = ["--source", f"file://{tmp_path}/a.jsonl", "--vocab-size", "300", "--out", str(tmp_path / "set")]
    with workers_here():
        with monkeypatch.context() as patch:
            meddling(patch, lambda: (tmp_path / "a.jsonl").write_bytes(lines(1, 40)))
            assert main(words) == 2
        said = capsys.readouterr().err
        assert f"file://{tmp_path}/a.jsonl: " in said and "changed" in said, said
        assert not list((tmp_path / "set").glob("*.bin"))
        assert main(words) == 0
        assert "changed" in (notes := capsys.readouterr().out) and "unfinished" in notes
        with monkeypatch.context() as patch:
            meddling(patch, lambda: (tmp_path / "a.jsonl").unlink(missing_ok=True))
            assert main([*words[:-1], str(tmp_path / "other")]) == 2
    assert f"file://{tmp_path}/a.jsonl: cannot be read" in capsys.readouterr().err


def test_a_folder_in_a_store_is_that_of_a_local_preparation_and_two_commands_do_not_mix(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://{tmp_path.name}/set"
    more = ("--validation-source", f"{tree}/c.jsonl.zst")
    words = ["--source", str(tree), "--vocab-size", "300", "--shard-bytes", "8000", *more, "--out"]
    with workers_here():
        assert main([*words, str(tmp_path / "here")]) == 0
        with monkeypatch.context() as patch:
            meddling(patch, lambda: StoredFolder(url).claim())
            assert main([*words, url]) == 2
        said = capsys.readouterr().err
        assert f"--out {url}: another `llmtrain prepare` has begun to work in it" in said, said
        assert not [name for name in Store(url).files() if name.endswith(".bin")]
        assert main([*words, url]) == 0
        found = {name: Store(url).read(name) for name in Store(url).files()}
        here = [path for path in (tmp_path / "here").rglob("*") if path.is_file()]
        assert found == {str(path.relative_to(tmp_path / "here")): path.read_bytes() for path in here}
        capsys.readouterr()
        assert main([*words, url]) == 0
        assert f"{url}: already complete, nothing to do" in capsys.readouterr().out
        Store(url).remove(["train-00000.bin"])
        assert main([*words, url]) == 2
        assert "train-00000.bin" in capsys.readouterr().err
        Store(f"{url}2").write(b"x", "mine.txt")
        assert main([*words, f"{url}2"]) == 2
    assert "`llmtrain prepare`" in capsys.readouterr().err


def test_an_upload_that_fails_leaves_nothing_that_counts(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://{tmp_path.name}/set"
    words = ["--source", str(tree), "--vocab-size", "300", "--shard-bytes", "8000", "--out", url]
    put = Store.put

    def failing(self: Store, path: Path, name: str) -> None:
        if name == "train-00003.origins.parquet":
            raise StoreError("OSError: 5 bytes are there of 9")
        put(self, path, name)

    with workers_here():
        with monkeypatch.context() as patch:
            patch.setattr(Store, "put", failing)
            assert main(words) == 2
        said = capsys.readouterr().err
        assert f"{url}: shard 3 " in said and "5 bytes are there of 9" in said, said
        records = [name for name in Store(url).files() if "unit-" in name]
        assert records == [f"unfinished/unit-{index:05d}.json" for index in range(3)]
        assert main(words) == 0
    assert "3 of 11 shards" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nosuch://bucket/a", "--source nosuch://bucket/a: is no URL of a store; write PROTOCOL://BUCKET/FOLDER"),
        ("s3://me:word@bucket/a", "@bucket/a: has a user or a password in it; leave them to the store's own settings"),
        ("memory://nowhere/*.jsonl", "there is no such file or folder in the store, and as a glob it matches no file"),
    ],
)
def test_a_url_that_cannot_be_is_refused(
    source: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--source", source, "--out", str(tmp_path / "set")], ["--source", str(tmp_path), "--out", source]):
        (tmp_path / "a.txt").write_text("a text")
        if words[-1] != source or "memory" not in source:
            assert main([*words, "--vocab-size", "300"]) == 2
            told = capsys.readouterr().err
            assert said.removeprefix("--source") in told and ":word@" not in told, told
    assert not (tmp_path / "set").exists()


def test_no_more_is_read_than_a_piece_and_the_end_of_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"x" * 99 + b"\n" * 1 + b"".join(b"%099d\n" % i for i in range(200_000)))
    asked: list[tuple[int, int]] = []
    read = Store.read
    monkeypatch.setattr(Store, "read", lambda self, n, a, b: (asked.append((a, b)), read(self, n, a, b))[1])
    with inputs.open_file(f"file://{tmp_path}/a.jsonl", stop=12 << 20) as stream:
        stream.seek(2 << 20)
        got = b"".join(iter(lambda: stream.read(1 << 20) if stream.tell() < 12 << 20 else b"", b""))
        got += stream.readline()
    assert got == (tmp_path / "a.jsonl").read_bytes()[2 << 20 :][: len(got)]
    asked.sort()
    assert asked[0][0] == 2 << 20 and all(a == b for (_, a), (b, _) in itertools.pairwise(asked)), asked
    assert asked[-1][1] <= (12 << 20) + (256 << 10) and len(asked) < 10 and asked[0][1] - asked[0][0] == 256 << 10


def test_a_table_that_the_store_does_not_give_while_units_are_cut_is_not_taken_for_an_empty_one(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = [StoreError("ConnectionResetError: cut off")]
    read = Store.read

    def once(self: Store, *given: Any) -> bytes:
        if failing:
            raise failing.pop()
        return read(self, *given)

    monkeypatch.setattr(Store, "read", once)
    url = f"file://{tree}/sub/g.parquet"
    with workers_here():
        assert main(["--source", url, "--vocab-size", "300", "--out", str(tmp_path / "set")]) == 2
    assert f"{url}: cannot be read (ConnectionResetError: cut off)" in capsys.readouterr().err
