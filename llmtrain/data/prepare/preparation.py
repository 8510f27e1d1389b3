"""Prepares text: a folder of token shards that training maps into memory.

    find files -> cut into units -> tokenizer -> workers write shards, one pair a unit -> manifest.json, last

A killed run continues where it stopped: `unfinished/` holds the plan and a record of every finished unit.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.files import replace_file
from llmtrain.config import plugins
from llmtrain.data import manifest as manifests
from llmtrain.data import tokenize, tokenizer_folder
from llmtrain.data.chat.encoder import CONVERSATIONS, write_sample
from llmtrain.data.chat.encoder import NAME as SAMPLE
from llmtrain.data.kinds import RowKind
from llmtrain.data.manifest import SPLITS, ChatFigures, Manifest, Shard, origins_path
from llmtrain.data.prepare import out_folder, plugin_source, pools, sources, token_corpora
from llmtrain.data.prepare.excluded import listed, marked, refuse_unmatched
from llmtrain.data.prepare.out_folder import HELD_OUT, PLAN, REJECTED, UNFINISHED, OutFolder
from llmtrain.data.prepare.records import Document, Rejection, lines_in, read_piece
from llmtrain.data.prepare.settings import PrepareSettings, cut_above
from llmtrain.data.prepare.sources import (
    Piece,
    SourceFile,
    Unit,
    find_files,
    place_of,
    plan_units,
    stat_fingerprint,
    unit_bytes_for,
)
from llmtrain.data.prepare.worker import UnitRecord, WorkerSettings, hashes_name, record_name, write_held_out
from llmtrain.data.row import RefusedError
from llmtrain.data.token_stream import TokenStream, rows_path


class Progress(log.Progress):
    """Counts input bytes. Workers report bytes of text, which may exceed a compressed file's: so they are capped."""

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


_BPE_SAMPLE_BYTES = 128 << 20  # more text does not change the frequent merges; it only takes time and memory
_LISTED = 1000  # rejections beyond the allowed number that are still listed before the run stops


def prepare(settings: PrepareSettings) -> Manifest:
    """Prepare, or finish, the folder `settings.out`; returns its manifest. Raises DataError."""
    settings.check()
    plugin_source.use(settings.plugins, settings.fields)
    _refuse_unnamed(settings)
    settings = sources.fetched(settings)
    started = time.monotonic()
    out = out_folder.opened(settings.out)
    files, validation = _find_files(settings)
    stat = stat_fingerprint(files) + (stat_fingerprint(validation) if validation else "")
    moment = datetime.now().isoformat(timespec="seconds")  # templates that write the date write this one
    plan: dict[str, Any] = {"settings": settings.identity(), "stat": stat, "moment": moment}
    wanted = listed(settings.exclude, [*files, *validation]) if settings.exclude else {}
    if wanted:
        plan["settings"]["exclude"] = [f"{file}:{record}" for file, record in sorted(wanted)]
    with out.held():
        if (out.here / manifests.NAME).exists():
            return already_complete(out, plan)
        plan = start_or_continue(out, plan)
        work = _plan(settings, files, validation)
        if wanted:
            names = {file for file, _ in wanted}
            before = _lines_before(work, {}, {unit.index for unit in work if unit.pieces[0].origin in names})
            work = marked(work, wanted, before)
        _make_tokenizer(settings, [unit for unit in work if not unit.validation], out)
        encoder = tokenize.Encoder(out.here / "tokenizer", bare=not settings.special_tokens)
        ids = settings.kind.of_ids and _examine_ids(settings, files, work, encoder)
        if first := encoder.begin.tolist() if settings.is_text or ids else []:
            log.info(f"each document begins with {untrusted.shown(encoder.decode(first))}")
        records = _run(settings, work, out, plan["moment"])
        try:
            manifest = _manifest(settings, [files, validation], work, plan, records, out, wanted, tuple(first))
        finally:  # it shows the reason for an empty split
            _write_rejected(out, _rejected(work, _by_unit(work, records)))
        if settings.kind.templated:
            trained = [record.shards["train"] for record in records]
            samples = [record.sample for record in records]
            write_sample(out.here, samples, [0 if shard is None else shard.documents for shard in trained])
            out.show(SAMPLE)
        manifests.write_manifest(out.here, manifest)
        out.refuse_taken(_bytes_of_shards(manifest))
        out.show(manifests.NAME)
        out.remove([UNFINISHED])
        summary = _summary(settings.kind, out, manifest, time.monotonic() - started)
    if left_out := _left_out(records):
        log.info(left_out)
    log.info(summary)
    return manifest


