"""A source: conversations, preferences and multiple choice about the running Python's library.

    llmtrain prepare --plugin examples/lessons.py --source lessons:chat --validation-source lessons:chat/validation

and `--format chat` (or preference, choices). Four families:
    sums       What is 17 + 8?                       the number
    calls      What is 37 * 45?                      a call of the tool `calculate`, then its result
               What is the Unicode name of X?        a call of the tool `unicode_name`, then its result
    functions  What does os.path.join do?            the first sentence of its documentation
    topics     What does Python say about lambda?    the first sentence of its documentation

The library's files are parsed, not imported: importing the complete library opens windows and prints poems. Only
modules that the interpreter has compiled in are imported, since they have no file.

A question is for training or held out by its subject alone: 17 + 8 and 8 + 17 are one subject, and so are all functions
called `join`. So a question that is held out of one source is held out of the others. Multiple choice has only the
held-out functions.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import random
import re
import sys
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmtrain import Source
from llmtrain.data.manifest import Split
from llmtrain.data.prepare.settings import draw

LONGEST, LONGEST_TOPIC = 100, 150
"""Longest sentence, in characters: a question and its answer must fit a short row."""
_SHORTEST = 15
# Folders without modules to ask about: applications, hundreds of codecs, and files outside of the library.
_NOT_ASKED = {
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "turtledemo",
    "distutils",
}
# Not sys: a process may have replaced its functions by hooks.
_COMPILED_IN = ("builtins", "cmath", "itertools", "math", "time")
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)")


@dataclass(frozen=True, slots=True)
class Entry:
    """A function or topic that the documentation describes."""

    name: str
    """Name in a question: `os.path.join` is `posixpath.join`; a topic's is its keyword."""
    says: str
    """Its first sentence, in ASCII. No two entries have the same one."""
    topic: bool = False


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All entries of this Python, sorted by name, without those that share a sentence."""
    found = {entry.name: entry for entry in (*_parsed(), *_compiled_in(), *_topics())}
    same = Counter(entry.says.lower() for entry in found.values())
    return tuple(found[name] for name in sorted(found) if same[found[name].says.lower()] == 1)


def first_sentence(text: str, longest: int = LONGEST) -> str | None:
    """The first sentence of a documentation's text; None if its length or form is unusual."""
    words = " ".join(text.strip().partition("\n\n")[0].split())
    found = _SENTENCE.match(words)
    sentence = found[1] if found else words
    usual = _SHORTEST <= len(sentence) <= longest and sentence.isascii() and sentence[0].isupper()
    if not usual or sentence.endswith(":") or sentence.startswith("New in version"):
        return None
    return sentence if found else f"{sentence}."


def _parsed() -> Iterator[Entry]:
    root = Path(sysconfig.get_paths()["stdlib"])
    asked = (top for top in root.iterdir() if top.name not in _NOT_ASKED)  # site-packages has thousands of files
    for path in sorted(path for top in asked for path in ([top] if top.suffix == ".py" else top.rglob("*.py"))):
        parts = path.relative_to(root).with_suffix("").parts
        if any((part.startswith("_") and part != "__init__") or part in _NOT_ASKED for part in parts):
            continue
        if parts[0].startswith(("config-", "lib-dynload")):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a file that a distribution keeps for another version
            continue
        yield from _of(tree.body, module)


def _of(body: list[ast.stmt], owner: str) -> Iterator[Entry]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _of(node.body, f"{owner}.{node.name}")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            says = first_sentence(ast.get_docstring(node) or "")
            if says:
                yield Entry(f"{owner}.{node.name}", says)


def _compiled_in() -> Iterator[Entry]:
    for module in _COMPILED_IN:
        owner: Any = importlib.import_module(module)
        for name, member in sorted(vars(owner).items()):
            if name.startswith("_"):
                continue
            if inspect.isclass(member) and module == "builtins" and not issubclass(member, BaseException):
                for method, function in sorted(vars(member).items()):
                    if not method.startswith("_") and (says := first_sentence(inspect.getdoc(function) or "")):
                        yield Entry(f"{name}.{method}", says)
            elif inspect.isbuiltin(member) and (says := first_sentence(inspect.getdoc(member) or "")):
                yield Entry(name if module == "builtins" else f"{module}.{name}", says)


def _topics() -> Iterator[Entry]:
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        _, _, after = text.partition("\n\n")  # its title
        if says := first_sentence(after.replace('"', ""), LONGEST_TOPIC):
            yield Entry(name, says, topic=True)


Family = Literal["sums", "calls", "functions", "topics"]

KINDS = ("chat", "preference", "choices")
"""Words after `lessons:`, and the --format of their records; with /validation the held-out part."""
_HELD_OUT = 0.1
_BELOW = 40
"""Upper bound of a sum's numbers."""
_PAIR = 200
"""Characters of two rows with one question: a longer pair would not fit the short sequences of the recipe."""
_CALLS = 1500
"""Calls of each tool."""
_CHOICES = 4


