"""Mistakes are collected and reported together: key, value, place, rule, remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from llmtrain.base.errors import ConfigError

Places = Mapping[str, str]
"""Dotted key -> where the user wrote it ("run.yaml, line 12", "command line")."""


def show(value: Any) -> str:
    """Return a value as JSON, short enough for one line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def assigned(key: str, value: Any) -> str:
    """Return `key = value`. A key with a blank at an end is quoted, so that the blank is seen."""
    blank = any(part != part.strip() for part in key.split("."))
    return f"{show(key) if blank else key} = {show(value)}"


COMMAND_LINE = "command line"
"""The place of a flag's value."""


WRITTEN = {
    "deepspeed": "write `deepspeed: PATH` of a DeepSpeed JSON; `llmtrain init DIR` writes some, and when to take which",
    "data.path": "write the path of a folder that `llmtrain prepare` made",
    "resume": "write auto, none or the path of a checkpoint",
    "data.stages": "write a list: [{from_step: 1000, path: FOLDER}, ...]",
}
"""Field -> the remedy for its value of another type."""


def remedy_of(key: str) -> str:
    """Return the remedy for a field that is empty or missing."""
    return WRITTEN.get(key, "remove the line for the default")


class Problems:
    """Collects mistakes; `raise_if_any` raises one ConfigError with all of them."""

    def __init__(self, places: Places | None = None, *, paths: bool = True, saved: bool = False) -> None:
        """
        Args:
            places: dotted key -> where the user wrote it.
            paths: report paths with an unset variable or an unknown user.
            saved: the values are from a file of a run, perhaps with fields of another version.
        """
        self._entries: list[str] = []
        self._keys: set[str] = set()
        self.places: dict[str, str] = dict(places or {})
        self.paths, self.saved = paths, saved
        self.unexpanded = False
        """True after a mistake about a path with an unset variable."""
        self.notes: list[str] = []
        """Notes for the user on values that were adapted."""

    def add(self, key: str, value: Any, rule: str, remedy: str, place: str | None = None) -> None:
        """Record one mistake. `place`: file and line, if they are not the line of `key`."""
        self.add_text(key, assigned(key, value), rule, remedy, place or self.places.get(key))

    def add_text(self, key: str, what: str, rule: str, remedy: str, place: str | None = None) -> None:
        """Record a mistake with its own first line, such as two places that differ."""
        where = f"  ({place})" if place else ""
        self._keys.add(key)
        self._entries.append(f"{what}{where}\n    rule:   {rule}\n    remedy: {remedy}")

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._keys)

    def __contains__(self, key: str) -> bool:
        """True if there is a mistake about this key: later rules then skip it."""
        return key in self._keys

    def __len__(self) -> int:
        return len(self._entries)

    def error(self) -> ConfigError:
        assert self._entries
        count = f"{len(self._entries)} mistakes\n  " if len(self._entries) > 1 else ""
        error = ConfigError(count + "\n  ".join(self._entries))
        error.keys = self.keys
        return error

    def raise_if_any(self) -> None:
        if self._entries:
            raise self.error()


def stop(key: str, value: Any, rule: str, remedy: str, place: str | None = None) -> ConfigError:
    """Return a ConfigError for one mistake that makes all further checks impossible."""
    problems = Problems()
    problems.add(key, value, rule, remedy, place)
    return problems.error()


def read_text(key: str, path: str, kind: str, no_file: Callable[[], tuple[str, str]], place: str | None = None) -> str:
    """Return the text of a file that `key` names. `kind`: what the file is, for messages.

    `no_file` returns rule and remedy if the file does not exist.

    Raises: ConfigError.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        rule, remedy = no_file()
    except IsADirectoryError:
        rule, remedy = "is a folder", f"give the path of {kind} in it"
    except UnicodeDecodeError as error:
        code = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        line = error.object.count(10, 0, error.start) + 1
        rule = f"is not UTF-8: byte 0x{error.object[error.start]:02x} in line {line}"
        remedy = f"save it as UTF-8, such as by `iconv -f {code} -t UTF-8 {path}`"
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        rule, remedy = f"cannot be read: {reason}", f"give the path of {kind}"
    raise stop(key, path, rule, remedy, place) from None


_FILLERS = {"of", "n", "num", "number", "size", "count", "value", "the"}
"""Words that do not count when names are compared word by word."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` probably means: misspelt, or made of the same words.

    Similar letters alone are not enough: by them `epochs` was optim.eps, `report_to` train.export, and `grpo` rpo.
    """
    lowered = {k.lower(): k for k in known}
    asked = word.strip().lower()
    near = [(edits, k) for k in lowered if (edits := _misspelt(asked, k)) is not None]
    if not near or min(near)[0] > 1:
        near = [(0, k) for k in lowered if _same_words(asked, k)] or near
    return lowered[min(near)[1]] if near else None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word with the most letters of `word`, as an example."""
    lowered = {k.lower(): k for k in known}
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def nearest_file(path: Path, *kinds: str) -> Path | None:
    """Return the file in the folder of a missing one with the most similar name. `kinds`: patterns such as *.yaml."""
    beside = {each.stem: each.name for kind in kinds for each in path.parent.glob(kind)}
    near = nearest(path.stem, beside)
    return path.with_name(beside[near]) if near else None


def _misspelt(a: str, b: str) -> int | None:
    """Count the letters that are wrong, superfluous, missing or transposed.

    Returns None if the words are too different for a misspelling: by more than a quarter of the shorter word (by more
    than one letter below eight letters), or if a word below four letters begins with another letter.
    """
    shorter = min(len(a), len(b))
    most = max(1, shorter // 4)
    if abs(len(a) - len(b)) > most or (shorter < 4 and a[:1] != b[:1]):
        return None
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        beforehand, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], beforehand[j - 2] + 1)
    return row[-1] if row[-1] <= most else None


def _same_words(a: str, b: str) -> bool:
    """Return True if each word of one name is in the other name or begins a word of it (`len`, `length`)."""
    ours, theirs = (
        {part for part in name.replace("-", "_").replace(".", "_").split("_") if part} - _FILLERS for name in (a, b)
    )
    return bool(ours and theirs) and all(
        any(_same_word(x, y) for y in other) for some, other in ((ours, theirs), (theirs, ours)) for x in some
    )


def _same_word(a: str, b: str) -> bool:
    shorter, longer = sorted((a, b), key=len)
    return shorter == longer or (len(shorter) >= 3 and (longer.startswith(shorter) or longer == f"{shorter}s"))