def _refuse_unnamed(settings: PrepareSettings) -> None:
    """Raise DataError if the command line names no source and no format of the plugins."""
    if plugins.within(RowKind.named(settings.format), plugins.modules):
        return
    named = {plugin_source.named_in(source) for source in (*settings.sources, *settings.validation_sources)}
    for name in plugin_source.classes():
        if name in named:
            return
    if settings.plugins:
        known = ", ".join(f"{name}:WORDS" for name in plugin_source.classes())
        remedy = (
            f"write --source {known}" if known else "it defines no class of llmtrain.Source or RowKind; leave it out"
        )
        raise DataError(f"--plugin {' '.join(settings.plugins)}: no --source reads from it; {remedy}")


def _find_files(settings: PrepareSettings) -> tuple[list[SourceFile], list[SourceFile]]:
    """The files of --source and of --validation-source; a file in both is for validation only."""
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


def _plan(settings: PrepareSettings, files: list[SourceFile], validation: list[SourceFile]) -> list[Unit]:
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


# --- the tokenizer --------------------------------------------------------------------------------


def _make_tokenizer(settings: PrepareSettings, work: list[Unit], out: OutFolder) -> None:
    folder = out.here / "tokenizer"
    if folder.exists():  # of the run that this one continues
        return
    if settings.tokenizer is not None:
        tokenize.Encoder(Path(settings.tokenizer))  # refuse it before anything is written
        template = None if settings.chat_template is None else Path(settings.chat_template)
        tokenizer_folder.copy_tokenizer(Path(settings.tokenizer), folder, template)
        out.show("tokenizer")
        return
    assert settings.vocab_size is not None
    started = time.monotonic()
    tokenize.train_bpe(_sample(settings, work, out), settings.vocab_size, folder)
    out.show("tokenizer")
    log.info(
        f"trained a byte-level BPE of {settings.vocab_size} tokens in {units.duration(time.monotonic() - started)}"
    )


def _examine_ids(
    settings: PrepareSettings, files: list[SourceFile], work: list[Unit], encoder: tokenize.Encoder
) -> bool:
    """Check the first ids of some files and records; True if they begin as the tokenizer's texts. Raises DataError:
    they are from another tokenizer."""
    samples = token_corpora.beginnings([file.path for file in files if file.kind == "tokens"], encoder.separator_id)
    rows = settings.kind.encoder(Path(str(settings.tokenizer)), np.dtype(np.int64), bare=True)
    pieces = [piece for unit in work for piece in unit.pieces if piece.kind != "tokens"]
    for piece in pieces[:1]:
        for item in islice(read_piece(piece, None, settings.max_document_bytes), 20):
            if isinstance(item, Document):
                with suppress(RefusedError):  # a worker rejects it
                    samples += [(piece.label, ids)] if len(ids := rows.ids(rows.record(item.text))[0]) else []
    begins = bool(samples) and token_corpora.examine(samples, encoder)
    # A token that also ends documents may be none's first.
    return begins and not settings.kind.has_rows and encoder.separator_id not in encoder.begin[:1]


def _sample(settings: PrepareSettings, work: list[Unit], out: OutFolder) -> Iterator[str]:
    """Text to train the BPE on: an equal amount from the beginning of every unit, 128 MiB in all.

    Raises DataError at its end for too many bad records: better now than after the training.
    """
    share = _BPE_SAMPLE_BYTES // len(work)
    records = {unit.index: UnitRecord(unit=unit.index) for unit in work}
    count = 0
    for unit in work:
        used = 0
        for item in _records(settings, unit):
            if isinstance(item, Document):
                used += len(item.data)
                yield item.text
            else:
                records[unit.index].rejected.append(item)
                count += 1
            if used >= share or count > settings.max_rejected + _LISTED:
                break
    if count > settings.max_rejected:
        raise _too_many(settings, out, work, records)


