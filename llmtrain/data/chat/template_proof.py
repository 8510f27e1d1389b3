"""Check that a chat template renders every text of the messages, because an omitted text would be lost silently.

A template may write a text trimmed, as JSON, in Python's notation or escaped. Each text must be in the prompt that a
server would render, or in the answer that the model must generate.
"""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmtrain.data.chat.conversation import THOUGHTS, Conversation, name_of, strings
from llmtrain.data.row import RefusedError

SPLIT = "\U000f0002"
"""A private-use character that is put into a control token spelled in a message, so that it is encoded as text."""
_FIRST, _LAST = 0xF1000, 0xFFFFD
_MARKS = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
_MARKUP = re.compile(r"</?[^\s<>]{1,40}>|\[/?[^\s\[\]]{1,40}\]|/[a-z_]{3,20}\b")
_Literal = bool | int | float | None


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A text of a message, or a literal of a tool call's arguments, that the rendering must contain."""

    place: int
    key: str
    text: str
    pieces: tuple[tuple[str, int | None], ...]
    """Parts of the text between markup that the template also reads (`</think>`), each with its mark."""
    literal: tuple[_Literal] | None = None


class Marked:
    """A conversation with a unique mark in each of its texts, up to the answer `turn`.

    A short text such as "no" is found in many places, so each text is searched a second time with a mark in it. If the
    template writes a marked text differently, the first search alone decides.
    """

    def __init__(self, given: Conversation, turn: int, source: str) -> None:
        """`source`: the template's text; a message may contain markup of it."""
        self._given, self._turn, self._source = given, turn, source
        self._leaves: list[_Leaf] = []
        self._marks = _FIRST
        messages = []
        for place, message in enumerate(given.messages[: turn + 1]):
            marked = dict(message)
            if place == turn and THOUGHTS[0] in message:
                thoughts = self._mark(message[THOUGHTS[0]], place, "thoughts")
                marked |= dict.fromkeys((key for key in THOUGHTS if key in message), thoughts)
            answered = message["role"] == "assistant" and place < turn
            if not answered:
                marked["content"] = self._mark_content(message["content"], place)
            elif place not in given.turns:  # not trained on: it is in the prompt, but not its thoughts
                marked["content"] = self._mark_content(message["content"], place, after="</think>")
            if "tool_calls" in message and (place == turn or place not in given.turns):
                marked["tool_calls"] = [self._mark_call(call, place) for call in message["tool_calls"]]
            messages.append(marked)
        self.conversation = replace(given, messages=messages)

    def check(
        self,
        prompt: str,
        text: str,
        rendered: str,
        header: Callable[[], str],
        render: Callable[[list[Conversation]], list[str]],
    ) -> None:
        """Check that the answer has its message's texts, and the prompt those of all other messages.

        Args:
            text: the rendered messages: the prompt and the text after it.
            rendered: the rendering of the marked `conversation`; "" if it fails.
            header: renders the messages before the answer, without a generation prompt.
            render: renders other conversations up to the answer; returns "" for one that fails.

        Raises:
            RefusedError
        """
        before, answer = dense(prompt), dense(text[len(prompt) :])
        wider: str | None = None
        literals = 0
        for leaf in self._leaves:
            here = leaf.place == self._turn
            if leaf.literal is not None:
                within, value = answer if here else before, leaf.literal[0]
                if json.dumps(value) not in within and str(value) not in within:
                    self._check_read(leaf, literals, text, render)
                literals += 1
            elif not _holds(answer if here else before, leaf):
                if here and wider is None:  # a prompt may end with a message's beginning (<think>)
                    found = header()
                    wider = dense(text[len(found) :]) if prompt.startswith(found) else answer
                if wider is None or not here or not _holds(wider, leaf):
                    raise self._left_out(leaf)
        self._check_tools(before)
        found_at: dict[int, list[int]] = defaultdict(list)
        for number, mark in enumerate(_MARKS.finditer(rendered)):
            found_at[ord(mark[0])].append(mark.start() - number)
        if _MARKS.sub("", rendered) != text:
            return
        for leaf in self._leaves:
            here = leaf.place == self._turn
            for _, own in leaf.pieces:
                if own is not None and not any((at > len(prompt)) == here for at in found_at[own]):
                    raise self._left_out(leaf)

    def _check_tools(self, before: str) -> None:
        for tool in self._given.tools or ():
            for text in _texts_of(tool):
                if not any(dense(spelt) in before for spelt in _spellings(text)):
                    name = plain(name_of(tool))
                    what = f"{name!r}" if text == name_of(tool) else f"of {name!r} {plain(text)!r:.60}"
                    raise RefusedError(f"the template leaves out the tools: {what}")
        for document in self._given.variables.get("documents", ()):
            for text in (text for value in document.values() for text in strings(value)):
                if not any(dense(spelt) in before for spelt in _spellings(text)):
                    raise RefusedError(f"the template leaves out of the documents {plain(text)!r:.60}")

    def _check_read(
        self, leaf: _Leaf, number: int, whole: str, render: Callable[[list[Conversation]], list[str]]
    ) -> None:
        """Check that another value at the leaf's place changes the rendered text. Raises RefusedError."""
        left = [number]
        messages = []
        for place, message in enumerate(self._given.messages[: self._turn + 1]):
            if any(each.place == place and each.literal is not None for each in self._leaves):
                message = {**message, "tool_calls": [_with_other_literal(call, left) for call in message["tool_calls"]]}
            messages.append(message)
        (other,) = render([replace(self._given, messages=messages)])
        if other == whole:
            raise self._left_out(leaf)

    def _left_out(self, leaf: _Leaf) -> RefusedError:
        if leaf.place == self._turn:
            return RefusedError(
                f"message {leaf.place}: the template leaves out its {leaf.key}: {plain(leaf.text)!r:.60}"
            )
        role = self._given.messages[leaf.place]["role"]
        return RefusedError(f"message {leaf.place} ({role}): the template leaves it out")

    def _mark_content(self, content: Any, place: int, after: str = "") -> Any:
        """Mark a text or a list of parts. `after`: nothing before this markup is marked, if the template reads it."""
        if isinstance(content, list):
            return [{**part, "text": self._mark_content(part["text"], place, after)} for part in content]
        head, end, answer = content.rpartition(after) if after and after in self._source else ("", "", content)
        return head + end + self._mark(answer, place, "content")

    def _mark_call(self, call: dict[str, Any], place: int) -> dict[str, Any]:
        # Kimi's ids hold the function's name, and its template writes the id alone.
        in_id = str(call["function"]["name"]) in str(call.get("id", ""))
        function = {
            key: self._mark(value, place, "tool_calls", marks=not (in_id and key == "name"))
            for key, value in call["function"].items()
        }
        return call | {"function": function}

    def _mark(self, value: Any, place: int, key: str, *, marks: bool = True) -> Any:
        """Return `value` with a mark in each of its strings and keys, and note these as leaves."""
        if isinstance(value, dict):
            return {self._mark(name, place, key): self._mark(part, place, key) for name, part in value.items()}
        if isinstance(value, list):
            return [self._mark(part, place, key) for part in value]
        if not isinstance(value, str):
            self._leaves.append(_Leaf(place, key, json.dumps(value), (), (value,)))
            return value
        marked, pieces = "", list[tuple[str, int | None]]()
        for text, markup in _pieces(value, self._source):
            words = text.lstrip()
            mark: int | None = None
            if marks and words and self._marks <= _LAST:
                mark = self._marks
                self._marks += 1
                at = len(text) - len(words) + 1  # not at an edge, which a template may trim or look at
                text_marked = text[:at] + chr(mark) + text[at:]
            else:
                text_marked = text
            if words:
                pieces.append((text, mark))
            marked += text_marked + markup
        self._leaves.append(_Leaf(place, key, value, tuple(pieces)))
        return marked


