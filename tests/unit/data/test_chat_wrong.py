"""Wrong data of all kinds in one `llmtrain prepare --format chat`: each is named, and nothing else is lost."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from llmtrain.commands.prepare import main
from tests.helpers.chat import workers_here
from tests.helpers.chat_oracle import FAMILIES, write_family

pytestmark = pytest.mark.long

ASKED, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
DONE = [{"role": "tool", "content": "r"}, ANSWER]


def said(*messages: Any, **more: Any) -> str:
    return json.dumps({"messages": messages, **more})


def called(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


LINES: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("{", "broken JSON (Expecting"),
    "two objects": (said(ASKED, ANSWER) * 2, "broken JSON (Extra data"),
    "no object": ("[1]", "a JSON list, not an object"),
    "no UTF-8": (b'{"messages": "\xff"}', "invalid UTF-8: byte 0xff"),
    "half a surrogate pair": (said({**ASKED, "content": "\ud800"}, ANSWER), "a lone surrogate"),
    "half a pair in arguments": (said(ASKED, called(name="f", arguments='{"x": "\\ud800"}'), *DONE),
                                 "arguments of f is a string and no JSON"),
    "a key twice": ('{"messages": [{"role": "user", "content": "q", "content": "z"}]}',
                    "broken JSON (the key 'content' twice in an object)"),
    "an argument twice": (said(ASKED, called(name="f", arguments='{"x": 1, "x": 2}'), *DONE), "the key 'x' twice"),
    "a number too large": ('{"messages": [], "n": 1e999}', "broken JSON (Infinity is no number"),
    "too deep": ('{"messages": ' + "[" * 990 + "]" * 990 + "}", "broken JSON ("),
    "no conversation": ('{"text": "x"}', "no conversation in it"),
    "no role": (said({"content": "q"}, ANSWER), "message 0 has no role"),
    "a role of another type": (said({**ASKED, "role": ["user"]}, ANSWER), "message 0 has the role ['user']"),
    "two system messages": (said({"role": "system", "content": "s"}, ASKED, ANSWER, system="t"), "a second system"),
    "a system of another type": (said(ASKED, ANSWER, system=3), "system is int, not a string"),
    "an empty question": (said({**ASKED, "content": " \n"}, ANSWER), "message 0 (user) is empty"),
    "an empty answer": (said(ASKED, {**ANSWER, "content": ""}), "message 1 (assistant) is empty"),
    "no answer": (said(ASKED), "an answer must be the last"),
    "content of another type": (said({**ASKED, "content": 3}, ANSWER), "content is int, not a string"),
    "an image": (said({**ASKED, "content": [{"type": "image"}]}, ANSWER), "message 0 holds 'image' content"),
    "images beside": (said(ASKED, ANSWER, images=["a.png"]), "it has images; only text is learnt"),
    "a part without text": (said({**ASKED, "content": [{"type": "text", "text": None}]}, ANSWER), "without one"),
    "an input of another type": ('{"instruction": "q", "input": [1], "output": "a"}', "input is list, not a string"),
    "a result without a call": (said(ASKED, *DONE), "a tool's result without a call"),
    "a call without a name": (said(ASKED, called(name=""), *DONE), "a tool call without a function's name"),
    "arguments by another name": (said(ASKED, called(name="f", parameters={"x": 1}), *DONE), "name them arguments"),
    "a call of the older form": (said(ASKED, {**ANSWER, "function_call": {"name": "f"}}), "now written as tool_calls"),
    "tools without names": (said(ASKED, ANSWER, tools=[{"name": 3}]), "a tool in tools has no name"),
    "weight of another type": (said(ASKED, {**ANSWER, "weight": "1"}), "each is 0 or 1"),
    "a template that raises": (said({"role": "developer", "content": "d"}, ASKED, ANSWER), "chat template fails: no"),
    "too long": (said(ASKED, {**ANSWER, "content": "a " * 400}), "tokens, --max-tokens is 200"),
}  # fmt: skip
GOOD = [said({**ASKED, "content": f"question {number}"}, ANSWER) for number in range(300)]
FILES = {
    "empty.jsonl": "empty file",
    "cut.jsonl.gz": "truncated: the compressed data ends before its end marker",
    "cut.jsonl.zst": "truncated: the compressed data ends before its end marker",
    "other.jsonl.gz": "corrupt compressed data",
    "columns.parquet": "no conversation in it",
    "bytes.parquet": "content is dict, not a string",
    "cut.parquet": "truncated or corrupt parquet",
}


def write_sources(folder: Path) -> None:
    folder.mkdir()
    lines = [line if isinstance(line, bytes) else line.encode() for line, _ in LINES.values()]
    (folder / "lines.jsonl").write_bytes(b"".join(line + b"\n" + GOOD[0].encode() + b"\n" for line in lines))
    text = "".join(line + "\n" for line in GOOD).encode()
    (folder / "empty.jsonl").touch()
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(text)[:400])
    (folder / "cut.jsonl.zst").write_bytes(zstandard.compress(text)[:400])
    (folder / "other.jsonl.gz").write_bytes(text)
    columns = pyarrow.table({"question": ["q"], "answer": ["a"]})
    pyarrow.parquet.write_table(columns, folder / "columns.parquet")
    (folder / "cut.parquet").write_bytes((folder / "columns.parquet").read_bytes()[:-20])
    raw = [{"role": "user", "content": b"q"}, {"role": "assistant", "content": b"a"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": raw}]), folder / "bytes.parquet")


@pytest.fixture(scope="module")
def rejected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    """(file, line or row) -> reason"""
    place = tmp_path_factory.mktemp("wrong")
    write_family(place / "model", FAMILIES["qwen3"])
    template = "{% if messages[0].role == 'developer' %}{{ raise_exception('no developer') }}{% endif %}"
    (place / "own.jinja").write_text(template + FAMILIES["qwen3"].template)
    write_sources(place / "source")
    given = ["--source", str(place / "source"), "--out", str(place / "out"), "--tokenizer", str(place / "model")]
    given += ["--chat-template", str(place / "own.jinja"), "--format", "chat", "--validation-fraction", "0"]
    assert main([*given, "--max-tokens", "200", "--max-rejected", "100", "--processes", "1"]) == 0
    entries = [json.loads(line) for line in (place / "out/rejected.jsonl").read_text().splitlines()]
    manifest = json.loads((place / "out/manifest.json").read_text())
    # Every line of the mended records is a row, and of the cut files all before the cut.
    cut = sum(entry["line"] - 1 for entry in entries if entry["file"].startswith("cut.jsonl"))
    assert manifest["documents"]["train"] == len(LINES) + cut and manifest["rejected"] == len(entries)
    return {(entry["file"], entry.get("line", entry.get("row"))): entry["reason"] for entry in entries}


@pytest.mark.parametrize("what", LINES)
def test_a_wrong_record_is_named(rejected: dict[tuple[str, int], str], what: str) -> None:
    assert LINES[what][1] in rejected["lines.jsonl", 1 + 2 * list(LINES).index(what)]


def test_no_other_record_is_rejected(rejected: dict[tuple[str, int], str]) -> None:
    assert len([place for place in rejected if place[0] == "lines.jsonl"]) == len(LINES)
    assert {name for name, _ in rejected} == {"lines.jsonl", *FILES}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_named(rejected: dict[tuple[str, int], str], name: str) -> None:
    (reason,) = [reason for (file, _), reason in rejected.items() if file == name]
    assert FILES[name] in reason


OF_OTHER_FORMATS: dict[str, dict[str, tuple[str, str]]] = {
    "preference": {
        "no rejected answer": ('{"prompt": "q", "chosen": "a"}', "rejected is null, neither a text nor messages"),
        "an answer of another type": ('{"prompt": "q", "chosen": 4, "rejected": "b"}', "chosen is int, neither a text"),
        "no prompt": ('{"chosen": "a", "rejected": "b"}', "chosen and rejected have no prompt"),
        "a prompt of another type": ('{"prompt": 4, "chosen": "a", "rejected": "b"}', "the prompt is int, neither"),
        "the same twice": ('{"prompt": "q", "chosen": "a", "rejected": "a"}', "there is nothing to prefer"),
        "two questions": (json.dumps({"chosen": [ASKED, ANSWER], "rejected": [{**ASKED, "content": "z"}, ANSWER]}),
                          "do not begin with the messages of each other"),
        "a pair too long": (json.dumps({"prompt": "q", "chosen": "a", "rejected": "b " * 400}), "--max-tokens is 200"),
    },
    "unpaired": {
        "no label": ('{"prompt": "q", "completion": "a"}', "label is null, not true (desired) or false"),
        "a label of another type": ('{"prompt": "q", "completion": "a", "label": 1}', "label is int, not true"),
        "a label as a text": ('{"prompt": "q", "completion": "a", "label": "true"}', "label is str, not true"),
        "half a pair": ('{"prompt": "q", "completion": ["a"], "label": true}', "are not both texts, or both lists"),
    },
    "prompt": {
        "nothing asked": (said(ASKED, ANSWER), "a prompt ends with what is asked"),
        "no prompt": ('{"text": "x"}', "no prompt in it: prompt, messages or instruction"),
    },
}  # fmt: skip
RIGHT = {
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "unpaired": {"prompt": "q", "completion": "a", "label": True},
    "prompt": {"prompt": "q"},
}


@pytest.mark.parametrize("form", OF_OTHER_FORMATS)
def test_a_wrong_record_of_another_format_is_named(tmp_path: Path, form: str) -> None:
    """By file and line; the right ones between them stay."""
    write_family(tmp_path / "model", FAMILIES["qwen3"])
    lines = [f"{line}\n{json.dumps(RIGHT[form])}\n" for line, _ in OF_OTHER_FORMATS[form].values()]
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    given = ["--source", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path / "out"), "--format", form]
    given += ["--tokenizer", str(tmp_path / "model"), "--validation-fraction", "0", "--max-tokens", "200"]
    with workers_here():
        assert main([*given, "--max-rejected", "100"]) == 0
    entries = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    for at, (entry, (what, (_, reason))) in enumerate(zip(entries, OF_OTHER_FORMATS[form].items(), strict=True)):
        assert (entry["file"], entry["line"]) == ("lines.jsonl", 1 + 2 * at) and reason in entry["reason"], (
            what,
            entry,
        )
    rows = json.loads((tmp_path / "out/manifest.json").read_text())["documents"]["train"]
    assert rows == len(lines) * (2 if form == "preference" else 1)
