"""Generator of the reference tables in the docs: the fields, from the dataclasses and their docstrings (which are also
the help text), the keys of DeepSpeed's JSON, and the mixes.

`python -m llmtrain.config.reference docs` rewrites the parts between markers of configuration.md, deepspeed.md,
parallelism.md and posttraining.md.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from llmtrain.config import ds_keys, together, topology
from llmtrain.config.problems import show
from llmtrain.config.run import RunConfig

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def schema() -> dict[str, Any]:
    """Dotted key of every field -> its type."""
    return {key: kind for key, (kind, _, _) in _walk().items()}


@functools.cache
def _walk() -> dict[str, tuple[Any, str, str]]:
    """Dotted key -> (type, default in words, docstring)."""
    found: dict[str, tuple[Any, str, str]] = {}

    def visit(cls: type, prefix: str) -> None:
        hints, docs = get_type_hints(cls), _docstrings(sys.modules[cls.__module__])
        for item in fields(cls):
            kind = hints[item.name]
            if isinstance(kind, type) and is_dataclass(kind):
                visit(kind, f"{prefix}{item.name}.")
            else:
                found[f"{prefix}{item.name}"] = (kind, _default(item), docs[cls.__name__, item.name])

    visit(RunConfig, "")
    return found


@functools.cache
def _docstrings(module: ModuleType) -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal below the field; Python itself throws it away."""
    docs = {}
    for cls in ast.parse(inspect.getsource(module)).body:
        if isinstance(cls, ast.ClassDef):
            for node, after in zip(cls.body, cls.body[1:], strict=False):
                if (
                    isinstance(node, ast.AnnAssign)
                    and isinstance(node.target, ast.Name)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                ):
                    docs[cls.name, node.target.id] = " ".join(str(after.value.value).split())
    return docs


def _default(item: Field[Any]) -> str:
    if item.default is not MISSING:
        return show(item.default)
    return "required" if item.default_factory is MISSING else show(item.default_factory())


def type_name(kind: Any) -> str:
    """A field's type in words: "a whole number or null"."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if kind in names:
        return names[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        return f"a list of {len(args)} numbers"
    if origin is list:
        return "a list of text"
    if origin is dict:
        return "a map"
    return " or ".join(type_name(a) for a in args)


def help_text() -> str:
    """What `--help` prints: every override with type, default and meaning."""
    lines = ["usage: llmtrain train --config RUN.yaml [--SECTION.FIELD VALUE ...]", ""]
    for key, (kind, default, doc) in _walk().items():
        lines += [f"  --{key}  ({type_name(kind)}; default: {default})", f"      {doc}"]
    return "\n".join(lines)


def markdown() -> str:
    """The tables of docs/configuration.md, one per section."""
    lines: list[str] = []
    section = None
    for key, (kind, default, doc) in _walk().items():
        head, _, name = key.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"### `{head}`" if head else "### top level", ""]
            lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        lines.append(f"| `{name}` | {type_name(kind)} | `{default}` | {doc.replace('|', chr(92) + '|')} |")
    return "\n".join(lines).strip() + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": markdown,
    "deepspeed.md": ds_keys.markdown,
    "parallelism.md": topology.markdown,
    "posttraining.md": together.markdown,
}


def write_into(page: Path) -> None:
    """Replace what stands between the markers of the page."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{PAGES[page.name]()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    for name in PAGES:
        write_into(Path(sys.argv[1]) / name)
