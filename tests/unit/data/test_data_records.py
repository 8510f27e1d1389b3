"""Reading records: every format gives its documents, and every kind of bad record is named with file and place."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from llmtrain.base.errors import DataError
from llmtrain.data.prepare.records import Document, Lines, Rejection, read_piece
from llmtrain.data.prepare.run_units import rejections
from llmtrain.data.prepare.sources import find_files, plan_units
from llmtrain.data.prepare.worker import UnitRecord

LIMIT = 1000
UNIT = 1 << 20


def read(
    source: Path | str, unit_bytes: int = UNIT, form: str = "auto", field: str | None = "text"
) -> tuple[list[str], list[str]]:
    """(texts, rejections as text) of everything in `source`."""
    texts, rejected = [], []
    for unit in plan_units(find_files([str(source)], form), unit_bytes):
        for piece in unit.pieces:
            for item in read_piece(piece, field, LIMIT):
                if isinstance(item, Document):
                    assert item.data == item.text.encode()
                    texts.append(item.text)
                else:
                    assert isinstance(item, Rejection)
                    rejected.append(str(item))
    return texts, rejected


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


GOOD = [f"document {i}: äöü € 𝄞" + " word" * (i % 50) for i in range(300)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    data = jsonl(GOOD)
    half = len(data) // 2
    if suffix == ".gz":
        data = gzip.compress(data[:half]) + gzip.compress(data[half:])  # members, as pigz and cat make them
    elif suffix == ".zst":
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data)
    assert read(path) == (GOOD, [])


@pytest.mark.parametrize("unit_bytes", [1, 7, 100, 1001, 10_000])
def test_a_cut_jsonl_gives_each_line_once_and_its_true_number(tmp_path: Path, unit_bytes: int) -> None:
    lines = jsonl(GOOD[:60]).splitlines()
    lines[17] = b"{broken"
    lines[41] = b'{"text": 5}'
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))  # no newline at the end either
    texts, _ = read(path, unit_bytes)
    assert texts == [text for i, text in enumerate(GOOD[:60]) if i not in (17, 41)]
    work = plan_units(find_files([str(path)], "auto"), unit_bytes)
    records: dict[int, UnitRecord] = {}
    for unit in work:
        lines = Lines()
        items = [item for piece in unit.pieces for item in read_piece(piece, "text", LIMIT, lines)]
        bad = [item for item in items if isinstance(item, Rejection)]
        known = lines.count if unit.index % 3 else None  # else not all are done, and some are counted now
        records[unit.index] = UnitRecord(unit=unit.index, rejected=bad, lines=known)
    assert [entry.number for entry in rejections(work, records)] == [18, 42]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a\xff"}', "invalid UTF-8: byte 0xff"),
        (b'{"text": "a"', "broken JSON"),
        (b"[" * 100_000, "broken JSON"),
        (b'["text"]', "a JSON list, not an object"),
        (b'{"body": "a", "id": 3}', "no field 'text' (its fields: body, id); see --field"),
        (b'{"messages": []}', "they are not plain text: add --format chat"),
        (b'{"messages": []}', "--chat-template DIR/launch/templates/turns.jinja, which `llmtrain init DIR` writes"),
        (b'{"instruction": "a", "output": "b"}', "add --format chat"),
        (b'{"prompt": "a", "chosen": "b", "rejected": "c"}', "add --format preference"),
        (b'{"prompt": "a", "completion": "b", "label": true}', "add --format unpaired"),
        (b'{"text": null}', "field 'text' is null, not a string"),
        (b'{"text": 5}', "field 'text' is int, not a string"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'{"text": " \\n "}', "empty document"),
        (b'{"text": "' + b"x" * (LIMIT + 1) + b'"}', "huge document: 1001 B"),
        (b'{"text": "' + b"x" * (8 * LIMIT + UNIT) + b'"}', "huge document: a line of over"),
    ],
)
def test_bad_lines(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    texts, rejected = read(path)
    assert texts == ["one", "two"]  # the others are not lost
    assert len(rejected) == 1 and rejected[0].startswith("a.jsonl, line 3: ") and reason in rejected[0]


def test_a_record_that_is_taken_as_it_is_has_each_key_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "text": "b"}\n')
    assert "'text' twice" in read(tmp_path / "a.jsonl", field=None)[1][0]
    assert read(tmp_path / "a.jsonl") == (["b"], [])
    pq.write_table(pa.table({"text": [b"a"], "more": [None]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", field=None)[0] == ['{"text": {"bytes": "b\'a\'"}}']  # bytes are no text


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_and_corrupt_streams(tmp_path: Path, suffix: str) -> None:
    whole = jsonl(GOOD)
    packed = gzip.compress(whole) if suffix == ".gz" else zstandard.compress(whole)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed[: len(packed) * 2 // 3])
    texts, rejected = read(path)
    assert texts == GOOD[: len(texts)]
    assert len(rejected) == 1 and f"line {len(texts) + 1}: truncated" in rejected[0]
    path.write_bytes(b"not compressed at all")
    assert "line 1: corrupt" in read(path)[1][0]
    path.write_bytes(b"")
    assert "line 1: empty" in read(path)[1][0]


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"one\ntwo\xff\n", "line 2: invalid UTF-8: byte 0xff; convert it, such as `iconv -f LATIN1 -t UTF-8 FILE"),
        ("text".encode("utf-16"), "line 1: invalid UTF-8: byte 0xff; convert it, such as `iconv -f UTF-16 -t UTF-8 "),
        (b"%PDF-1.4\nno byte that UTF-8 lacks", "line 1: it is a PDF: convert it to text first, such as by `pdftotext"),
        (b"%PDF-1.7\n%\xe2\xe3", "line 1: it is a PDF"),
        (b"\x89PNG\r\n\x1a\n", "line 1: it is a PNG picture, which has no text: leave it out"),
        (b"\xff\xd8\xff\xe0", "line 1: it is a JPEG picture"),
        (b"GIF89a\xff", "line 1: it is a GIF picture"),
        (b"PK\x03\x04\xff", "line 1: it is a ZIP archive, as for Word and EPUB"),
        (b"", "line 1: empty document"),
        (b" \n\t\n", "line 1: empty document"),
        (b"x" * (LIMIT + 1), "line 1: huge document"),
    ],
)
def test_bad_text_files(tmp_path: Path, data: bytes, place: str) -> None:
    (tmp_path / "a.py").write_bytes(data)
    (tmp_path / "b.txt").write_text("GIF89a is fine")
    texts, rejected = read(tmp_path)
    assert texts == ["GIF89a is fine"] and len(rejected) == 1 and rejected[0].startswith(f"a.py, {place}")


def test_text_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"hello"))
    (tmp_path / "b.txt.zst").write_bytes(zstandard.compress(b"world")[:-2])
    texts, rejected = read(tmp_path)
    assert texts == ["hello"] and "b.txt.zst, line 1: truncated" in rejected[0]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(300), "text": GOOD}), path, row_group_size=70)
    assert read(path) == (GOOD, [])
    assert read(path, unit_bytes=100) == (GOOD, [])  # a unit a row group


def test_bad_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = ["one", None, "", "x" * (LIMIT + 1), "two"]
    pq.write_table(pa.table({"text": values}), path, row_group_size=2)
    for unit_bytes in (1, UNIT):
        texts, rejected = read(path, unit_bytes)
        assert texts == ["one", "two"]
        assert [r.split(": ")[1] for r in rejected] == [
            "field 'text' is null, not a string",
            "empty document",
            "huge document",
        ]
        assert [r.split(":")[0] for r in rejected] == [f"a.parquet, row {i}" for i in (1, 2, 3)]
    pq.write_table(pa.table({"body": ["a"]}), path)
    assert "'text'" in (lacks := read(path)[1][0]) and "body" in lacks
    pq.write_table(pa.table({"text": [1, 2]}), path)
    assert "row 1:" in (other := read(path)[1][1]) and "'text'" in other and "int" in other
    not_utf8 = pa.Array.from_buffers(pa.utf8(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    pq.write_table(pa.table({"text": not_utf8}), path)
    assert "row 0:" in (broken := read(path)[1][0]) and "Unicode" in broken
    pq.write_table(pa.table({"text": GOOD}), path)
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:500], b"", b"nonsense"):
        path.write_bytes(damaged)
        texts, rejected = read(path)
        assert texts == [] and "row 0:" in rejected[0] and "corrupt" in rejected[0]
    path.write_bytes(whole[:40] + b"\xff" * 600 + whole[640:])  # the footer is whole, a page is not
    assert "corrupt" in read(path)[1][-1]


@pytest.mark.needs("datasets")
def test_saved_datasets_folder(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"text": GOOD, "id": list(range(300))})
    made.select(range(299, -1, -1)).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    assert read(tmp_path / "saved") == (GOOD[::-1], [])
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match=r"both/train.*both/test"):
        read(tmp_path / "both")
    assert read(tmp_path / "both" / "train") == (GOOD, [])
    file = sorted((tmp_path / "saved").glob("*.arrow"))[0]
    file.write_bytes(file.read_bytes()[:3000])
    texts, rejected = read(tmp_path / "saved")
    assert len(texts) == 200 and len(rejected) == 1 and "row 0:" in rejected[0] and "corrupt" in rejected[0]


@pytest.mark.needs("datasets")
def test_bad_rows_of_a_saved_dataset(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["one", None, " ", "two"]}).save_to_disk(str(tmp_path / "saved"))
    texts, rejected = read(tmp_path / "saved")
    assert texts == ["one", "two"] and len(rejected) == 2 and "row 1:" in rejected[0] and "null" in rejected[0]
    datasets.Dataset.from_dict({"body": ["one"]}).save_to_disk(str(tmp_path / "other"))
    assert "'text'" in (lacks := read(tmp_path / "other")[1][0]) and "body" in lacks


# --- which files


def test_sources_are_found_once_and_in_an_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/z.py", "b/a.py", "a.txt", "c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    texts = ["a.txt", "b/a.py", "b/z.py", "c.md"]
    assert read(tmp_path)[0] == texts
    assert read(f"{tmp_path}/**/*.py")[0] == ["b/a.py", "b/z.py"]
    twice = find_files([f"{tmp_path}/b/z.py", str(tmp_path)])
    assert [file.label for file in twice] == ["z.py", "a.txt", "b/a.py", "c.md"]
    (tmp_path / "empty").mkdir()
    for name in ("*.rs", "empty"):
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}/{name}")):
            find_files([f"{tmp_path}/{name}"])


def test_the_format_can_be_forced(tmp_path: Path) -> None:
    (tmp_path / "a.data").write_bytes(jsonl(["one"]))
    assert read(tmp_path / "a.data", form="jsonl")[0] == ["one"]
    assert read(tmp_path / "a.data", form="text")[0] == [jsonl(["one"]).decode()]


def test_the_standard_library_is_library_code_without_tests() -> None:
    files = find_files(["stdlib"])
    labels = [file.label for file in files]
    assert labels == sorted(labels) and {"stdlib/json/decoder.py", "stdlib/os.py"} <= set(labels)
    assert not [label for label in labels if {"test", "tests", "site-packages"} & set(label.split("/"))]
    assert all(file.bytes > 0 for file in files) and sum(file.bytes for file in files) > 8_000_000


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_json_list_is_read_as_records(tmp_path: Path, name: str, mark: bytes) -> None:
    path = tmp_path / name
    many = [{"text": text, "more": [{"x": number}]} for number, text in enumerate(GOOD * 100)]  # 2 MB and more
    for indent in (None, 1):
        path.write_bytes(mark + json.dumps(many, indent=indent, ensure_ascii=False).encode())
        assert read(path) == (GOOD * 100, [])
    path.write_bytes(mark + b'[{"text": "one"}, {"other": 1}, 7, {"text": "two"}, {"text": "thr')
    texts, rejected = read(path)
    assert texts == ["one", "two"]
    assert [line.partition(": ")[0] for line in rejected] == [f"{name}, row {row}" for row in (1, 2, 4)]
    assert "'text'" in rejected[0] and "int" in rejected[1] and "broken" in rejected[2]
    path.write_bytes(mark + b"[]")
    assert read(path, form="jsonl") == ([], [f"{name}, row 0: empty file"])
    path.write_bytes(mark + b'[{"text": "one"}]\n' + b" " * (1 << 20) + b'[{"text": "two"}]')  # appended to
    assert read(path) == (["one"], [f"{name}, row 1: broken JSON (more text follows the list's end)"])


def test_a_json_file_of_objects_by_line_is_read_as_records(tmp_path: Path) -> None:
    """Datasets are given so; a single object, over lines or not, is a document of a repository."""
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + jsonl(["one", "two"]))
    (tmp_path / "b.json").write_text('{"name": "x",\n "text": "y"}\n')
    (tmp_path / "c.json").write_text('{"text": "y"}\n')
    texts, rejected = read(tmp_path)
    assert texts == ["one", "two", '{"name": "x",\n "text": "y"}\n', '{"text": "y"}\n'] and rejected == []


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl(["one", "two"]))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfthree")
    assert read(tmp_path) == (["one", "two", "three"], [])


def test_the_rows_of_a_table_as_text_are_records_unless_prose_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('label,text\n1,one\n2,"two,\n""three"""\n3\n4,\n')
    with gzip.open(tmp_path / "b.tsv.gz", "wt") as stream:
        stream.write("\ufefftext\tlabel\nfour\t1\n")
    (tmp_path / "c.csv").write_text("body\nfive\n")
    (tmp_path / "d.csv").write_bytes("text\ncafé\n".encode("latin1"))
    (tmp_path / "f.csv").write_text("text,text\none,two\n")
    texts, rejected = read(tmp_path)
    assert texts == ["one", 'two,\n"three"', "four"]
    assert rejected[:2] == [
        "a.csv, row 2: it has another number of values than the first line, which names 2 columns",
        "a.csv, row 3: empty document",
    ]
    assert all(word in rejected[2] for word in ("c.csv, row 0:", "'text'", "body", "--field"))
    assert "d.csv, row 0:" in rejected[3] and "utf-8" in rejected[3]
    assert rejected[4] == "f.csv, row 0: two columns are named 'text'; name each once"
    (tmp_path / "e").mkdir()
    (tmp_path / "e/a.csv").write_text("text,label\none,1\n")
    assert read(tmp_path / "e", form="text") == (["text,label\none,1\n"], [])


