"""Multiple choice: the forms of common datasets, rows as lm-eval tokenizes them, batches, figures; what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from llmtrain.base.errors import DataError
from llmtrain.commands.data import main as data
from llmtrain.commands.prepare import main as prepare
from llmtrain.config.run import DataConfig
from llmtrain.data.kinds.choices import Question, question_of
from llmtrain.data.row import RefusedError
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.choices import ChoiceSet
from llmtrain.data.stream.train_data import TrainData
from llmtrain.data.tokenize import train_bpe
from tests.helpers.chat import workers_here
from tests.helpers.questions import prepared_choices, questions

FORMS: dict[str, tuple[dict[str, Any], Question]] = {
    "arc": (
        {"id": "x", "question": "Which?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"},
        Question("Which?", ["a", "b"], 1),
    ),
    "openbookqa": (
        {"question_stem": "Which?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
        Question("Which?", ["a", "b"], 0),
    ),
    "hellaswag": (
        {"ctx_a": "A", "ctx_b": "man", "ctx": "A man", "endings": ["runs.", "sits.", "eats."], "label": "2"},
        Question("A man", ["runs.", "sits.", "eats."], 2),
    ),
    "mmlu": ({"question": "1 + 1", "choices": ["1", "2"], "answer": 1}, Question("1 + 1", ["1", "2"], 1)),
    "piqa": ({"goal": "Eat", "sol1": "spoon", "sol2": "shoe", "label": 0}, Question("Eat", ["spoon", "shoe"], 0)),
    "race": (
        {"article": "A text.", "question": "Which?", "options": ["a", "b", "c"], "answer": "C"},
        Question("A text.\nWhich?", ["a", "b", "c"], 2),
    ),
    "sciq": (
        {"question": "Which?", "distractor1": "x", "distractor2": "y", "correct_answer": "z", "support": ""},
        Question("Which?", ["x", "y", "z"], 2),
    ),
    "text": ({"question": "Which?", "choices": ["yes", "no"], "answer": "no"}, Question("Which?", ["yes", "no"], 1)),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_record_of_a_common_dataset(name: str) -> None:
    record, want = FORMS[name]
    assert question_of(record, "") == want


def test_a_named_field_is_all_of_the_question() -> None:
    record = {"article": "A text.", "question": "Which?", "full": "Read. Which?", "choices": ["a", "b"], "answer": 0}
    assert question_of(record, "full").context == "Read. Which?"


WRONG = {
    "no question: the record needs one of": {"choices": ["a", "b"], "answer": 0},
    "question is empty": {"question": " ", "choices": ["a", "b"], "answer": 0},
    "no choices: the record needs one of": {"question": "Q", "answer": 0},
    "choices is str, not a list": {"question": "Q", "choices": "ab", "answer": 0},
    "choices must have equally long lists text and label": {
        "question": "Q",
        "choices": {"text": ["a"], "label": []},
        "answer": 0,
    },
    "it has 1 choices": {"question": "Q", "choices": ["a"], "answer": 0},
    "choice 1 is empty": {"question": "Q", "choices": ["a", ""], "answer": 0},
    "choice 0 is int": {"question": "Q", "choices": [1, 2], "answer": 0},
    "no answer: the record needs one of": {"question": "Q", "choices": ["a", "b"]},
    "answer 2 names no choice; write a number from 0 to 1": {"question": "Q", "choices": ["a", "b"], "answer": 2},
    "label '-1' names no choice": {"question": "Q", "choices": ["a", "b"], "label": "-1"},
    "answer 'A' names two choices": {"question": "Q", "choices": ["B", "A"], "answer": "A"},
    "answer is bool": {"question": "Q", "choices": ["a", "b"], "answer": True},
    "answerKey 'C' names no choice; write one of A, B": {
        "question": "Q",
        "choices": {"text": ["a", "b"], "label": ["A", "B"]},
        "answerKey": "C",
    },
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_wrong_record_is_refused_with_its_rule(reason: str) -> None:
    with pytest.raises(RefusedError) as refused:
        question_of(WRONG[reason], "")
    assert str(refused.value).startswith(reason)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_bpe([f"{record['question']} {choice}" for record in questions() for choice in record["choices"]], 310, place)
    return place


@pytest.fixture(autouse=True)
def one_process(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.nullcontext() if "processes" in request.node.name else workers_here():
        yield


def test_rows_are_the_question_and_its_choice_after_a_space(tmp_path: Path, tokenizer: Path) -> None:
    """As lm-eval's _encode_pair writes them; with a question that ends in spaces, which go to the choice."""
    asked = [*questions(6), {"question": "the fox  ", "choices": ["jumps", "Ünïcödé hills"], "answer": 1}]
    made = PreparedSet(prepared_choices(tmp_path, tokenizer, asked))
    hf, stream, at, row = AutoTokenizer.from_pretrained(tokenizer), made.split("validation"), 0, 0
    entries, lengths = stream.entries(made.kind.entry), stream.row_lengths()
    for record in asked:
        for place, choice in enumerate(record["choices"]):
            whole = hf.encode(f"{record['question']} {choice}")
            begin = len(hf.encode(record["question"].rstrip()))
            length = int(lengths[row])
            assert stream.read(at, length).tolist() == whole
            counted = stream.counted(at, length)
            assert counted is not None and counted.tolist() == [index >= begin for index in range(length)]
            assert entries[row].item() == (place == 0, place == record["answer"], len(choice), len(choice.encode()))
            at, row = at + length, row + 1
    assert row == len(lengths) == made.manifest.documents["validation"]
    assert made.manifest.tokens["train"] == 0
    made.verify()


