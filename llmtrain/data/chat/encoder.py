"""Encodes conversations as token ids with a counted bit for each, and proves that a server will see the same ids.

transformers renders (rendering.py). A row is a server's input and output: the ids of the rendered prompt (with its
generation prompt), then the answer up to the token where generation stops. While the next prompt begins with the row,
the row continues; a template that changes earlier turns (Qwen3 drops thoughts) gives one row per answer.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.files import replace_file
from llmtrain.base.untrusted import first_line
from llmtrain.data.chat.conversation import Conversation, record_of
from llmtrain.data.chat.rendering import BoundsError, Rendered, RenderError, Template, Wanted
from llmtrain.data.chat.template_proof import SPLIT, Marked, check_generation, plain
from llmtrain.data.manifest import SAMPLE
from llmtrain.data.row import RefusedError, Row, RowOptions
from llmtrain.data.tokenize import as_ids
from llmtrain.data.tokenizer_folder import refuse_unsafe

_BEYOND_BOUNDS = 3
"""Number of renderings beyond the bounds after which the template is given up."""


@dataclass
class _Growing:
    """A row to which turns are added. `text` is the text of `ids` with marks, and ends with the stop token `end`."""

    text: str
    ids: list[int]
    counted: list[bool]
    end: str
    joins: bool = False
    """True if `text` encoded as one has other ids, because the answer's beginning merges with the prompt's end."""


class ChatEncoder:
    """Encodes conversations as rows, for one worker. Raises DataError if renderings take too much time or memory again
    and again."""

    def __init__(self, folder: Path, options: RowOptions) -> None:
        """Raises DataError when transformers cannot load the tokenizer or does not know a stop token."""
        from transformers import AutoTokenizer

        refuse_unsafe(folder)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self._backend = self._tokenizer.backend_tokenizer
        except Exception as error:  # OSError, ValueError, TypeError: a folder's files can cause any
            raise DataError(f"{folder}: transformers cannot load this tokenizer ({first_line(error, 200)})") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._options = options
        self._template = Template(self._tokenizer, moment=options.moment, variables=options.variables)
        self._beyond_bounds = 0
        self._stops = {token: self._backend.token_to_id(token) for token in options.stop_tokens}
        if missing := [token for token, number in self._stops.items() if number is None]:
            raise DataError(f"--stop-token {missing[0]!r}: is no token of {folder}")
        added = self._tokenizer.added_tokens_decoder.values()
        self._apart = {token.content for token in added}
        self._added = re.compile(f"({_any_of(self._apart).pattern})")
        special = {token.content for token in added if token.special} | set(self._stops)
        named = str(self._tokenizer.chat_template)
        written = {token.content for token in added if token.content in named and not token.content.isspace()}
        # An answer may hold its template's markup (<think>, <tool_call>), but no special token.
        self._control = {True: _any_of(special), False: _any_of(special | written)}
        self._bos = self._tokenizer.bos_token_id
        one = self._ids("x")
        # For tokenizers that put a space before a text: a continuation is encoded after this text and does not merge.
        before = () if self._backend.decode(one + one) == "xx" else ("\n", "\0", "\t")
        self._breaks = [(text, self._ids(text)) for text in before]
        self._check_variables(folder)
        self.unread: set[str] = set()
        """Fields with text that was not used, of the records so far."""
        self.too_long = 0
        """Number of rows so far that were cut or split."""
        self.vocab_size = max(max(self._backend.get_vocab(with_added_tokens=True).values()) + 1, len(self._tokenizer))

    def _check_variables(self, folder: Path) -> None:
        """Check that the template reads every name of --chat-template-kwargs.

        Raises DataError: it does not read one, or it cannot be rendered.
        """
        if not self._options.variables:
            return
        try:
            read = self._template.read(None) | self._template.read([])
        except RenderError as error:
            raise DataError(f"{folder}: its chat template fails: {error}") from error
        if lacking := sorted(self._options.variables.keys() - read):
            known = ", ".join(sorted(read - {"messages", "tools", "add_generation_prompt"})) or "none"
            raise DataError(
                f"--chat-template-kwargs {lacking[0]}: the template of {folder} reads no such name; it reads {known}"
            )

    @property
    def dated(self) -> bool:
        return self._template.dated

    def record(self, text: str) -> dict[str, Any]:
        """Parse a record, a JSON object. Raises RefusedError."""
        if SPLIT in text:
            raise RefusedError(f"it holds the private-use character U+{ord(SPLIT):X}")
        return record_of(text)

    def row_of(self, given: Conversation, name: str) -> Row:
        """Return the row of an answer, of any length. `name`: the answer's name for messages. Raises RefusedError."""
        rows = self._encoded(given)
        if len(rows) > 1:
            raise RefusedError(
                f"{name} would be {len(rows)} rows: the template changes earlier answers, so only the last message of "
                "the assistant can be learnt"
            )
        return self._row(rows[0])

    def rows_of(self, given: Conversation) -> list[Row]:
        """Return the rows of a conversation; `max_tokens` and `too_long` decide on long ones. Raises RefusedError."""
        return [part for row in self._encoded(given) for part in self._sized(self._row(row))]

    def _as_texts(self, given: Conversation) -> Conversation:
        """Fit the conversation to the template, and mark control tokens that its texts spell. Raises RefusedError."""
        self.unread |= given.unread
        if given.variables and (lacking := sorted(given.variables.keys() - self._read(given))):
            raise RefusedError(f"the record sets {lacking[0]!r} for the template, which does not read it")
        try:
            given = self._template.fitted(given)
        except RenderError as error:
            raise self._failed(error) from error
        messages = [
            {
                key: part if key == "role" else self._as_text(part, answer=message["role"] == "assistant")
                for key, part in message.items()
            }
            for message in given.messages
        ]
        tools = None if given.tools is None else [self._as_text(tool, answer=False) for tool in given.tools]
        return replace(given, messages=messages, tools=tools, variables=self._as_text(given.variables, answer=False))

    def _read(self, given: Conversation) -> frozenset[str]:
        try:
            return self._template.read(given.tools)
        except RenderError as error:
            raise self._failed(error) from error

    def prompt_of(self, given: Conversation) -> list[Row]:
        """Return the row of a prompt without an answer. Raises RefusedError."""
        given = self._as_texts(given)
        until = len(given.messages)
        marked = Marked(given, until, self._source(given))
        text, other = self._render_all([Wanted(given, until, True), Wanted(marked.conversation, until, True)])
        written = self._text_of(text)
        marked.check(written, written, self._text_or_none(other), str, lambda _: [])
        ids = self._encode(written)
        self._check_text(ids, written, self._loose, until)
        return self._sized(self._row(_Growing(text=written, ids=ids, counted=[False] * len(ids), end="")))

    def _encoded(self, given: Conversation) -> list[_Growing]:
        if self._options.count == "last":
            given = replace(given, turns=given.turns[-1:])
        defused = self._as_texts(given)
        rows: list[_Growing] = []
        # All in one request: each costs a change of processes.
        source, wanted, marks = self._source(defused), list[Wanted](), list[Marked]()
        for turn in given.turns:
            marks.append(Marked(defused, turn, source))
            wanted += [Wanted(defused, turn, True), Wanted(defused, turn + 1, False)]
            wanted.append(Wanted(marks[-1].conversation, turn + 1, False))
        found = self._render_all(wanted if given.turns[0] else [])
        for number, turn in enumerate(given.turns):
            self._add_turn(rows, defused, turn, marks[number], found[3 * number : 3 * number + 3])
        return rows

    # Text

    def _as_text(self, value: Any, *, answer: bool) -> Any:
        if isinstance(value, dict):
            return {self._as_text(k, answer=answer): self._as_text(v, answer=answer) for k, v in value.items()}
        if isinstance(value, list):
            return [self._as_text(part, answer=answer) for part in value]
        if not isinstance(value, str):
            return value
        parts, at = [], 0
        while found := self._control[answer].search(value, at):  # another token may overlap one
            if len(found[0]) == 1:
                raise RefusedError(f"it holds the control token {found[0]!r}, which cannot be written as text")
            parts.append(value[at : found.start() + 1])
            at = found.start() + 1
        return SPLIT.join([*parts, value[at:]])

    def _source(self, given: Conversation) -> str:
        try:
            return self._template.source(given.tools)
        except RenderError as error:
            raise self._failed(error) from error

    def _render_all(self, wanted: list[Wanted]) -> list[Rendered | RenderError]:
        """Render the wanted messages. Raises DataError: too many renderings so far were beyond the bounds."""
        found = self._template.render(wanted)
        if beyond := [each for each in found if isinstance(each, BoundsError)]:
            self._beyond_bounds += 1
            if self._beyond_bounds == _BEYOND_BOUNDS:
                raise DataError(
                    f"the chat template was given up after {_BEYOND_BOUNDS} records: {beyond[0]}. No model's template "
                    "needs that: use the one of another revision, or --chat-template FILE"
                )
        return found

    def _text_of(self, found: Rendered | RenderError) -> str:
        """Return the rendered text. Raises RefusedError: the rendering failed."""
        if isinstance(found, RenderError):
            raise self._failed(found)
        return found.text

    def _text_or_none(self, found: Rendered | RenderError) -> str:
        return found.text if isinstance(found, Rendered) else ""

    def _failed(self, error: RenderError) -> RefusedError:
        return RefusedError(f"the chat template fails: {error}")

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _on(self, text: str) -> list[int]:
        """Encode text that does not start a line."""
        for before, known in self._breaks:
            ids = self._ids(before + text)
            if ids[: len(known)] == known:
                return ids[len(known) :]
        return self._ids(text)

    def _encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        ids: list[int] = []
        for part in filter(None, text.split(SPLIT)):
            ids += self._on(part) if goes_on else self._ids(part)
            goes_on = True
        return ids

    def _encode_after(self, row: _Growing | None, text: str) -> list[int]:
        """Encode `text`, which begins with the row's text; what follows a control token is encoded separately."""
        if row is not None and row.end in self._apart:
            stop, *more = self._encode(row.end + text[len(row.text) :])
            if stop == row.ids[-1]:
                return row.ids + more
        return self._encode(text)

    # Turns

    def _add_turn(
        self,
        rows: list[_Growing],
        given: Conversation,
        turn: int,
        marked: Marked,
        rendered: list[Rendered | RenderError],
    ) -> None:
        """Append the answer at message `turn` to the last row, or a new row that ends with it.

        `rendered`: the prompt; the messages up to the answer; the `marked` messages.
        """
        if turn == 0:
            raise RefusedError("message 0 is the assistant's: nothing asks for it")
        after = turn + 1
        first, second, other = rendered
        prompt, whole = self._text_of(first), self._text_of(second)
        assert isinstance(second, Rendered)
        if not whole.startswith(prompt):
            wrong = f"message {turn}: the template does not write the answer where its generation prompt ends: "
            wrong += _differs(whole, prompt)
            # Some of the template's variables may change the prompt (Qwen3.5: enable_thinking).
            if names := sorted(name for name in self._read(given) if "think" in name or "reason" in name):
                wrong += f"; chat_template_kwargs may change the prompt: the template reads {', '.join(names)}"
            raise RefusedError(wrong)
        rest = whole[len(prompt) :]
        if not any(token in rest for token in self._stops):
            rest += self._stop_after(given, turn)
        answer, end = self._answer(rest, turn)
        text = prompt + answer
        header = functools.cache(lambda: self._text_of(self._render_all([Wanted(given, turn, False)])[0]))
        if second.spans is not None:
            begins = len(header()) if prompt.startswith(header()) else len(prompt)
            check_generation(whole, second.spans, (begins, len(prompt), len(text)), turn)

        def render(others: list[Conversation]) -> list[str]:
            return list(map(self._text_or_none, self._render_all([Wanted(each, after, False) for each in others])))

        marked.check(prompt, whole, self._text_or_none(other), header, render)
        row = rows[-1] if rows and not rows[-1].joins and prompt.startswith(rows[-1].text) else None
        before = self._encode_after(row, prompt)
        if row is not None and before[: len(row.ids)] != row.ids:
            row = None
        ids = self._encode_after(row, text)
        joins = ids[: len(before)] != before
        if joins:  # generation begins after the ids of the prompt
            ids = before + self._encode(answer, goes_on=True)
        known = row or _Growing(text="", ids=[], counted=[], end=end)
        self._check_ids(ids[len(known.ids) :], text[len(known.text) :], ids[len(before) :], answer, turn)
        if row is None:
            shared = _shared(rows[-1].ids, before) if rows else 0
            row = _Growing(text="", ids=[], counted=[False] * shared, end=end)
            rows.append(row)
        every = self._options.count == "all"
        row.counted += [every] * (len(before) - len(row.counted)) + [True] * (len(ids) - len(before))
        row.text, row.ids, row.end, row.joins = text, ids, end, joins

    def _answer(self, rest: str, turn: int) -> tuple[str, str]:
        """Return the answer with its stop token, and the stop token, from the text after the prompt."""
        found = sorted((place, -len(token), token) for token in self._stops if (place := rest.find(token)) >= 0)
        if not found:
            raise RefusedError(
                f"message {turn}: generation would not stop at its end: {plain(rest)[-40:]!r} has none of the stop "
                f"tokens {', '.join(self._stops)}; name its own with --stop-token"
            )
        place, _, token = found[0]
        end = place + len(token)
        after = self._control[True].sub("", rest[end:])
        if after.strip():
            raise RefusedError(
                f"message {turn}: text continues after {token}, where generation stops: {plain(after)[:40]!r}"
            )
        return rest[:end], token

    def _stop_after(self, given: Conversation, turn: int) -> str:
        """Return the token with which the template begins the next message, if it is a stop token (GLM-4); else "".

        A next message may remove the answer's thoughts (GLM-4.5), so the answer is also rendered without thoughts.
        """
        message = given.messages[turn]

        def content_of(text: str) -> Any:
            return [{"type": "text", "text": text}] if isinstance(message["content"], list) else text

        calls = {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
        after = [
            *given.messages[turn + 1 : turn + 2],
            {"role": "tool" if calls else "user", "content": content_of("x")},
        ][:1]
        thoughtless = [
            {"role": "user", "content": content_of("x")},
            {"role": "assistant", "content": content_of("" if calls else "x"), **calls},
        ]
        for until in (given.messages[: turn + 1], thoughtless):
            ends, goes_on = replace(given, messages=until), replace(given, messages=[*until, *after])
            found = self._render_all([Wanted(ends, len(until), False), Wanted(goes_on, len(until) + 1, False)])
            written, more = map(self._text_or_none, found)
            if written and more.startswith(written):
                next_text = more[len(written) :]
                return max((token for token in self._stops if next_text.startswith(token)), key=len, default="")
        return ""

    def _check_ids(self, new: list[int], text: str, counted: list[int], answer: str, turn: int) -> None:
        """Check that new ids decode to the new text, and counted ids to the answer with its stop token."""
        if not counted or counted[-1] not in self._stops.values():
            raise RefusedError(f"message {turn}: {plain(answer)[-20:]!r} does not end with a stop token")
        # Some control tokens absorb adjacent white space (Phi-3), and no id shows it.
        self._check_text(new, text, self._loose, turn)
        self._check_text(counted, answer, str.strip, turn)

    def _check_text(self, ids: list[int], text: str, form: Callable[[str], str], turn: int) -> None:
        found = self._backend.decode(ids, skip_special_tokens=False)
        if _composed(form(found)) != _composed(form(plain(text))):
            raise RefusedError(f"message {turn}: the tokenizer changes the text: {_differs(found, text)}")

    def _loose(self, text: str) -> str:
        """Return the text without white space next to control tokens, and with one space for other white space."""
        return "\n".join(" ".join(part.split()) for part in self._added.split(text))

    def _row(self, row: _Growing) -> Row:
        ids, counted = as_ids(row.ids, self.vocab_size), np.array(row.counted, dtype=bool)
        counted[0] = False  # no token predicts it
        if self._bos is not None and self._bos not in self._stops.values():
            places = np.flatnonzero(ids == self._bos)
            # Llama 2 begins again after each answer.
            if any(at and ids[at - 1] not in self._stops.values() for at in places.tolist()):
                raise RefusedError(f"the text begins more than once: {self._tokenizer.bos_token} at {places.tolist()}")
        return Row(ids, counted)

    def _sized(self, row: Row) -> list[Row]:
        """Return the row, or parts of it if it is too long."""
        ids, counted, limit, how = row.ids, row.counted, self._options.max_tokens, self._options.too_long
        if limit is None or len(ids) <= limit:
            return [row]
        if how == "reject":
            more = "" if self._options.complete else "; --too-long cut or split takes it"
            raise RefusedError(f"it has {len(ids)} tokens, --max-tokens is {limit}{more}")
        starts = range(0, len(ids), limit) if how == "split" else [0]
        parts = [Row(ids[at : at + limit], counted[at : at + limit], whole=False) for at in starts]
        for part in parts:
            part.counted[0] = False
        parts = [part for part in parts if part.counted.any()]
        if not parts:
            raise RefusedError(f"it has {len(ids)} tokens, and no answer within --max-tokens {limit}")
        self.too_long += 1
        return parts


# --- proofs ---------------------------------------------------------------------------------------


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _composed(text: str) -> str:
    """Return the NFKC form of a text, because a tokenizer's normalization does not count as a difference."""
    return unicodedata.normalize("NFKC", text)


def _shared(first: list[int], second: list[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _differs(found: str, wanted: str) -> str:
    found, wanted = plain(found), plain(wanted)
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    return f"{found[max(0, at - 10) : at + 20]!r} where {wanted[max(0, at - 10) : at + 20]!r} was expected"


NAME = SAMPLE
"""File in the prepared folder with one object a line: `record` (JSON), `row` (number of its first row), `rows`."""
CONVERSATIONS = 100
"""Largest number of kept conversations."""
_LONGEST = 16 << 10
"""Largest number of characters in a kept record."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A record and where its rows are in the train split."""

    record: str
    row: int
    rows: int


def kept(text: str, rows: list[Row], first: int) -> Kept | None:
    """Return the entry for a record whose rows begin at number `first`; None if the record or a row is too long."""
    if len(text) > _LONGEST or not all(row.whole for row in rows):
        return None
    return Kept(text, first, len(rows))


def write_sample(folder: Path, samples: list[list[Kept]], rows: list[int]) -> None:
    """Write the file of kept records. `samples`, `rows`: kept records and number of rows of each training shard."""
    found = [
        replace(entry, row=entry.row + before)
        for sample, before in zip(samples, accumulate(rows, initial=0), strict=False)
        for entry in sample
    ]
    lines = (json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in found[:CONVERSATIONS])
    replace_file(folder / NAME, "".join(lines).encode())


def read_sample(folder: Path) -> Iterator[Kept]:
    """Read the kept records from the file of `write_sample`. Raises DataError: it is malformed."""
    path = folder / NAME
    try:
        for line in path.read_text().splitlines():
            entry = untrusted.loads(line)
            if not (isinstance(entry["record"], str) and type(entry["row"]) is int and type(entry["rows"]) is int):
                raise ValueError("record, row and rows are not a text and two numbers")
            yield Kept(entry["record"], entry["row"], entry["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error!r}); delete {folder} and prepare it again") from error
