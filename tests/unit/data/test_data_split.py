"""Training and validation: documents cut for it, texts named for it, and what is said when there is none.

More than 20 CPU s: each way to split is a run of the command with its workers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from llmtrain.commands.prepare import main
from llmtrain.data.prepare.settings import draw, parts
from llmtrain.data.shards import PreparedSet
from llmtrain.data.tokenize import Encoder
from tests.helpers.play import BYTES, write_play
from tests.unit.data.test_data_prepare import contents

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_play(tmp_path_factory.mktemp("play") / "input.txt")


@pytest.fixture(scope="module")
def prepared(play: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "set"
    assert prepare(play, out) == 0
    return out


def prepare(source: Path | list[Path], out: Path, *more: str) -> int:
    sources = source if isinstance(source, list) else [source]
    return main(["--source", *map(str, sources), "--out", str(out), "--vocab-size", "300", *more])


def documents(folder: Path, split: str) -> list[str]:
    """The split's documents as text; each ends with the separator."""
    data = PreparedSet(folder)
    data.verify()
    stream = data.split(split)  # type: ignore[arg-type]
    tokens = stream.read(0, stream.tokens)
    encoder = Encoder(data.tokenizer_dir)
    ends = np.flatnonzero(tokens == encoder.separator_id) + 1
    return [encoder.decode(piece[:-1].tolist()) for piece in np.split(tokens, ends)[:-1]]


def test_one_text_file_is_cut_where_a_paragraph_ends_and_no_text_is_on_both_sides(
    play: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (train,), (validation,) = documents(prepared, "train"), documents(prepared, "validation")
    assert play.stat().st_size == BYTES and train + validation == play.read_text()
    assert train.endswith("\n\n") and re.match("[A-Z]+:\n", validation)
    manifest = PreparedSet(prepared).manifest
    assert manifest.cut == 1 and manifest.documents == {"train": 1, "validation": 1}
    assert manifest.tokens["validation"] / sum(manifest.tokens.values()) == pytest.approx(0.05, rel=0.01)
    # The same bytes again, whatever the number of processes; and another fraction arrives as it was asked for.
    assert prepare(play, tmp_path / "again", "--processes", "3") == 0
    said = capsys.readouterr().out
    assert re.search(r"train 1 document, \d+k tokens \(9\d\.\d%\); validation 1 document, [\d.]+k tokens \(", said), (
        said
    )
    assert "1 cut" in said
    assert contents(tmp_path / "again") == contents(prepared)
    assert prepare(play, tmp_path / "more", "--validation-fraction", "0.3") == 0
    more = PreparedSet(tmp_path / "more").manifest
    assert more.tokens["validation"] / sum(more.tokens.values()) == pytest.approx(0.3, rel=0.01)
    assert more.data_fingerprint != manifest.data_fingerprint


def test_short_documents_stay_whole_and_long_ones_are_cut(play: Path, tmp_path: Path) -> None:
    text = play.read_text()
    records = [text[i * 600 : (i + 1) * 600] for i in range(400)] + [text[400_000:440_000]]
    source = tmp_path / "mixed.jsonl"
    source.write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    assert prepare(source, tmp_path / "set") == 0
    manifest = PreparedSet(tmp_path / "set").manifest
    assert manifest.cut == 1 and sum(manifest.documents.values()) == 402
    held_out = documents(tmp_path / "set", "validation")
    whole = [document for document in held_out if document in records]
    assert len(held_out) == len(whole) + 1 and 8 < len(whole) < 40


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("a b\n\n" * 2000, "\n\n"),
        ("a b\n" * 2000, "\n"),
        ("ab " * 3000, " "),
        ("ä" * 6000, "ä"),
        ("\n" * 9000 + "a word " * 900 + "\n" * 9000, " "),  # blank text on neither side
    ],
)
def test_the_cut_is_at_the_best_boundary_there_is(text: str, ends: str) -> None:
    (first, train), (second, validation) = parts(text, text.encode(), 0.1, 4096)
    assert (first, second) == ("train", "validation") and train + validation == text
    assert train.endswith(ends) and train.strip() and validation.strip()
    assert len(validation.strip()) / len(text.strip()) == pytest.approx(0.1, rel=0.12)
    assert parts(text, text.encode(), 0.0, 4096) == [("train", text)]


