"""Masks of templates that behave as those of known families, by an oracle that knows neither llmtrain nor transformers.

T1-T9 of the field's pains. Each conversation gives rows whose every bit is right, or a reason that is true.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from llmtrain.data.chat import ChatEncoder, ChatOptions
from llmtrain.data.messages import RefusedError
from llmtrain.data.tokenize import stop_tokens
from tests.helpers.chat_families import FAMILIES, Family, Message
from tests.helpers.chat_oracle import conversations, rows_are_right, turns, write_family


def is_true(reason: str, family: Family, messages: list[Message], with_tools: bool) -> bool:
    """Of what these families refuse, by what their templates are known to leave out."""
    calls = any("tool_calls" in message for message in messages)
    if "leaves out its reasoning_content" in reason:
        return not family.thoughts and any("reasoning_content" in message for message in messages)
    if "leaves out its content" in reason:
        thinks = "</think>" in family.template and any("think>" in message["content"] for message in messages)
        return thinks or (family.bare_calls and any("tool_calls" in m and m["content"] for m in messages))
    if "leaves out the tools" in reason:
        return not family.tools and with_tools
    if "leaves out its tool_calls" in reason:
        return not family.tools and calls
    if "does not write the answer where its generation prompt ends" in reason:
        return "<think>" in family.template and not family.usable
    return "generation would not stop at its end" in reason and not family.usable


def judged(folder: Path, name: str, count: int, seed: int) -> tuple[int, int]:
    """(conversations that gave rows, refused ones)"""
    family = FAMILIES[name]
    write_family(folder, family)
    encoder = ChatEncoder(folder, ChatOptions(field="messages", stop_tokens=stop_tokens(folder, ())))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    right = refused = 0
    for record, messages, tools in conversations(family, count, seed):
        try:
            told = turns(family, messages, tools)
        except Exception:
            told = None
        try:
            rows = encoder.rows(json.dumps(record))
        except RefusedError as error:
            why = str(error)
            failed = told is None and "the chat template fails" in why
            assert failed or is_true(why, family, messages, tools is not None), (why, record)
            refused += 1
            continue
        assert told is not None, record
        found = [(row.ids.tolist(), row.counted.tolist()) for row in rows]
        assert (wrong := rows_are_right(tokenizer, family, told, found)) is None, (wrong, record)
        right += 1
    return right, refused


@pytest.mark.parametrize("name", FAMILIES)
def test_every_bit_is_right_or_the_reason_true(tmp_path: Path, name: str) -> None:
    right, refused = judged(tmp_path, name, 12, seed=1)
    assert right > refused if FAMILIES[name].usable else not right


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_thousand_conversations_of_a_family(tmp_path: Path, name: str) -> None:
    right, _ = judged(tmp_path, name, 1000, seed=0)
    assert right > 650 if FAMILIES[name].usable else not right
