"""Options of other stacks, and what each is here: rows.yaml, from which docs/migrate.md has its tables.

`python -m llmtrain.features.migrate.rows docs/migrate.md` writes the tables of the page anew.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).with_name("rows.yaml")
_NAME = re.compile(r"[\w.]+")
_TABLE = re.compile(r"(<!-- options: (.*?) -->\n).*?(?=\n\n|\n?\Z)", re.S)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Options of another stack that have the same answer."""

    theirs: str
    """Their names with commas between them; what stands in brackets is a remark."""
    here: str = ""
    """The answer in words. Empty: `to` is all of it."""
    to: str = ""
    """The key of the YAML that has the option's value."""
    json: str = ""
    """The key of the DeepSpeed JSON that has it."""
    prepare: str = ""
    """The flag of `llmtrain prepare` that has it."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Their value -> the value here, if not every value is the same here."""
    unless: tuple[Any, ...] | None = None
    """Values of the option with which a run here computes the same without it; None: all values."""

    @functools.cached_property
    def names(self) -> list[str]:
        return _NAME.findall(re.sub(r"\(.*?\)", "", self.theirs))

    @property
    def answer(self) -> str:
        return self.here or f"`{self.to}`"

    def line(self) -> str:
        """The row in a table of the page."""
        theirs = re.sub(r"[\w.]+(?![^()]*\))", r"`\g<0>`", self.theirs)
        return f"| {theirs} | {self.answer} |"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Options of one or several classes of a library, such as trl.SFTConfig, or of a stack's file."""

    classes: tuple[str, ...]
    head: str
    """The heading of the page's first column."""
    rows: tuple[Row, ...]

    def text(self) -> str:
        return "\n".join([f"| {self.head} | here |", "|---|---|", *(row.line() for row in self.rows)])


@functools.cache
def tables() -> tuple[Table, ...]:
    written = yaml.load(_FILE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(
        Table(classes=tuple(table["classes"]), head=table["head"], rows=tuple(_row(row) for row in table["rows"]))
        for table in written
    )


def _row(written: dict[str, Any]) -> Row:
    values = {word(value): ours for value, ours in written.pop("values", {}).items()}
    unless = written.pop("unless", None)
    return Row(**written, values=values, unless=None if unless is None else tuple(unless))


def word(value: Any) -> str:
    """A value as a YAML writes it: true, null, a number, a word, [sigmoid, sft]."""
    if isinstance(value, list):
        return f"[{', '.join(map(word, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def options() -> Iterator[tuple[str, str, Row]]:
    """Yield (class, option, its row), in the order of the tables."""
    for table in tables():
        for row in table.rows:
            for name in row.names:
                for owner in table.classes:
                    yield owner, name, row


def rows_of(*classes: str) -> dict[str, Row]:
    """Return option -> row for some classes; for an option of several classes the first class counts."""
    of_class: dict[str, dict[str, Row]] = {}
    for owner, name, row in options():
        of_class.setdefault(owner, {})[name] = row
    merged: dict[str, Row] = {}
    for owner in reversed(classes):
        merged |= of_class[owner]
    return merged


def with_tables(page: str) -> str:
    """Return the page with its tables as the rows have them."""
    texts = {" ".join(table.classes): table.text() for table in tables()}
    return _TABLE.sub(lambda found: found[1] + texts[found[2]], page)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
