"""Multiple-choice questions: a question followed by each of its choices, as lm-eval's harness tokenizes them.

A record has a question, its choices and the right one, under the names of common datasets (ARC, HellaSwag, MMLU,
OpenBookQA, CommonsenseQA, PIQA, RACE, SciQ and similar ones). A choice is scored as the continuation of its question
after one space: lm-eval 0.4.13, `TemplateLM._encode_pair`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.base import units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.untrusted import first_line
from llmtrain.data.kinds.kind import RowKind
from llmtrain.data.row import RefusedError, Row
from llmtrain.data.token_stream import TokenStream

_QUESTIONS = ("question", "question_stem", "ctx", "query", "goal", "prompt", "context")
_BEFORE = ("context", "passage", "article", "support")
"""Fields with the text that a question is about; it comes before the question, followed by a line break."""
_CHOICES = ("choices", "endings", "options")
_ANSWERS = ("answer", "answerKey", "answer_index", "label", "gold")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, kw_only=True)
class Choices(RowKind, format="choices"):
    """Multiple-choice questions, a row for each choice."""

    title = "multiple-choice questions"
    columns = (("question", "choices"), ("ctx", "endings"))
    mark = "choices"
    never_trains = "which measure a model and train none; name it in eval.choices"
    measures = True
    tokenizer = "the tokenizer of the training data, such as data/stdlib/tokenizer"
    templated = False
    entry = np.dtype([("first", "u1"), ("right", "u1"), ("characters", "<u4"), ("bytes", "<u4")])
    """Whether the row is a question's first choice, whether it is the right one, and the choice's length."""

    field: str = ""

    def encoder(self, folder: Path, dtype: np.dtype, bare: bool) -> ChoiceEncoder:
        return ChoiceEncoder(folder)

    def encode(self, encoder: Any, record: dict[str, Any]) -> list[Row]:
        rows: list[Row] = encoder.rows_of(question_of(record, self.field))
        return rows

    def counted(self, stream: TokenStream) -> str:
        entries = stream.entries(self.entry)
        return f"{units.counted(int(entries['first'].sum()), 'question')}, {units.counted(len(entries), 'choice')}"

    def about(self, stream: TokenStream, index: int) -> str:
        entries = stream.entries(self.entry)[: index + 1]
        return f" (question {int(entries['first'].sum()) - 1}{', the answer' if entries['right'][index] else ''})"


@dataclass(frozen=True, slots=True)
class Question:
    context: str
    choices: list[str]
    answer: int
    """Number of the right choice, from 0."""


def question_of(record: dict[str, Any], field: str) -> Question:
    """Return the question of a record. `field`: name of the field with the question; empty: one of the usual names.

    Raises: RefusedError.
    """
    choices, labels = _choices(record)
    return Question(_context(record, field), choices, _answer(record, choices, labels))


def _given(record: dict[str, Any], names: tuple[str, ...], what: str) -> tuple[str, Any]:
    """Return (name, value) of the first of `names` that the record has."""
    for name in names:
        if record.get(name) is not None:
            return name, record[name]
    fields = ", ".join(sorted(map(str, record))[:8]) or "none"
    raise RefusedError(f"no {what}: the record needs one of {', '.join(names)}, and it has {fields}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RefusedError(f"{name} is {type(value).__name__}, not a string")
    if not value.strip():
        raise RefusedError(f"{name} is empty")
    return value


def _context(record: dict[str, Any], field: str) -> str:
    name, value = _given(record, (field,) if field else _QUESTIONS, "question")
    question = _text(value, name)
    if field:
        return question
    before = (record.get(each) for each in _BEFORE if each != name)
    return "\n".join([*(each for each in before if isinstance(each, str) and each.strip()), question])


def _choices(record: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the choices' texts, and their labels if they have any."""
    labels: Any = []
    if "sol1" in record and "sol2" in record:  # PIQA
        values: Any = [record["sol1"], record["sol2"]]
    elif all(record.get(name) for name in ("correct_answer", "distractor1")):  # SciQ
        wrong = [record[name] for name in sorted(record) if name.startswith("distractor") and record[name]]
        values, labels = [*wrong, record["correct_answer"]], []
    else:
        name, values = _given(record, _CHOICES, "choices")
        if isinstance(values, dict):  # ARC: the columns of a table
            values, labels = values.get("text"), values.get("label")
            if not isinstance(labels, list) or not isinstance(values, list) or len(labels) != len(values):
                raise RefusedError(f"{name} must have equally long lists text and label")
        if not isinstance(values, list):
            raise RefusedError(f"{name} is {type(values).__name__}, not a list of strings")
    if len(values) < 2:
        raise RefusedError(f"it has {len(values)} choices; it needs at least 2")
    return [_text(each, f"choice {place}") for place, each in enumerate(values)], list(map(str, labels))


