"""Let workers process the units that are not done, and list the rejected records."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmtrain.base import log, units
from llmtrain.base.errors import DataError
from llmtrain.base.files import replace_file
from llmtrain.config import plugins
from llmtrain.data import tokenize
from llmtrain.data.chat.encoder import CONVERSATIONS
from llmtrain.data.manifest import origins_path
from llmtrain.data.prepare import pools, token_corpora
from llmtrain.data.prepare.out_folder import HELD_OUT, REJECTED, OutFolder
from llmtrain.data.prepare.plan import lines_before
from llmtrain.data.prepare.records import Rejection
from llmtrain.data.prepare.settings import PrepareSettings, cut_above
from llmtrain.data.prepare.sources import Unit
from llmtrain.data.prepare.worker import UnitRecord, WorkerSettings, hashes_name, record_name, write_held_out
from llmtrain.data.token_stream import rows_path

LISTED = 1000
"""How many rejections beyond the allowed number are listed before the preparation stops."""


class Progress(log.Progress):
    """Counts input bytes. Workers report bytes of text, which are capped, since a compressed file has fewer."""

    def __init__(self, total_bytes: int, done_bytes: int) -> None:
        super().__init__("tokenizing", total_bytes, done_bytes)
        self._finished = done_bytes
        self._under_way: dict[int, int] = {}

    def under_way(self, unit: Unit, text_bytes: int) -> None:
        self._under_way[unit.index] = min(unit.bytes, self._under_way.get(unit.index, 0) + text_bytes)
        self.show(self._finished + sum(self._under_way.values()))

    def finish(self, unit: Unit) -> None:
        self._under_way.pop(unit.index, None)
        self._finished += unit.bytes
        self.show(self._finished + sum(self._under_way.values()))


def run_units(settings: PrepareSettings, work: list[Unit], out: OutFolder, moment: str) -> list[UnitRecord]:
    """Process the unfinished units, and return the records of all units in order."""
    encoder = tokenize.Encoder(out.here / "tokenizer")
    dtype = dtype_of(work, encoder)
    sizes = out.sizes()
    records = {
        unit.index: record
        for unit in work
        if (record := _record(out, unit)) is not None and _is_there(record, sizes, dtype.itemsize)
    }
    if records:
        log.info(f"{len(records)} of {len(work)} shards are already done")
    kind = settings.kind
    worker_settings = WorkerSettings(
        out=settings.out,
        here=str(out.here),
        owner=out.owner,
        kind=replace(kind, moment=moment),
        bare=not settings.special_tokens,
        dtype=dtype.str,
        max_document_bytes=settings.max_document_bytes,
        validation_fraction=settings.fraction,
        # No part of a record goes to the other side.
        cut_bytes=sys.maxsize if kind.reads_records else cut_above(settings.fraction, sum(unit.bytes for unit in work)),
        reject_limit=settings.max_rejected + LISTED,
        plugins=tuple(plugins.words()),
        fields=settings.fields,
        sample=0 if kind.of_ids else math.ceil(CONVERSATIONS / max(1, sum(not u.validation for u in work))),
    )
    progress = Progress(sum(unit.bytes for unit in work), sum(unit.bytes for unit in work if unit.index in records))

    rejected = sum(len(record.rejected) for record in records.values())

    def keep(unit: Unit, record: UnitRecord) -> None:
        nonlocal rejected
        records[unit.index] = record
        progress.finish(unit)
        rejected += len(record.rejected)
        if rejected > settings.max_rejected:
            raise too_many(settings, out, work, records)

    if rejected > settings.max_rejected:
        raise too_many(settings, out, work, records)
    places = (settings.places or pools.local)(settings.processes)
    with progress:
        for validation in (True, False):  # first the documents that no unit for training may hold
            todo = [unit for unit in work if unit.validation is validation and unit.index not in records]
            held_out = [unit.index for unit in work if unit.validation and not validation]
            of_split = worker_settings
            if held_out:
                out.bring(map(hashes_name, held_out))
                of_split = replace(of_split, held_out=write_held_out(out.here, held_out))
                out.show(HELD_OUT)
            pools.run_units(todo, of_split, places, progress.under_way, keep)
    return [records[unit.index] for unit in work]


def dtype_of(work: list[Unit], encoder: tokenize.Encoder) -> np.dtype:
    """Return the dtype of the ids in the shards.

    If all sources are files of ids with a dtype that holds the vocabulary, it is theirs, so that they can be used in
    place; otherwise it follows from the tokenizer.
    """
    paths = {piece.path for unit in work for piece in unit.pieces if piece.kind == "tokens"}
    widths = {file.ids.dtype.itemsize for path in paths if (file := token_corpora.read(path)).begin is not None}
    if widths == {4} or (widths == {2} and encoder.dtype.itemsize == 2):
        return np.dtype(f"<u{widths.pop()}")
    return encoder.dtype


def _record(out: OutFolder, unit: Unit) -> UnitRecord | None:
    path = out.here / record_name(unit.index)
    return UnitRecord.from_dict(json.loads(path.read_bytes())) if path.exists() else None


def _is_there(record: UnitRecord, sizes: dict[str, int], item_size: int) -> bool:
    """Return True if all shards of a unit exist with their full size. `sizes`: bytes of the existing files by name."""
    for shard in filter(None, record.shards.values()):
        path = Path(shard.file)
        if sizes.get(path.name) != (shard.tokens * item_size if shard.bytes is None else shard.bytes):
            return False
        if origins_path(path).name not in sizes or (shard.rows and rows_path(path).name not in sizes):
            return False
    return True


def too_many(settings: PrepareSettings, out: OutFolder, work: list[Unit], records: dict[int, UnitRecord]) -> DataError:
    """Write the list of rejected records, and return the error that names the first of them."""
    rejected = rejections(work, records)
    write_rejected(out, rejected)
    reasons: dict[str, list[str]] = {}
    for entry in rejected:
        reasons.setdefault(entry.reason, []).append(entry.place)
    shown = ""
    for reason, places in list(reasons.items())[:5]:
        more = f" and {units.counted(len(places) - 1, 'other record')}" if len(places) > 1 else ""
        shown += f"\n  {places[0]}{more}: {reason}"
    so_far = f"{units.counted(len(rejected), 'bad record')} so far"
    return DataError(
        f"{so_far}, --max-rejected is {settings.max_rejected}:{shown}\n"
        f"All found so far are listed in {out.name}/{REJECTED}. Fix the source, or allow them with --max-rejected N "
        "and run the same command again: finished shards are kept"
    )


def rejections(work: list[Unit], records: dict[int, UnitRecord]) -> list[Rejection]:
    """Return the rejected records of finished units, with line numbers counted from the beginning of their files."""
    some = [unit for unit in work if unit.index in records and records[unit.index].rejected]
    read = {index: record.lines for index, record in records.items()}
    before = lines_before(work, read, {unit.index for unit in some})
    rejected: list[Rejection] = []
    for unit in some:
        for entry in records[unit.index].rejected:
            continues = entry.unit == "line" and entry.file == unit.pieces[0].label
            moved = before.get(unit.index, 0) if continues else 0
            rejected.append(replace(entry, number=entry.number + moved))
    return rejected


def write_rejected(out: OutFolder, rejected: list[Rejection]) -> None:
    if rejected:
        replace_file(out.here / REJECTED, "".join(json.dumps(entry.as_dict()) + "\n" for entry in rejected).encode())
        out.show(REJECTED)
    elif (out.here / REJECTED).exists():
        out.remove([REJECTED])
