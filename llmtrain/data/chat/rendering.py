"""Renders foreign chat templates with transformers in a separate process with bounds on time, memory and output.

A template is a program: nested loops, huge products and formats can hang it, or take 10 GB. Each process that renders
has one such child process. A rendering that exceeds its bounds ends the child, and the next rendering starts another.
The clock that templates read (`strftime_now`) shows the time of the data's preparation, so that a run that crosses
midnight and an export days later render the prompts that were trained on.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import resource
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.child import Child, Parent, of_module
from llmtrain.data.chat.conversation import Conversation

CPU_SECONDS = 10
"""Limit of processor time for one rendering. Real templates take about a millisecond."""
MEMORY_MIB = 1024
"""Memory limit of the rendering process, beyond its memory before it renders."""
CHARACTERS = 64 << 20
"""Length limit of one rendering."""
_WAIT_SECONDS = 120
"""Wall-clock limit of an answer, for a busy machine."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderError(ValueError):
    """A template failed to render. Control characters are escaped in the message."""


class BoundsError(RenderError):
    """A rendering exceeded a bound."""


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    spans: list[tuple[int, int]] | None
    """Character ranges that `{% generation %}` encloses; None: they were not asked for, or there are none."""
    dated: bool
    """True if the template has read the clock."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A rendering to make: of the first `until` messages, with or without the generation prompt."""

    given: Conversation
    until: int
    prompt: bool


