"""Conversations and preferences of the running Python: the same each time, every answer right, held out by subject."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from llmtrain.commands.prepare import main
from llmtrain.data.manifest import SPLITS
from llmtrain.data.shards import PreparedSet
from llmtrain.data.tokenize import SEPARATOR, TURNS, Encoder, train_bpe
from tests.helpers.chat import workers_here
from tests.helpers.lessons import FILE, lines, made

ROOT = Path(__file__).parents[3]
KINDS, lessons = made.KINDS, made.lessons
TEMPLATE = ROOT / "launch/templates/turns.jinja"
TEXT = "The quick brown fox called os.path.join(a, b) for 17 + 25 lazy dogs; ünïcödé, Ж, \N{SNOWMAN}."


def of(kind: str) -> list[Any]:
    return [lesson for split in SPLITS for lesson in lessons(kind, split)]


HASHES = """
import hashlib
from llmtrain.data.manifest import SPLITS
from tests.helpers.lessons import lines, made
for kind in made.KINDS:
    for split in SPLITS:
        print(hashlib.sha256("\\n".join(lines(kind, split)).encode()).hexdigest())
"""


def test_the_same_in_another_process() -> None:
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", HASHES], env=env, capture_output=True, text=True, check=True)
    own = [hashlib.sha256("\n".join(lines(kind, split)).encode()).hexdigest() for kind in KINDS for split in SPLITS]
    assert done.stdout.split() == own and len(set(own)) == 6


def test_every_sum_call_and_name_is_right() -> None:
    seen: Counter[str] = Counter()
    for split in SPLITS:
        for record in map(json.loads, lines("chat", split)):
            question, *middle, answer = record["messages"]
            if found := re.fullmatch(r"What is (\d+) ([+*]) (\d+)\?", question["content"]):
                value = {"+": int.__add__, "*": int.__mul__}[found[2]](int(found[1]), int(found[3]))
                wanted, arguments = str(value), {"expression": f"{found[1]} * {found[3]}"}
                assert bool(middle) == (found[2] == "*")
            elif found := re.fullmatch(r"What is the Unicode name of (.)\?", question["content"]):
                wanted, arguments = unicodedata.name(found[1]), {"character": found[1]}
            else:
                assert not middle
                continue
            seen[found[0].rpartition(" ")[0][:20]] += 1
            assert answer == {"role": "assistant", "content": wanted}
            if middle:
                (call,) = middle[0]["tool_calls"]
                assert call["function"]["arguments"] == arguments
                assert middle[1] == {"role": "tool", "content": wanted}
    assert sum(seen.values()) == 1600 + 2 * 1500


def described(name: str) -> Any:
    """What a name of the documentation means, if its module is imported already; else None."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is None:
            continue
        for part in parts[length:]:
            found = inspect.getattr_static(found, part, None)
        return found
    found = vars(sys.modules["builtins"]).get(parts[0])
    return getattr(found, parts[1], None) if found is not None and len(parts) == 2 else found


def test_the_answers_are_what_python_says_of_its_functions() -> None:
    """As inspect finds it in the imported modules, where no C twin with a text of its own is in use."""
    checked = 0
    for lesson in of("chat"):
        if lesson.family != "functions":
            continue
        name = lesson.question.removeprefix("What does ").removesuffix(" do?")
        found = described(name)
        text = inspect.getdoc(found) if inspect.isfunction(found) else None
        if text:
            assert lesson.answer.removesuffix(".") in " ".join(text.split()), name
            checked += 1
    assert checked > 500


def test_the_answers_about_topics_are_pydocs() -> None:
    from pydoc_data import topics

    about = [lesson for lesson in of("chat") if lesson.family == "topics"]
    assert len(about) > 20
    for lesson in about:
        text = topics.topics[lesson.question.removeprefix("What does Python say about ").removesuffix("?")]
        assert lesson.answer.removesuffix(".") in " ".join(text.replace('"', "").split())


def test_no_two_questions_have_one_answer_where_one_is_preferred() -> None:
    """Then the wrong answer is wrong. No pair teaches an answer that is held out."""
    answers = {lesson.question: lesson.answer for lesson in of("chat")}
    held_out = {lesson.answer for lesson in lessons("chat", "validation") if lesson.family == "functions"}
    for split in SPLITS:
        for lesson in lessons("preference", split):
            assert lesson.wrong != lesson.answer == answers[lesson.question]
            assert split == "validation" or not {lesson.wrong, lesson.answer} & held_out
    assert sum(lesson.family == "functions" for lesson in of("preference")) > 1500


def test_a_question_is_held_out_of_all_sources() -> None:
    def subjects(split: str) -> Iterator[tuple[str, str]]:
        for kind in KINDS:
            for lesson in lessons(kind, split):
                numbers = re.fullmatch(r"What is (\d+) [+*] (\d+)\?", lesson.question)
                last = lesson.question.removesuffix(" do?").removesuffix("?").split(" ")[-1].rpartition(".")[2]
                yield lesson.family, " ".join(sorted(numbers.groups())) if numbers else last

    trained, held_out = set(subjects("train")), set(subjects("validation"))
    assert not trained & held_out
    assert 0.07 < len(held_out) / (len(trained) + len(held_out)) < 0.13