def test_a_larger_fraction_keeps_what_a_smaller_one_held_out() -> None:
    texts = [f"document {index}" for index in range(2000)]
    held_out = {f: {t for t in texts if parts(t, t.encode(), f, 4096)[0][0] == "validation"} for f in (0.02, 0.1)}
    assert held_out[0.02] < held_out[0.1] and 150 < len(held_out[0.1]) < 250
    assert all(draw(text.encode()) < 0.02 for text in held_out[0.02])


def test_an_empty_validation_split_is_an_error_whose_remedies_work(
    play: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = []
    for index in range(40):
        text = play.read_text()[index * 500 : (index + 1) * 500]
        if draw(text.encode()) > 0.2 and len(notes) < 12:  # twelve that chance keeps out of validation
            notes.append(tmp_path / f"{index}.txt")
            notes[-1].write_text(text)
    out = tmp_path / "set"
    assert prepare(notes, out) == 2
    error = capsys.readouterr().err
    assert "12 documents" in error and "--validation-source" in error and "`eval: off`" in error
    least = float(re.search(r"--validation-fraction ([\d.]+) or more", error)[1])  # type: ignore[index]
    assert 0.2 < least <= min(draw(path.read_bytes()) for path in notes) + 0.0011
    # Each remedy as it stands there, in the same folder.
    assert prepare(notes, out, "--validation-fraction", str(least)) == 0
    assert PreparedSet(out).manifest.documents == {"train": 11, "validation": 1}
    shutil.rmtree(out)
    assert prepare(notes, out) == 2
    assert prepare(notes, out, "--validation-fraction", "0") == 0
    shutil.rmtree(out)
    assert prepare(notes, out) == 2
    assert prepare(notes, out, "--validation-source", str(notes[0])) == 0
    assert documents(out, "validation") == [notes[0].read_text()]
    # One short document: no fraction of documents would help.
    capsys.readouterr()
    assert prepare(notes[0], tmp_path / "one") == 2
    error = capsys.readouterr().err
    assert "1 document" in error and "or more" not in error


def test_texts_that_validation_has_and_their_kinds_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("all", "held"):
        (tmp_path / place).mkdir()
        for number in range(14):
            (tmp_path / place / f"a.k{number}").write_text(f"some text {number} " * 20)
    held = ("--validation-source", str(tmp_path / "held"))
    assert main(["--source", str(tmp_path / "all"), *held, "--out", str(tmp_path / "set"), "--vocab-size", "262"]) == 2
    said = capsys.readouterr()
    assert "training" in said.err and "14 documents of --source" in said.err
    assert re.search(r"1 \.k7, and 2 other kinds$", said.out, re.M)


def test_validation_source_gives_the_validation_set_and_training_holds_nothing_of_it(
    play: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [f"record {index} " * 30 for index in range(300)]
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "all.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    (texts / "held.jsonl").write_text(json.dumps({"text": "text of its own " * 30}) + "\n")
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in records[40:50]))
    given = ("--validation-source", str(texts / "held.jsonl"), str(tmp_path / "more.jsonl"))
    for processes in ("1", "2"):
        out = tmp_path / f"set{processes}"
        assert prepare(texts, out, *given, "--processes", processes, "--shard-bytes", "5000") == 0
        assert "10 documents of --source" in capsys.readouterr().out
    assert contents(tmp_path / "set1") == contents(tmp_path / "set2")
    held_out = documents(tmp_path / "set1", "validation")
    assert sorted(held_out) == sorted([*records[40:50], "text of its own " * 30])
    assert sorted(documents(tmp_path / "set1", "train")) == sorted(set(records) - set(held_out))
    # The tokenizer is trained on what is for training.
    assert prepare(texts, tmp_path / "set1", *given, "--shard-bytes", "5000") == 0
    assert " complete" in capsys.readouterr().out
    assert prepare(texts, tmp_path / "set1", *given[:2], "--shard-bytes", "5000") == 2
    assert " validation_source " in capsys.readouterr().err
    for wrong, said in (
        ((*given, "--validation-fraction", "0.1"), "--validation-fraction"),
        (("--validation-source", "no/such"), "--validation-source no/such:"),
        (("--validation-source", str(texts)), "training"),
    ):
        assert prepare(texts, tmp_path / "wrong", *wrong) == 2
        assert "--validation-source" in (error := capsys.readouterr().err) and said in error
        assert not (tmp_path / "wrong").exists()