def _answer(record: dict[str, Any], choices: list[str], labels: list[str]) -> int:
    """Return the right choice's number; the record names its label, or else a number from 0, a letter or its text."""
    if record.get("correct_answer") in choices and not any(record.get(name) is not None for name in _ANSWERS):
        return choices.index(record["correct_answer"])
    name, answer = _given(record, _ANSWERS, "answer")
    meant = str(answer).strip()
    if isinstance(answer, bool) or not isinstance(answer, (int, str)):
        raise RefusedError(f"{name} is {type(answer).__name__}, not a number, a letter or a choice")
    if labels:
        places = {place for place, label in enumerate(labels) if label == meant}
    else:
        places = {choices.index(meant)} if isinstance(answer, str) and meant in choices else set()
        if meant.isdecimal():
            places |= {int(meant)} & set(range(len(choices)))
        elif meant in _LETTERS:
            places |= {_LETTERS.find(meant)} & set(range(len(choices)))
    if len(places) != 1:
        wanted = (
            f"one of {', '.join(labels)}" if labels else f"a number from 0 to {len(choices) - 1}, its letter or text"
        )
        raise RefusedError(f"{name} {answer!r} names {'no choice' if not places else 'two choices'}; write {wanted}")
    return places.pop()


class ChoiceEncoder:
    """Encodes each choice of a question as a row."""

    dated = False
    too_long = 0
    unread: frozenset[str] = frozenset()

    def __init__(self, folder: Path) -> None:
        """Raises DataError when transformers cannot load the tokenizer."""
        from transformers import AutoTokenizer

        from llmtrain.data.tokenizer_folder import refuse_unsafe

        refuse_unsafe(folder)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # OSError, ValueError, TypeError: a folder's files can cause any
            raise DataError(f"{folder}: transformers cannot load this tokenizer ({first_line(error, 200)})") from error
        first = self._tokenizer.bos_token_id
        self._begins = str(self._tokenizer.decode(self._tokenizer.eos_token_id if first is None else first))
        self._vocab_size = max(max(self._tokenizer.get_vocab().values()) + 1, len(self._tokenizer))

    def record(self, text: str) -> dict[str, Any]:
        try:
            record: dict[str, Any] = untrusted.loads(text)
        except ValueError as error:
            raise RefusedError(f"broken JSON ({error})") from None
        return record

    def rows_of(self, question: Question) -> list[Row]:
        """Return a row for each choice, in order. Raises RefusedError."""
        from llmtrain.data.tokenize import as_ids

        context = question.context.rstrip()
        gap = question.context[len(context) :] + " "
        begin = self._ids(context)
        if not begin:
            raise RefusedError("the tokenizer gives no token for its question")
        rows = []
        for place, choice in enumerate(question.choices):
            continuation = self._ids(context + gap + choice)[len(begin) :]
            if not continuation:
                raise RefusedError(f"choice {place} adds no token to the question")
            counted = np.arange(len(begin) + len(continuation)) >= len(begin)
            entry = (place == 0, place == question.answer, len(choice), len(choice.encode()))
            rows.append(Row(as_ids(begin + continuation, self._vocab_size), counted, entry))
        return rows

    def _ids(self, text: str) -> list[int]:
        """Encode as lm-eval's HFLM does: with the tokenizer's <bos>, unless the text already begins with it."""
        options = {"add_special_tokens": False} if text.startswith(self._begins) else {}
        ids: list[int] = self._tokenizer.encode(text, **options)
        return ids
