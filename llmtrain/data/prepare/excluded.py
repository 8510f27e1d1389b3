"""Documents that `llmtrain prepare --exclude LIST` leaves out: lines FILE:RECORD, as `data where` prints them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from llmtrain.base.errors import DataError
from llmtrain.data.prepare.sources import SourceFile, Unit

_LINE = re.compile(r"\s*(.+?):(\d{1,15})(?:, \d+ tokens?: .*)?\s*")


def listed(path: str, files: Iterable[SourceFile]) -> dict[tuple[str, int], str]:
    """Return (file, record) -> its line in LIST. Raises DataError: a line is not FILE:RECORD of a file that is read."""
    found, names = dict[tuple[str, int], str](), {file.origin or file.label for file in files}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"--exclude {path}: cannot be read ({error}); name a text file of lines FILE:RECORD") from None
    for number, line in enumerate(lines, 1):
        pair, place = _LINE.fullmatch(line), f"--exclude {path}, line {number}"
        if pair and pair[1] in names:
            found[pair[1], int(pair[2])] = place
        elif line.strip():
            raise DataError(
                f"{place}: {line.strip()[:80]!r} is no FILE:RECORD of a source; write lines such as "
                f"{min(names)}:1, as llmtrain data where prints them"
            )
    return found


def marked(work: list[Unit], wanted: Iterable[tuple[str, int]], before: Mapping[int, int]) -> list[Unit]:
    """Return the units with the excluded records noted in their pieces.

    `before`: number of a unit -> lines of its first file that earlier units have.
    """
    each: dict[str, tuple[int, ...]] = {}
    for file, record in wanted:
        each[file] = (*each.get(file, ()), record)

    def with_excluded(unit: Unit) -> Unit:
        lines = [before.get(unit.index, 0)] + [0] * len(unit.pieces)
        pieces = zip(unit.pieces, lines, strict=False)
        return replace(
            unit, pieces=tuple(replace(piece, excluded=each.get(piece.origin, ()), before=n) for piece, n in pieces)
        )

    return [with_excluded(unit) for unit in work]


def refuse_unmatched(wanted: Mapping[tuple[str, int], str], gone: Collection[tuple[str, int]]) -> None:
    """Raise DataError if a line of LIST left out no document. `gone`: (file, record) of the documents left out."""
    for file, number in wanted.keys() - gone:
        raise DataError(
            f"{wanted[file, number]}: {file}:{number} is no document of --source; lines count from 1, rows "
            "from 0. Correct the line, or remove it"
        )
