"""Mistakes are collected and told together: key, value, place, rule, remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from llmtrain.errors import ConfigError

Places = Mapping[str, str]
"""Dotted key -> where the user wrote it ("run.yaml, line 12", "command line")."""


def show(value: Any) -> str:
    """A value as it would stand in JSON, short enough for one line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


class Problems:
    """Gathers mistakes; `raise_if_any` ends with one ConfigError that tells all of them."""

    def __init__(self) -> None:
        self._entries: list[str] = []
        self._keys: set[str] = set()

    def add(self, key: str, value: Any, rule: str, remedy: str, place: str | None = None) -> None:
        """One mistake. `place` is the file (and line) or "command line"."""
        self.add_text(key, f"{key} = {show(value)}", rule, remedy, place)

    def add_text(self, key: str, what: str, rule: str, remedy: str, place: str | None = None) -> None:
        """`add` for a mistake whose first line is not one `key = value`, such as two places that differ."""
        where = f"  ({place})" if place else ""
        self._keys.add(key)
        self._entries.append(f"{what}{where}\n    rule:   {rule}\n    remedy: {remedy}")

    def __contains__(self, key: str) -> bool:
        """True if a mistake about this key is already known: later rules then stay silent about it."""
        return key in self._keys

    def __bool__(self) -> bool:
        return bool(self._entries)

    def error(self) -> ConfigError:
        """All mistakes in one; there must be at least one."""
        assert self._entries
        if len(self._entries) == 1:
            return ConfigError(self._entries[0])
        return ConfigError(f"{len(self._entries)} mistakes\n  " + "\n  ".join(self._entries))

    def raise_if_any(self) -> None:
        if self._entries:
            raise self.error()


def stop(key: str, value: Any, rule: str, remedy: str, place: str | None = None) -> ConfigError:
    """The ConfigError of a single mistake after which nothing more can be checked."""
    problems = Problems()
    problems.add(key, value, rule, remedy, place)
    return problems.error()


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None if none is like it."""
    lowered = {k.lower(): k for k in known}
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None