def test_links_out_of_a_folder_are_not_followed_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stranger's folder with links to a secret, to all of the disk, and in circles."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key.txt").write_text("a secret")
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "a.txt").write_text("a text")
    (folder / "b.txt").symlink_to(folder / "a.txt")
    (folder / "key.txt").symlink_to(tmp_path / "secret/key.txt")
    (folder / "more").symlink_to(tmp_path / "secret")
    assert read(folder) == (["a text"], [])
    assert f"--source {folder}: 2 links out of the folder not followed, first" in (told := capsys.readouterr().err)
    assert str(tmp_path / "secret/key.txt") in told
    for name, target in {"way": folder, "given/here": folder, "given/there": ".", "given/all": "/"}.items():
        (tmp_path / name).symlink_to(target)  # 2^40 paths lead to each file, and below / lies all that there is
    (folder / "b").mkdir()
    (folder / "b/c.txt").write_text("another")
    (folder / "b/up").symlink_to(folder)
    (folder / "0").symlink_to("b")
    for source in (folder, folder / "**", folder / "**/*.txt", f"{tmp_path}/g*n/**/*.txt"):
        labels = {file.label.removeprefix("given/") for file in find_files([str(source)])}
        assert labels == {"a.txt", "b/c.txt"} | ({"key.txt"} if source != folder else set()), "a glob names files"
    for name in ("b/c.txt", "b/up", "0"):
        (folder / name).unlink()
    assert read(tmp_path / "way")[0] == ["a text"], "what the user names is followed"
    assert [file.label for file in find_files([str(folder), str(tmp_path / "secret")])] == ["a.txt", "key.txt"]
