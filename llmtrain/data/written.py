"""Whether a chat template has written what the messages say: what it leaves out would be lost in silence."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmtrain.data.messages import Conversation, RefusedError, name_of

SPLIT = "\U000f0002"
"""A private-use character within a control token's text in a message: the two halves are encoded apart, as text."""
_FIRST, _LAST = 0xF1000, 0xFFFFD
_MARKS = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


@dataclass(frozen=True, slots=True)
class _Text:
    """What must be found. Text i of a conversation is marked by character `_FIRST` + i, if it is `marked`."""

    place: int
    key: str
    text: str
    marked: bool


def check_written(
    given: Conversation, turn: int, prompt: str, whole: str, render: Callable[[list[dict[str, Any]]], str]
) -> None:
    """The answer `turn` holds the texts of its message, and the prompt before it those of what others have said.

    "no" is in many texts, so each is looked for a second time with a mark in it. A template that asks what a text holds
    may write a marked one otherwise; then what has been found by its text must do.

    Args:
        whole: the prompt and what the template writes after it.
        render: what the template writes of as many other messages; "" where it fails.

    Raises:
        RefusedError
    """
    texts: list[_Text] = []
    messages = []
    for place, message in enumerate(given.messages[: turn + 1]):
        keys = ("content", "reasoning_content") if place == turn else ("content",) * (message["role"] != "assistant")
        marked = message | {key: _marked(message[key], texts, place, key) for key in keys if key in message}
        if place == turn and "tool_calls" in message:
            marked["tool_calls"] = [_marked_call(call, texts, place) for call in message["tool_calls"]]
        messages.append(marked)
    before, answer = dense(prompt), dense(whole[len(prompt) :])
    for text in texts:
        written = answer if text.place == turn else before
        if dense(text.text) not in written and dense(json.dumps(text.text, ensure_ascii=False)[1:-1]) not in written:
            raise _left_out(text, given, turn)
    for tool in given.tools or ():
        if dense(name_of(tool)) not in before:
            raise RefusedError(f"the template leaves out the tools: {plain(name_of(tool))!r}")
    found: dict[int, list[int]] = defaultdict(list)
    rendered = render(messages)
    for number, mark in enumerate(_MARKS.finditer(rendered)):
        found[ord(mark[0]) - _FIRST].append(mark.start() - number)
    if _MARKS.sub("", rendered) != whole:
        return
    for number, text in enumerate(texts):
        if text.marked and not any((at > len(prompt)) == (text.place == turn) for at in found[number]):
            raise _left_out(text, given, turn)


def check_generation(whole: str, spans: list[tuple[int, int]], bounds: tuple[int, int, int], turn: int) -> None:
    """What `{% generation %}` encloses of the last answer, but for white space, is what generation gives.

    `bounds`: where in `whole` the turn's header begins, which SmolLM3 encloses, too; the answer; and its end.
    """
    header, begin, end = bounds
    at = begin
    for first, last in (span for span in spans if span[1] > begin):
        if first < header or whole[at:first].strip():
            break
        at = max(at, last)
    if whole[at:end].strip():
        raise RefusedError(
            f"message {turn}: the template's generation tag and its generation prompt do not agree: an answer is "
            f"{plain(whole[begin:end])!r:.80}, and the tag leaves out {plain(whole[at:end])!r:.40} or takes more"
        )


def dense(text: str) -> str:
    """Without white space, which templates trim and add."""
    return "".join(text.split())


def plain(text: str) -> str:
    """As the record has it."""
    return text.replace(SPLIT, "")


def _left_out(text: _Text, given: Conversation, turn: int) -> RefusedError:
    if text.place == turn:
        return RefusedError(f"message {turn}: the template leaves out its {text.key}: {plain(text.text)!r:.60}")
    return RefusedError(f"message {text.place} ({given.messages[text.place]['role']}): the template leaves it out")


def _marked_call(call: dict[str, Any], texts: list[_Text], place: int) -> dict[str, Any]:
    return call | {"function": {k: _marked(v, texts, place, "tool_calls") for k, v in call["function"].items()}}


def _marked(value: Any, texts: list[_Text], place: int, key: str) -> Any:
    """`value` with a mark in each of its strings, which are appended to `texts`; keys of objects are strings, too."""
    if isinstance(value, dict):
        return {_marked(name, texts, place, key): _marked(part, texts, place, key) for name, part in value.items()}
    if isinstance(value, list):
        return [_marked(part, texts, place, key) for part in value]
    mark = _FIRST + len(texts)
    if not isinstance(value, str):
        texts.append(_Text(place, key, json.dumps(value), marked=False))
        return value
    words = value.lstrip()
    texts.append(_Text(place, key, value, marked=bool(words) and mark <= _LAST))
    if not texts[-1].marked:
        return value
    at = len(value) - len(words) + 1  # not at an edge, which a template may trim or look at
    return value[:at] + chr(mark) + value[at:]