def _records(settings: PrepareSettings, unit: Unit) -> Iterator[Document | Rejection]:
    for piece in unit.pieces:
        yield from read_piece(piece, settings.field, settings.max_document_bytes)


# --- the shards -----------------------------------------------------------------------------------


def _run(settings: PrepareSettings, work: list[Unit], out: OutFolder, moment: str) -> list[UnitRecord]:
    """Process unfinished units; returns the records of all units, in order."""
    encoder = tokenize.Encoder(out.here / "tokenizer")
    dtype = _dtype(work, encoder)
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
        reject_limit=settings.max_rejected + _LISTED,
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
            raise _too_many(settings, out, work, records)

    if rejected > settings.max_rejected:
        raise _too_many(settings, out, work, records)
    places = (settings.places or pools.local)(settings.processes)
    with progress:
        for validation in (True, False):  # first the documents that no unit for training may hold
            todo = [unit for unit in work if unit.validation is validation and unit.index not in records]
            held_out = [unit.index for unit in work if unit.validation and not validation]
            given = worker_settings
            if held_out:
                out.bring(map(hashes_name, held_out))
                given = replace(given, held_out=write_held_out(out.here, held_out))
                out.show(HELD_OUT)
            pools.run_units(todo, given, places, progress.under_way, keep)
    return [records[unit.index] for unit in work]


def _dtype(work: list[Unit], encoder: tokenize.Encoder) -> np.dtype:
    """Type of the ids in the shards: that of all sources if they are ids and it holds the vocabulary, so that they can
    be used in place; else the tokenizer's."""
    paths = {piece.path for unit in work for piece in unit.pieces if piece.kind == "tokens"}
    widths = {file.ids.dtype.itemsize for path in paths if (file := token_corpora.read(path)).begin is not None}
    if widths == {4} or (widths == {2} and encoder.dtype.itemsize == 2):
        return np.dtype(f"<u{widths.pop()}")
    return encoder.dtype


def _record(out: OutFolder, unit: Unit) -> UnitRecord | None:
    path = out.here / record_name(unit.index)
    return UnitRecord.from_dict(json.loads(path.read_bytes())) if path.exists() else None


def _is_there(record: UnitRecord, sizes: dict[str, int], item_size: int) -> bool:
    """True if all shards of a unit exist with their full size. `sizes`: of existing files."""
    for shard in filter(None, record.shards.values()):
        path = Path(shard.file)
        if sizes.get(path.name) != (shard.tokens * item_size if shard.bytes is None else shard.bytes):
            return False
        if origins_path(path).name not in sizes or (shard.rows and rows_path(path).name not in sizes):
            return False
    return True


def _too_many(settings: PrepareSettings, out: OutFolder, work: list[Unit], records: dict[int, UnitRecord]) -> DataError:
    """List the rejected records of finished units; returns the error that names the first."""
    rejected = _rejected(work, records)
    _write_rejected(out, rejected)
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


def _rejected(work: list[Unit], records: dict[int, UnitRecord]) -> list[Rejection]:
    """The rejected records of finished units, with their lines in their files."""
    some = [unit for unit in work if unit.index in records and records[unit.index].rejected]
    before = _lines_before(work, records, {unit.index for unit in some})
    found: list[Rejection] = []
    for unit in some:
        lines = {unit.pieces[0].label: before.get(unit.index, 0)}
        for entry in records[unit.index].rejected:
            moved = lines.get(entry.file, 0) if entry.unit == "line" else 0
            found.append(replace(entry, number=entry.number + moved))
    return found


def _write_rejected(out: OutFolder, rejected: list[Rejection]) -> None:
    if rejected:
        replace_file(out.here / REJECTED, "".join(json.dumps(entry.as_dict()) + "\n" for entry in rejected).encode())
        out.show(REJECTED)
    elif (out.here / REJECTED).exists():
        out.remove([REJECTED])


# --- the manifest ---------------------------------------------------------------------------------


