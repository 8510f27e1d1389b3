"""What the running Python says of itself: functions, methods and topics, each with the first sentence of its text.

Its files are parsed, not imported: to import all of the library opens windows and prints poems. Only modules that the
interpreter has compiled in are imported, since they have no file.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST, LONGEST_TOPIC = 100, 150
"""Characters of a sentence: what is longer is left out, so that a question and its answer fit a short row."""
_SHORTEST = 15
# Folders that are no modules that one would ask about: applications, codecs by the hundred, and what is not library.
_NOT_ASKED = {"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "test",
              "tests", "turtledemo", "distutils"}  # fmt: skip
# Not sys: a process may have put hooks of its own in place of its functions.
_COMPILED_IN = ("builtins", "cmath", "itertools", "math", "time")
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)")


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that the documentation describes."""

    name: str
    """As one would ask for it: `os.path.join` is `posixpath.join`; a topic's is its keyword."""
    says: str
    """The first sentence about it, in ASCII. No two entries say the same."""
    topic: bool = False


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All of this Python's, in the order of their names. What two describe with the same words, neither is in it."""
    found = {entry.name: entry for entry in (*_parsed(), *_compiled_in(), *_topics())}
    same = Counter(entry.says.lower() for entry in found.values())
    return tuple(found[name] for name in sorted(found) if same[found[name].says.lower()] == 1)


def first_sentence(text: str, longest: int = LONGEST) -> str | None:
    """The first sentence of a documentation's text; None where it does not begin with one of a usual length."""
    words = " ".join(text.strip().partition("\n\n")[0].split())
    found = _SENTENCE.match(words)
    sentence = found[1] if found else words
    usual = _SHORTEST <= len(sentence) <= longest and sentence.isascii() and sentence[0].isupper()
    if not usual or sentence.endswith(":") or sentence.startswith("New in version"):
        return None
    return sentence if found else f"{sentence}."


def _parsed() -> Iterator[Entry]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
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