def test_the_same_rows_of_parquet_and_by_any_number_of_processes(tmp_path: Path, tokenizer: Path) -> None:
    asked = questions(12)
    first = PreparedSet(prepared_choices(tmp_path, tokenizer, asked)).manifest
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(asked), tmp_path / "q.parquet")
    given = ["--tokenizer", str(tokenizer), "--format", "choices"]
    assert prepare(["--source", str(tmp_path / "q.parquet"), "--out", str(tmp_path / "p"), *given]) == 0
    jsonl = ["--source", str(tmp_path / "questions.jsonl"), "--out", str(tmp_path / "j"), "--processes", "3"]
    assert prepare([*jsonl, "--shard-bytes", "300", *given]) == 0
    assert PreparedSet(tmp_path / "p").manifest.data_fingerprint == first.data_fingerprint
    several = PreparedSet(tmp_path / "j")
    assert len(several.manifest.shards["validation"]) > 1
    one, other = (each.split("validation") for each in (PreparedSet(tmp_path / "p"), several))
    assert np.array_equal(one.row_lengths(), other.row_lengths())
    assert np.array_equal(one.entries(several.kind.entry), other.entries(several.kind.entry))


def test_a_bad_record_is_named_and_the_others_are_kept_on_demand(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "q.jsonl"
    good = {"question": "the fox", "choices": ["jumps", "rain"], "answer": 0}
    source.write_text(json.dumps(good) + "\n" + json.dumps({**good, "answer": "Z"}) + "\n")
    given = ["--source", str(source), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "o")]
    given += ["--format", "choices"]
    assert prepare(given) == 2
    assert "q.jsonl, line 2" in capsys.readouterr().err
    assert prepare([*given, "--max-rejected", "1"]) == 0
    assert "1 question, 2 choices" in capsys.readouterr().out
    assert data(["show", str(tmp_path / "o"), "--split", "validation", "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "row 0 of validation (question 0, the answer)" in shown and "counted |  rain" in shown


def test_questions_are_no_training_data_and_texts_are_no_questions(tmp_path: Path, tokenizer: Path) -> None:
    folder = prepared_choices(tmp_path, tokenizer, questions(3))
    with pytest.raises(DataError, match=r"eval\.choices"):
        TrainData(DataConfig(path=folder, sequence_length=64))
    (tmp_path / "t.txt").write_text("the quick brown fox. " * 900)
    words = ["--source", str(tmp_path / "t.txt"), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "texts")]
    assert prepare(words) == 0
    with pytest.raises(DataError, match="--format choices"):
        ChoiceSet(tmp_path / "texts", sequence_length=64)
    with pytest.raises(DataError, match=r"data.sequence_length"):
        ChoiceSet(folder, sequence_length=2)


def test_a_damaged_folder_is_refused_when_it_is_opened(tmp_path: Path, tokenizer: Path) -> None:
    folder = Path(prepared_choices(tmp_path, tokenizer, questions(3)))
    shard, rows = folder / "validation-00000.bin", folder / "validation-00000.rows"
    ids, entries = shard.read_bytes(), rows.read_bytes()
    shard.write_bytes(b"\xff\xff" + ids[2:])
    with pytest.raises(DataError, match=r"65535.*\[0, 310\)"):
        ChoiceSet(folder, sequence_length=64)
    shard.write_bytes(ids)
    rows.write_bytes(entries[:-10] + bytes([1]) + entries[-9:])
    with pytest.raises(DataError, match=f"{folder}.*questions"):
        ChoiceSet(folder, sequence_length=64)


@pytest.mark.parametrize(("ranks", "shared"), [(1, 1), (3, 1), (2, 4)])
def test_every_row_is_in_one_batch_and_all_ranks_have_as_many(
    tmp_path: Path, tokenizer: Path, ranks: int, shared: int
) -> None:
    choices = ChoiceSet(prepared_choices(tmp_path, tokenizer, questions()), sequence_length=40, shared=shared)
    assert 0 < choices.cut < choices.rows
    dealt = [list(choices.batches(160, rank, ranks)) for rank in range(ranks)]
    shapes = [[[tuple(micro.inputs.shape) for micro in some] for some in each] for each in dealt]
    assert all(each == shapes[0] for each in shapes)
    assert all(
        len(set(some)) == 1 and some[0][0] * some[0][1] <= 160 and some[0][1] % shared == 0 for some in shapes[0]
    )
    rows = [row for each in dealt for some in each for micro in some for row in micro.rows.tolist()]
    assert sorted(rows) == list(range(choices.rows))


def test_figures_are_lm_evals_definitions(tmp_path: Path, tokenizer: Path) -> None:
    """acc and acc_norm; a question with a log-probability that is not finite is not answered."""
    asked = [
        {"question": "a", "choices": ["rain", "the"], "answer": 0},
        {"question": "a", "choices": ["dog", "falls falls"], "answer": 1},
        {"question": "a", "choices": ["Ünïcödé", "fox"], "answer": 0},
    ]
    choices = ChoiceSet(prepared_choices(tmp_path, tokenizer, asked), sequence_length=64)
    log_probs = np.array([-1.0, -2.0, -2.0, -3.0, np.nan, -9.0], dtype=np.float32)
    assert [each.tolist() for each in choices.chosen(log_probs)] == [[0, 0, -1], [0, 1, -1]]
    log_probs[4] = -4.0
    found = choices.figures(log_probs)
    assert found["accuracy"] == pytest.approx(2 / 3) and found["accuracy_norm"] == 1.0
    assert found["bits_per_byte"] == pytest.approx((1 + 3 + 4) / np.log(2) / (4 + 11 + len("Ünïcödé".encode())))