def _manifest(
    settings: PrepareSettings,
    files: list[list[SourceFile]],
    work: list[Unit],
    plan: dict[str, Any],
    records: list[UnitRecord],
    out: OutFolder,
    wanted: Mapping[tuple[str, int], str],
    first: tuple[int, ...],
) -> Manifest:
    """Raises DataError for an empty split or a line of --exclude without a document (`wanted`), and clears the folder
    for other settings. `first`: ids before each text."""
    encoder = tokenize.Encoder(out.here / "tokenizer")
    # For each unit the file that continues in it, and the number of its earlier lines.
    lines_before = _lines_before(work, _by_unit(work, records), {unit.index for unit in work})
    continued = [
        (unit.pieces[0].origin, lines_before[unit.index]) if unit.index in lines_before else ("", 0) for unit in work
    ]
    shards: dict[str, tuple[Shard, ...]] = {
        split: tuple(
            replace(shard, continues=name, records_before=before)
            for record, (name, before) in zip(records, continued, strict=True)
            if (shard := record.shards[split]) is not None
        )
        for split in SPLITS
    }
    tokens: dict[str, int] = {split: sum(shard.tokens for shard in shards[split]) for split in SPLITS}
    documents: dict[str, int] = {split: sum(shard.documents for shard in shards[split]) for split in SPLITS}
    try:
        refuse_unmatched(wanted, {each for record in records for each in record.excluded})
        lowest = min((record.lowest_draw for record in records), default=1.0)
        _check_splits(settings, tokens, documents, lowest, sum(len(record.rejected) for record in records))
        for split in SPLITS if settings.kind.has_rows and not settings.kind.never_trains else ():
            if documents[split] and not any(record.chat[split].counted for record in records if record.chat):
                given = settings.sources if split == "train" else settings.validation_sources or settings.sources
                raise DataError(f"--source {' '.join(given)}: no token of its {split} rows is counted, so there is "
                                "nothing to learn or to measure; give records with counted tokens")  # fmt: skip
    except DataError as error:
        clear(out)
        if held := _left_out(records):
            raise DataError(f"{error} ({held})") from error
        raise
    tokenizer = tokenizer_folder.fingerprint(out.here / "tokenizer")
    dtype = "uint16" if _dtype(work, encoder).itemsize == 2 else "uint32"
    return Manifest(
        dtype=dtype,
        vocab_size=encoder.vocab_size,
        separator_id=encoder.separator_id,
        first_tokens=first,
        tokens=tokens,
        documents=documents,
        rejected=sum(len(record.rejected) for record in records),
        cut=sum(record.cut for record in records),
        tokenizer_fingerprint=tokenizer,
        data_fingerprint=manifests.data_fingerprint(
            dtype, encoder.vocab_size, encoder.separator_id, tokenizer, shards, first
        ),
        source={
            "files": sum(map(len, files)),
            "bytes": sum(file.bytes for part in files for file in part),
            "stat": plan["stat"],
        },
        settings=plan["settings"],
        shards=shards,
        chat=_chat_figures(settings.kind, records, plan["moment"]) if settings.kind.has_rows else None,
    )


def _by_unit(work: list[Unit], records: list[UnitRecord]) -> dict[int, UnitRecord]:
    return {unit.index: record for unit, record in zip(work, records, strict=True)}


def _lines_before(work: list[Unit], records: dict[int, UnitRecord], wanted: set[int]) -> dict[int, int]:
    """Map each wanted unit whose first file continues from an earlier unit to that file's number of earlier lines."""
    found: dict[int, int] = {}
    lines, unread = 0, list[Piece]()
    for unit in work:
        first, last = unit.pieces[0], unit.pieces[-1]
        goes_on = first.kind == "jsonl" and first.start > 0
        if goes_on and unit.index in wanted:
            lines, unread = lines + sum(map(lines_in, unread)), []
            found[unit.index] = lines
        if not (goes_on and first is last):
            lines, unread = 0, []
        if unit.index in records and (known := records[unit.index].lines) is not None:
            lines += known
        elif last.kind == "jsonl" and not last.compressed:
            unread.append(last)
    return found