def test_the_running_pythons_documentation_is_a_set_of_questions() -> None:
    asked = list(made.records("choices", "validation"))
    assert len(asked) > 200
    for record in asked:
        assert len(set(record["choices"])) == 4 and record["question"].startswith("What does ")
    places = [record["answer"] for record in asked]
    assert min(places.count(place) for place in range(4)) > len(asked) / 8
    said = {message["content"] for record in made.records("chat", "train") for message in record["messages"]}
    assert not said & {record["choices"][record["answer"]] for record in asked}


# --- turns: tokens of bytes that no text has ------------------------------------------------------


def test_the_turns_take_the_place_of_bytes_that_no_text_has(tmp_path: Path) -> None:
    """Every character that UTF-8 can write has the tokens that the tokenizers library gives without turns."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[SEPARATOR], initial_alphabet=alphabet)
    plain.train_from_iterator([TEXT], trainer)
    train_bpe([TEXT], 300, tmp_path / "tokenizer")
    encoder = Encoder(tmp_path / "tokenizer")
    assert encoder.vocab_size == 300
    every = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x110000, 37))]
    texts = [TEXT, *TURNS, f"a{TURNS[1]}b", "".join(every)]
    own = {plain.token_to_id(byte) for byte in "ÀÁþÿ"}
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert ids.tolist() == plain.encode(text).ids
        assert not own & set(ids.tolist())
        assert encoder.decode(ids.tolist()) == text
    turns = Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json"))
    assert {turns.token_to_id(turn) for turn in TURNS} == own
    assert turns.encode("".join(TURNS)).tokens == list(TURNS)


# --- through prepare ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns") / "tokenizer"
    texts = (json.loads(line)["messages"][-1]["content"] for line in lines("chat", "train"))
    train_bpe(texts, 1024, folder)
    return folder


def prepare(out: Path, tokenizer: Path, *more: str) -> int:
    given = ["--out", str(out), "--tokenizer", str(tokenizer), "--chat-template", str(TEMPLATE), "--max-tokens", "128"]
    return main([*given, *more])


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["chat", "preference"])  # choices: test_multiple_choice.py
def test_prepared(kind: str, every: int, tmp_path: Path, tokenizer: Path) -> None:
    """Every so manieth record, from a file; all of them, from the plugin."""
    out, files = tmp_path / "out", {split: tmp_path / f"{split}.jsonl" for split in SPLITS}
    for split, file in files.items():
        file.write_text("\n".join(lines(kind, split)[::every]) + "\n")
    words = ["--source", str(files["train"]), "--validation-source", str(files["validation"])]
    if every == 1:
        named = ["--source", f"lessons:{kind}", "--validation-source", f"lessons:{kind}/validation"]
        words = ["--plugin", FILE, *named]
    with workers_here():
        assert prepare(out, tokenizer, *words, "--format", kind) == 0
    data = PreparedSet(out)
    rows = 2 if kind == "preference" else 1
    read = Encoder(out / "tokenizer")
    for split in SPLITS:
        wanted = lessons(kind, split)[::every]
        assert data.manifest.documents[split] == rows * len(wanted) and data.manifest.rejected == 0
        stream = data.split(split)
        ids = stream.read(0, stream.tokens)
        texts = [read.decode(row.tolist()) for row in np.split(ids, np.cumsum(stream.row_lengths())[:-1])]
        for number, lesson in enumerate(wanted):
            shown = texts[rows * number]
            assert shown.startswith(f"<|user|>{lesson.question}<|assistant|>")
            assert shown.endswith(f"{lesson.answer}{SEPARATOR}")
            if lesson.tool is not None:
                call = json.dumps({"name": lesson.tool, "arguments": dict(lesson.arguments)}, ensure_ascii=False)
                assert f"<|assistant|>call {call}{SEPARATOR}<|tool|>{lesson.answer}<|assistant|>" in shown
            if rows == 2:
                assert texts[2 * number + 1] == f"<|user|>{lesson.question}<|assistant|>{lesson.wrong}{SEPARATOR}"


def test_a_kind_that_is_none_is_answered(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plugin", FILE, "--format", "chat", "--source", "lessons:talk"]
    assert prepare(tmp_path / "out", tokenizer, *words) == 2
    assert "talk" in (error := capsys.readouterr().err) and "chat, chat/validation, preference" in error


def test_a_call_that_no_tool_takes() -> None:
    assert made.run_tool("calculate", {"expression": "12 * 12"}) == "144"
    for name, arguments in (("calculate", {"expression": "12 + 12"}), ("open", {"expression": "1 * 1"})):
        with pytest.raises(ValueError, match="no tool"):
            made.run_tool(name, arguments)
