"""Find the files that `llmtrain prepare` reads, and cut them into units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llmtrain.base import log, units
from llmtrain.base.errors import DataError
from llmtrain.data.prepare.records import lines_in
from llmtrain.data.prepare.settings import PrepareSettings
from llmtrain.data.prepare.sources import Piece, SourceFile, Unit, find_files, place_of, plan_units, unit_bytes_for

_KINDS = 12
"""Most file endings that the first line of output names."""


def listed_files(settings: PrepareSettings) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return the files of --source and of --validation-source; a file in both is for validation only."""
    inside = place_of(settings.out).rstrip("/") + "/"  # `--source . --out data/x`: our own output is no input
    validation: list[SourceFile] = []
    if settings.validation_sources:
        validation = find_files(settings.validation_sources, settings.format, option="--validation-source")
    taken = {place_of(file.path) for file in validation}
    files = [
        file
        for file in find_files(settings.sources, settings.format)
        if (path := place_of(file.path)) not in taken and (file.kind == "plugin" or not path.startswith(inside))
    ]
    if not files:
        raise DataError(
            f"--source {' '.join(settings.sources)}: no file is left for training: all are in "
            f"{'--validation-source' if taken else '--out'}; name other files"
        )
    times = Counter(file.label for file in (*files, *validation))  # of two folders, each with a part-0.jsonl
    named = [[replace(f, origin=f.path) if times[f.label] > 1 else f for f in some] for some in (files, validation)]
    return named[0], named[1]


def planned(settings: PrepareSettings, files: list[SourceFile], validation: list[SourceFile]) -> list[Unit]:
    total = sum(file.bytes for file in (*files, *validation))
    unit_bytes = settings.shard_bytes or unit_bytes_for(total)
    work = plan_units(files, unit_bytes)
    work += plan_units(validation, unit_bytes, first_index=len(work), validation=True)
    count = len(files) + len(validation)
    names = Counter(Path(file.label).suffix.lower() or file.label for file in files if file.kind == "text")
    kinds = ", ".join(f"{number} {name}" for name, number in names.most_common(_KINDS))
    rest = f", and {units.counted(len(names) - _KINDS, 'other kind')}" if len(names) > _KINDS else ""
    prose = f"; read as text: {kinds}{rest}" if kinds else ""
    log.info(f"{units.counted(count, 'file')}, {units.size(total)}, in {units.counted(len(work), 'shard')}{prose}")
    return work


def lines_before(work: list[Unit], read: Mapping[int, int | None], wanted: set[int]) -> dict[int, int]:
    """Return for each wanted unit that continues a file of an earlier unit how many lines of the file come before it.

    `read`: number of a unit -> lines that begin in its last piece, if known."""
    before: dict[int, int] = {}
    lines, unread = 0, list[Piece]()
    for unit in work:
        first, last = unit.pieces[0], unit.pieces[-1]
        goes_on = first.kind == "jsonl" and first.start > 0
        if goes_on and unit.index in wanted:
            lines, unread = lines + sum(map(lines_in, unread)), []
            before[unit.index] = lines
        if not (goes_on and first is last):
            lines, unread = 0, []
        if (known := read.get(unit.index)) is not None:
            lines += known
        elif last.kind == "jsonl" and not last.compressed:
            unread.append(last)
    return before