def check_generation(whole: str, spans: list[tuple[int, int]], bounds: tuple[int, int, int], turn: int) -> None:
    """Check that `{% generation %}` encloses the generated text of the last answer, without white space.

    `bounds`: positions in the text of the turn's header (which SmolLM3 encloses too), the answer, and the answer's end.
    """
    header, begin, end = bounds
    at = begin
    for first, last in (span for span in spans if span[1] > begin):
        if first < header or whole[at:first].strip():
            break
        at = max(at, last)
    if whole[at:end].strip():
        raise RefusedError(
            f"message {turn}: the template's tag {{% generation %}} must enclose exactly the answer "
            f"{plain(whole[begin:end])!r:.80}; it begins too early or leaves out {plain(whole[at:end])!r:.40}"
        )


def dense(text: str) -> str:
    """Remove white space, which templates trim and add."""
    return "".join(text.split())


def plain(text: str) -> str:
    return text.replace(SPLIT, "")


def _holds(region: str, leaf: _Leaf) -> bool:
    """Return True if the region has the leaf's text, or all of its pieces between markup that the template reads."""
    if any(dense(spelt) in region for spelt in _spellings(leaf.text)):
        return True
    return bool(leaf.pieces) and all(
        any(dense(spelt) in region for spelt in _spellings(piece)) for piece, _ in leaf.pieces
    )


def _pieces(text: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield (text, markup after it) pieces of a text; markup is what the template contains, too."""
    at = 0
    for found in _MARKUP.finditer(text):
        if found[0] in source:
            yield text[at : found.start()], found[0]
            at = found.end()
    yield text[at:], ""


def _spellings(text: str) -> Iterator[str]:
    """Yield the ways in which templates write a text: unchanged, as JSON (also within JSON), Python, or for XML."""
    yield text
    spelt = json.dumps(text, ensure_ascii=False)[1:-1]
    yield spelt
    yield json.dumps(text)[1:-1]
    yield repr(text)[1:-1]
    yield repr(f'"{text}')[2:-1]  # in single quotes, with any quotes inside
    yield text.replace("'", r"\'")
    yield text.replace('"', r"\"")
    yield json.dumps(spelt, ensure_ascii=False)[1:-1]
    yield html.escape(text)
    yield html.escape(text).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")


def _with_other_literal(value: Any, left: list[int]) -> Any:
    """Return `value` with literal number `left[0]` replaced by another one; `left[0]` counts down."""
    if isinstance(value, dict):
        return {name: _with_other_literal(part, left) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_other_literal(part, left) for part in value]
    if isinstance(value, str):
        return value
    left[0] -= 1
    if left[0] != -1:
        return value
    return (not value) if isinstance(value, bool) else "x" if value is None else value + 1


def _texts_of(schema: Any) -> Iterator[str]:
    """Yield the texts of a tool's schema: names, descriptions and choices, at any depth."""
    if isinstance(schema, list):
        for part in schema:
            yield from _texts_of(part)
    if not isinstance(schema, dict):
        return
    for key, part in schema.items():
        if key in ("name", "description") and isinstance(part, str):
            yield part
        elif key == "enum" and isinstance(part, list):
            yield from (choice for choice in part if isinstance(choice, str))
        elif key == "properties" and isinstance(part, dict):
            yield from part
            yield from _texts_of(list(part.values()))
        else:
            yield from _texts_of(part)