class Template:
    """A tokenizer's chat template, as a server renders it on the day of the preparation."""

    def __init__(
        self, tokenizer: Any, *, moment: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Args:
        moment: time that the template's clock shows, ISO 8601 in local time; None: the present.
        variables: chat_template_kwargs of all conversations; those of a conversation override them.
        """
        self._tokenizer, self._moment, self._variables = tokenizer, moment, dict(variables or {})
        self._read: dict[str, frozenset[str]] = {}
        self._parts: dict[str, bool] = {}
        self.dated = False
        """True if a rendering so far has read the clock."""

    def source(self, tools: list[dict[str, Any]] | None) -> str:
        """Return the template's text for a conversation with these tools. Raises RenderError: there is no template."""
        try:
            return str(self._tokenizer.get_chat_template(tools=tools))
        except ValueError as error:
            raise RenderError(untrusted.first_line(error, 200)) from error

    def read(self, tools: list[dict[str, Any]] | None) -> frozenset[str]:
        """Return the names of the variables that the template reads. Raises RenderError: it cannot be parsed."""
        source = self.source(tools)
        if source not in self._read:
            (found,) = _PROCESS.ask([{"read": source}])
            if isinstance(found, RenderError):
                raise found
            self._read[source] = frozenset(found["read"])
        return self._read[source]

    def render(self, wanted: Sequence[Wanted]) -> list[Rendered | RenderError]:
        found: list[Rendered | RenderError] = []
        for answer in _PROCESS.ask([self._request(each) for each in wanted]):
            if isinstance(answer, RenderError):
                found.append(answer)
                continue
            spans = answer["spans"]
            found.append(Rendered(answer["text"], spans and [(a, b) for a, b in spans], answer["dated"]))
            self.dated |= answer["dated"]
        return found

    def text(self, given: Conversation, until: int, *, prompt: bool) -> str:
        (found,) = self.render([Wanted(given, until, prompt)])
        if isinstance(found, RenderError):
            raise found
        return found.text

    def ids(self, given: Conversation, until: int, *, prompt: bool) -> list[int]:
        """Return the ids of one rendering, as `apply_chat_template` gives them. Raises RenderError."""
        text = self.text(given, until, prompt=prompt)
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def fitted(self, given: Conversation) -> Conversation:
        """Return the conversation with contents and call arguments in the template's form.

        Contents are texts, or lists of parts if the template renders nothing else (models with vision). Arguments are
        objects, or JSON texts as in OpenAI's format if the template fails on objects (DeepSeek V3) or would write them
        in Python's notation. Raises RenderError: there is no template.
        """
        if self._takes_parts(given.tools):
            given = given.with_parts()
        calls = [call["function"]["arguments"] for message in given.messages for call in message.get("tool_calls", ())]
        if not calls:
            return given
        until = 1 + max(place for place, message in enumerate(given.messages) if "tool_calls" in message)
        texts = given.with_argument_texts()
        objects, strings = self.render([Wanted(each, until, False) for each in (given, texts)])
        python = isinstance(objects, Rendered) and any(value and repr(value) in objects.text for value in calls)
        return given if isinstance(strings, RenderError) or (isinstance(objects, Rendered) and not python) else texts

    def _takes_parts(self, tools: list[dict[str, Any]] | None) -> bool:
        source = self.source(tools)
        if source not in self._parts:
            word = "probe"
            asked = Conversation(messages=[{"role": "user", "content": word}], tools=tools, turns=[])
            found = self.render([Wanted(each, 1, False) for each in (asked, asked.with_parts())])
            text, parts = (isinstance(each, Rendered) and word in each.text for each in found)
            self._parts[source] = parts and not text
        return self._parts[source]

    def _request(self, wanted: Wanted) -> dict[str, Any]:
        given = wanted.given
        try:
            source = self.source(given.tools)
        except RenderError as error:
            return {"error": str(error)}
        return {
            "template": source,
            "messages": given.messages[: wanted.until],
            "tools": given.tools,
            "prompt": wanted.prompt,
            "spans": not wanted.prompt and _GENERATION.search(source) is not None,
            "variables": {**self._tokenizer.special_tokens_map, **self._variables, **given.variables},
            "moment": self._moment,
        }


# --- the process, from outside --------------------------------------------------------------------


class _Process:
    """The child process that renders; the first request starts it."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._owner = 0
        self._known: dict[str, int] = {}
        self._lock = threading.Lock()

    def ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any] | RenderError]:
        """Render the requests. After one that exceeds the bounds, all later requests get its error."""
        found: list[dict[str, Any] | RenderError] = []
        with self._lock:
            try:
                child = self._started()
                child.send(self._message(requests))
                for answer in _answers(child, len(requests)):
                    if "bounds" in answer:
                        raise BoundsError(answer["bounds"])
                    found.append(RenderError(answer["error"]) if "error" in answer else answer)
            except BoundsError as error:
                self._end()
                found += [error] * (len(requests) - len(found))
            except BaseException:  # Ctrl-C: nobody would read later answers
                self._end()
                raise
        return found

    def _started(self) -> Child:
        if self._child is None or self._owner != os.getpid() or self._child.code is not None:
            self._known.clear()
            self._owner = os.getpid()
            bounds = [str(bound) for bound in (CPU_SECONDS, MEMORY_MIB, CHARACTERS)]
            self._child = Child(of_module("llmtrain.data.chat.rendering", *bounds))
        return self._child

    def _message(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Return all requests as one message. The child reads it whole before its first answer; otherwise both
        processes could wait for each other to read. Each template's text is sent once."""
        before, numbered = len(self._known), list[dict[str, Any]]()
        for request in requests:
            sources = {key: request[key] for key in ("template", "read") if key in request}
            places: dict[str, Any] = {
                key: self._known.setdefault(text, len(self._known)) for key, text in sources.items()
            }
            numbered.append({**request, **places})
        return {"known": list(self._known)[before:], "requests": numbered}

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.close()

    def close(self) -> None:
        with self._lock:
            self._end()


def _answers(child: Child, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` answers of the child. Raises BoundsError: it is too slow or has died."""
    with selectors.DefaultSelector() as selector:
        selector.register(child, selectors.EVENT_READ)
        while count:
            if not selector.select(_WAIT_SECONDS):
                raise BoundsError(f"it was not rendered within {_WAIT_SECONDS} s")
            answers = child.received()
            yield from answers
            count -= len(answers)
            if count and child.is_closed:
                raise _died(child)


def _died(child: Child) -> BoundsError:
    child.end(_WAIT_SECONDS)
    code = child.code
    assert code is not None
    if code == -signal.SIGXCPU:
        return BoundsError(f"one rendering takes more than {CPU_SECONDS} s of processor time")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return BoundsError(f"the process that rendered it died ({how})")


_PROCESS = _Process()
close = _PROCESS.close
atexit.register(close)


# --- the process, from inside ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bounds:
    cpu_seconds: int
    memory_mib: int
    characters: int


def _answer(bounds: _Bounds, utils: Any, clock: Any, known: list[str], request: dict[str, Any]) -> dict[str, Any]:
    if "error" in request:
        return request
    if "read" in request:
        from jinja2 import meta

        # _compile_jinja_template: private; in transformers 5.17 to 5.23, cached by text.
        parsed = utils._compile_jinja_template(known[request["read"]]).environment.parse(known[request["read"]])
        return {"read": sorted(meta.find_undeclared_variables(parsed))}
    clock.set(request["moment"])
    texts, spans = utils.render_jinja_template(
        conversations=[request["messages"]],
        tools=request["tools"],
        chat_template=known[request["template"]],
        add_generation_prompt=request["prompt"],
        return_assistant_tokens_mask=request["spans"],
        **request["variables"],
    )
    if len(texts[0]) > bounds.characters:
        return {"bounds": f"one rendering has {len(texts[0])} characters, more than {bounds.characters}"}
    return {"text": texts[0], "spans": spans[0] if request["spans"] else None, "dated": clock.asked}


def _main() -> None:
    import datetime

    bounds = _Bounds(*map(int, sys.argv[1:]))
    parent = Parent()  # it does not listen: a thread would share the bounds
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    from transformers.utils import chat_template_utils as utils

    class Clock(datetime.datetime):
        moment: datetime.datetime | None = None
        asked = False

        @classmethod
        def set(cls, moment: str | None) -> None:
            cls.asked = False
            cls.moment = None if moment is None else datetime.datetime.fromisoformat(moment)

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            cls.asked = True
            return cls.moment or datetime.datetime.now(tz)

    vars(utils)["datetime"] = Clock  # `strftime_now` looks it up at each call (transformers 5.17 to 5.23)
    known: list[str] = []
    # Bounded: memory beyond that of the imports, and no core dump.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = pages * resource.getpagesize() + (bounds.memory_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        known += asked["known"]
        for request in asked["requests"]:
            # The kernel ends this process after `cpu_seconds` more of processor time.
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            soft = math.ceil(time.process_time()) + bounds.cpu_seconds
            soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
            try:
                answer = _answer(bounds, utils, Clock, known, request)
            except MemoryError:
                answer = {"bounds": f"one rendering takes more than {bounds.memory_mib} MiB of memory"}
            except Exception as error:  # the template is foreign code
                answer = {"error": untrusted.first_line(error, 200)}
            parent.tell(answer)


if __name__ == "__main__":
    _main()