def _chat_figures(kind: RowKind, records: list[UnitRecord], moment: str) -> ChatFigures:
    figures = [record.chat for record in records if record.chat is not None]
    return ChatFigures(
        counted={split: sum(each[split].counted for each in figures) for split in SPLITS},
        longest=max(each[split].longest for each in figures for split in SPLITS),
        too_long=sum(record.too_long for record in records),
        stop_tokens=list(kind.stop_tokens),
        marks=kind.marks(),
        moment=moment if any(record.dated for record in records) else None,
        unread=sorted({name for record in records for name in record.unread}),
        chat_template_kwargs=kind.variables or None,
    )


def _check_splits(
    settings: PrepareSettings, tokens: dict[str, int], documents: dict[str, int], lowest_draw: float, rejected: int
) -> None:
    """Raises DataError when a requested split is empty."""
    measures = settings.kind.measures
    if not tokens["validation" if measures else "train"]:
        why = f" ({units.counted(rejected, 'record')} rejected, each with its reason in {REJECTED})" if rejected else ""
        what, remedy = ("question", "add some") if measures else ("training document", "add text")
        raise DataError(f"--source {' '.join(settings.sources)}: it gives no {what}{why}; {remedy}")
    if tokens["validation"] or not (settings.fraction or settings.validation_sources):
        return
    without = "train without validation: --validation-fraction 0, and `eval: off` under `train:` in the run's YAML"
    if settings.validation_sources:
        raise DataError(
            f"--validation-source {' '.join(settings.validation_sources)}: it gives no document; add text, or {without}"
        )
    found = sum(documents.values())
    least = math.ceil(lowest_draw * 1000 + 1e-9) / 1000
    larger = f"hold out more: --validation-fraction {least:.3f} is the least that takes one; or " if least < 1 else ""
    raise DataError(
        f"--validation-fraction {settings.fraction}: of {_documents(found)} chance puts none into the "
        f"validation split, and there would be no validation loss. Name text for it: --validation-source FILE; or "
        f"{larger if found > 1 else 'add text; or '}{without}"
    )


def _left_out(records: list[UnitRecord]) -> str:
    count = sum(record.left_out for record in records)
    return f"{_documents(count)} of --source left out: also in --validation-source" if count else ""


def _documents(number: int) -> str:
    return f"{units.count(number)} document{'' if number == 1 else 's'}"


def _summary(kind: RowKind, out: OutFolder, manifest: Manifest, elapsed_s: float) -> str:
    total = sum(manifest.tokens.values())
    if kind.measures and manifest.chat is not None:
        shards = manifest.shards["validation"]
        out.bring(rows_path(Path(shard.file)).name for shard in shards)
        asked = kind.counted(TokenStream(out.here, shards, np.dtype(manifest.dtype)))
        longest, took = manifest.chat.longest, units.duration(elapsed_s)
        rejected = f"{manifest.rejected} rejected"
        return f"{out.name}: {asked}, {units.count(total)} tokens, longest row {longest}; {rejected}, {took}"
    splits = "; ".join(
        f"{split} {_documents(manifest.documents[split])}, {units.count(manifest.tokens[split])} tokens "
        f"({manifest.tokens[split] / total:.1%})"
        for split in SPLITS
    )
    whose = "its end" if manifest.cut == 1 else "their ends"
    cut = f"; {units.count(manifest.cut)} cut to have {whose} in validation" if manifest.cut else ""
    if in_place := [shard for split in SPLITS for shard in manifest.shards[split] if shard.bytes is not None]:
        held = sum(shard.tokens for shard in in_place) * (2 if manifest.dtype == "uint16" else 4)
        cut += f"; {units.size(held)} used in place"
    if manifest.chat is not None:
        counted, done = sum(manifest.chat.counted.values()), manifest.settings.get("too_long")
        cut = f"; {units.count(counted)} tokens counted ({counted / total:.1%})"
        cut += f", longest {kind.unit} {manifest.chat.longest}"
        cut += f", {manifest.chat.too_long} too long: {done}" if manifest.chat.too_long else ""
        cut += "".join(f"; {note}" for note in manifest.chat.notes())
    return (
        f"{out.name}: {splits}{cut}; vocabulary {manifest.vocab_size} ({manifest.dtype}), {manifest.rejected} "
        f"rejected, {units.duration(elapsed_s)}"
    )