@dataclass(frozen=True, slots=True)
class Lesson:
    family: Family
    subject: str
    """Key of the draw that decides if it is held out."""
    question: str
    answer: str
    tool: str | None = None
    """The tool that is called for the answer."""
    arguments: tuple[tuple[str, str], ...] = ()
    wrong: str | None = None
    """Another lesson's answer."""

    @property
    def split(self) -> Split:
        return "validation" if draw(f"{self.family} {self.subject}".encode()) < _HELD_OUT else "train"

    def messages(self) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = [{"role": "user", "content": self.question}]
        if self.tool is not None:
            call = {"type": "function", "function": {"name": self.tool, "arguments": dict(self.arguments)}}
            asked.append({"role": "assistant", "content": "", "tool_calls": [call]})
            asked.append({"role": "tool", "content": self.answer})
        return [*asked, {"role": "assistant", "content": self.answer}]


def run_tool(name: str, arguments: dict[str, str]) -> str:
    """Run a tool. Raises ValueError for an invalid call."""
    if name == "unicode_name":
        return unicodedata.name(arguments["character"])
    first, times, second = arguments["expression"].split(" ")
    if name != "calculate" or times != "*":
        raise ValueError(f"no tool {name!r} with {arguments!r}")
    return str(int(first) * int(second))


@functools.cache
def lessons(kind: str, split: Split) -> tuple[Lesson, ...]:
    """Lessons of a kind for one split, shuffled; those of preference have a wrong answer."""
    made = [lesson for lesson in (*_sums(), *_calls(), *_documented()) if lesson.split == split]
    if kind == "preference":
        made = [lesson for family in ("functions", "sums") for lesson in _with_wrong(made, family)]
    if kind == "choices":
        made = [lesson for lesson in made if lesson.family == "functions"]
    random.Random(f"stdlib-{kind} {split}").shuffle(made)
    return tuple(made)


def records(kind: str, split: Split) -> Iterator[dict[str, Any]]:
    if kind == "choices":
        yield from _with_choices(lessons(kind, split))
        return
    for lesson in lessons(kind, split):
        if lesson.wrong is None:
            yield {"messages": lesson.messages()}
        else:
            yield {"prompt": lesson.question, "chosen": lesson.answer, "rejected": lesson.wrong}


@dataclass(kw_only=True)
class Lessons(Source, entry="lessons"):
    """Records about the running Python; the held-out ones are a part of their own."""

    def parts(self, words: str) -> list[str]:
        known = [f"{kind}{part}" for kind in KINDS for part in ("", "/validation")]
        if words not in known:
            raise ValueError(f"there is no {words}; take one of {', '.join(known)}")
        return [words]

    def records(self, part: str) -> Iterator[dict[str, Any]]:
        kind, held_out, _ = part.partition("/")
        yield from records(kind, "validation" if held_out else "train")


# --- the families ---------------------------------------------------------------------------------


def _sums() -> Iterator[Lesson]:
    for first in range(_BELOW):
        for second in range(_BELOW):
            subject = f"{min(first, second)} {max(first, second)}"
            yield Lesson("sums", subject, f"What is {first} + {second}?", str(first + second))


def _calls() -> Iterator[Lesson]:
    draws = random.Random("calls")
    numbers = range(10, 100)
    pairs = [(first, second) for first in numbers for second in numbers]
    for first, second in draws.sample(pairs, _CALLS):
        product = f"{first} * {second}"
        subject = f"{min(first, second)} {max(first, second)}"
        arguments = (("expression", product),)
        yield Lesson("calls", subject, f"What is {product}?", str(first * second), "calculate", arguments)
    letters = [chr(code) for code in range(0xA1, min(0x3000, sys.maxunicode)) if _has_short_name(chr(code))]
    for letter in draws.sample(letters, min(_CALLS, len(letters))):
        question = f"What is the Unicode name of {letter}?"
        name = unicodedata.name(letter)
        yield Lesson("calls", letter, question, name, "unicode_name", (("character", letter),))


def _has_short_name(character: str) -> bool:
    plain = unicodedata.category(character)[0] == "L" and unicodedata.normalize("NFKC", character) == character
    return plain and 0 < len(unicodedata.name(character, "")) <= 45


def _documented() -> Iterator[Lesson]:
    for entry in entries():
        if entry.topic:
            yield Lesson("topics", entry.name, f"What does Python say about {entry.name}?", entry.says)
        else:
            # `get` of a class and of its parent have similar descriptions.
            yield Lesson("functions", entry.name.rpartition(".")[2], f"What does {entry.name} do?", entry.says)


def _with_wrong(made: list[Lesson], family: str) -> list[Lesson]:
    those = [lesson for lesson in made if lesson.family == family]
    draws = random.Random(f"wrong {family}")
    answers = sorted({lesson.answer for lesson in those})
    found = []
    for lesson in those:
        wrong = next(answer for answer in draws.sample(answers, 2) if answer != lesson.answer)
        if 2 * len(lesson.question) + len(lesson.answer) + len(wrong) <= _PAIR:
            found.append(replace(lesson, wrong=wrong))
    return found


def _with_choices(asked: tuple[Lesson, ...]) -> Iterator[dict[str, Any]]:
    draws = random.Random("choices")
    answers = sorted({lesson.answer for lesson in asked})
    for lesson in asked:
        wrong = [answer for answer in draws.sample(answers, _CHOICES) if answer != lesson.answer]
        place = draws.randrange(_CHOICES)
        choices = wrong[: _CHOICES - 1]
        yield {
            "question": lesson.question,
            "choices": [*choices[:place], lesson.answer, *choices[place:]],
            "answer": place,
        }
