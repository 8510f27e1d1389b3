"""`Source`: a user's records for `llmtrain prepare`, such as a table of a database."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmtrain.base.choice import Entry
from llmtrain.base.errors import DataError
from llmtrain.config import plugin_import
from llmtrain.config.plugins import place_of
from llmtrain.config.problems import Problems
from llmtrain.config.reader import read

_UNKNOWN_BYTES = 1 << 20
"""Assumed bytes of a part that is no file, for the progress and the number of shards."""


class Source(Entry, section="sources"):
    """A source of records that `llmtrain prepare` cannot read itself, such as a table of a database.

    A plugin's source is a dataclass with a name (`class Table(Source, entry="table")`). `--source table:WORDS` reads
    from it, and `--table.FIELD VALUE` sets its fields. `parts` and `records` must return the same at every call:
    several processes make the shards, and after a kill new processes make the rest.
    """

    def parts(self, words: str) -> Sequence[str]:
        """Return the names of parts, such as files or ranges of a table; each is read by one process.

        If a name is the path of a file, its size and modification time are used for progress and to find changes.

        Args:
            words: text after the colon.
        """
        return [words]

    @abstractmethod
    def records(self, part: str) -> Iterator[str | dict[str, Any]]:
        """Yield the records of a part in order: texts, or dicts with the fields that --field or --format need."""
        raise NotImplementedError


_open: dict[str, Source] = {}
"""Name -> source of the preparation that this process began last."""


def classes() -> Mapping[str, type[Source]]:
    return Entry.SECTIONS["sources"]


def use(words: Sequence[str], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Import these plugins, and create their sources with these field values. Raises: ConfigError."""
    plugin_import.use(list(words))
    _open.clear()
    problems = Problems()
    made = {name: read(cls, values.get(name, {}), name, problems) for name, cls in classes().items()}
    problems.raise_if_any()
    _open.update(made)


def named_in(source: str) -> str | None:
    name, colon, _ = source.partition(":")
    return name if colon and name in _open else None


def parts_of(source: str, option: str) -> list[tuple[str, int, int]]:
    """Return (NAME:PART, bytes, modification time in ns) for each part of NAME:WORDS. Raises DataError."""
    name, _, words = source.partition(":")
    try:
        found = list(_open[name].parts(words))
    except BaseException as error:
        raise _told(error, f"{option} {source}", "parts") from error
    if not found or not all(isinstance(part, str) for part in found) or len(set(found)) < len(found):
        raise DataError(
            f"{option} {source}: parts of {name} returned {str(found)[:80]}; it must return one or more "
            "texts, all different"
        )
    made = []
    for part in found:
        stat = os.stat(part) if os.path.isfile(part) else None
        size, changed = (_UNKNOWN_BYTES, 0) if stat is None else (stat.st_size, stat.st_mtime_ns)
        made.append((f"{name}:{part}", size, changed))
    return made


def records_of(label: str) -> Iterator[object]:
    """Yield the records of NAME:PART. Raises DataError."""
    name, _, part = label.partition(":")
    try:
        records = iter(_open[name].records(part))
    except BaseException as error:
        raise _told(error, label, "records") from error
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except BaseException as error:
            raise _told(error, label, "records") from error
        yield record


def _told(error: BaseException, label: str, method: str) -> BaseException:
    """Return the DataError for an exception of a plugin's method; KeyboardInterrupt is returned unchanged."""
    if isinstance(error, KeyboardInterrupt):
        return error
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    return DataError(f"{label}: {method}: {place_of(error)}{what}")