# --- the output folder: new, unfinished, or complete ---


_SHOWN, _KINDS = 3, 12
_SOON_DONE_AGAIN_BYTES = 64 << 20
"""Up to this size, about a minute's work, shards of an attempt with different settings are deleted without asking."""


def already_complete(out: OutFolder, plan: dict[str, Any]) -> Manifest:
    """The manifest of a complete folder. Raises DataError if it was prepared differently from `plan`."""
    manifest = manifests.read_manifest(out.here)
    sizes = out.sizes()
    for name, size in _bytes_of_shards(manifest).items():
        if sizes.get(name) != size:
            raise DataError(
                f"--out {out.name}: {name} has {sizes.get(name, 'no')} bytes, the manifest says {size}; delete the "
                "folder and prepare it again"
            )
    different = _differences(manifest.settings, plan["settings"])
    if manifest.source["stat"] != plan["stat"]:
        different.append("the source files have changed since")
    if different:
        raise DataError(
            f"--out {out.name}: it already holds data that was prepared differently: {'; '.join(different)}. "
            "Choose another --out, or delete the folder to prepare it again"
        )
    out.remove([UNFINISHED])  # a kill between manifest and clean-up leaves it
    log.info(f"{out.name}: already complete, nothing to do ({units.count(sum(manifest.tokens.values()))} tokens)")
    return manifest


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key} was {_short(before.get(key))} and is now {_short(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def _short(value: Any) -> str:
    """Format a setting for an error: a glob's source has a path for each of its files."""
    if not isinstance(value, list) or len(value) <= _SHOWN:
        return repr(value)
    return f"[{', '.join(map(repr, value[:_SHOWN]))} and {units.counted(len(value) - _SHOWN, 'other')}]"


def start_or_continue(out: OutFolder, plan: dict[str, Any]) -> dict[str, Any]:
    """Leave `out` with `unfinished/plan.json` and no file of another plan. Returns the plan of the run that this one
    continues, with its `moment`, or `plan`."""
    path, sizes = out.here / PLAN, out.sizes()
    if path.exists():
        before = json.loads(path.read_bytes())
        different = _differences(before["settings"], plan["settings"])
        done_bytes = sum(sizes[n] for n in _made(sizes) if n.endswith(".bin") and not (out.here / n).is_symlink())
        if different and done_bytes > _SOON_DONE_AGAIN_BYTES:
            raise DataError(
                f"--out {out.name}: an unfinished preparation with other settings is there, {units.size(done_bytes)} "
                f"of tokens: {'; '.join(different)}. Repeat its settings to finish it, choose another --out, or delete "
                "the folder"
            )
        out.claim()
        if not different and before["stat"] == plan["stat"]:
            return {**plan, **before}
        why = "its settings differ from those of" if different else "the source files have changed since"
        log.info(f"{out.name}: {why} the last, unfinished run: starting over")
        clear(out)
    elif any(not name.endswith(".tmp") and name.partition("/")[0] != UNFINISHED for name in sizes):
        raise DataError(f"--out {out.name}: the folder is not empty and not made by `llmtrain prepare`; choose another")
    (out.here / UNFINISHED).mkdir(exist_ok=True)
    out.claim()
    replace_file(path, json.dumps(plan).encode())
    out.show(PLAN)
    return plan


def clear(out: OutFolder) -> None:
    out.remove([*_made(out.sizes()), REJECTED, SAMPLE, "tokenizer", UNFINISHED])


def _bytes_of_shards(manifest: Manifest) -> dict[str, int]:
    width = np.dtype(manifest.dtype).itemsize
    shards = [shard for split in SPLITS for shard in manifest.shards[split]]
    return {shard.file: shard.tokens * width if shard.bytes is None else shard.bytes for shard in shards}


def _made(names: Iterable[str]) -> list[str]:
    patterns = ("*-*.bin", "*-*.rows", "*.origins.parquet")
    return [name for name in names if "/" not in name and any(fnmatchcase(name, each) for each in patterns)]
