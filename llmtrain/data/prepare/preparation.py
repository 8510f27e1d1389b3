"""Prepares text: a folder of token shards that training maps into memory.

    find files -> cut into units -> tokenizer -> workers write shards, one pair a unit -> manifest.json, last

A killed run continues where it stopped: `unfinished/` holds the plan and a record of every finished unit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import DataError
from llmtrain.config import plugins
from llmtrain.data import manifest as manifests
from llmtrain.data import tokenize, tokenizer_folder
from llmtrain.data.chat.encoder import write_sample
from llmtrain.data.kinds import RowKind
from llmtrain.data.manifest import SAMPLE, SPLITS, ChatFigures, Manifest, Shard
from llmtrain.data.prepare import out_folder, plugin_source, sources
from llmtrain.data.prepare.excluded import listed, marked, refuse_unmatched
from llmtrain.data.prepare.make_tokenizer import examine_ids, make_tokenizer
from llmtrain.data.prepare.out_folder import (
    REJECTED,
    UNFINISHED,
    OutFolder,
    already_complete,
    bytes_of_shards,
    clear,
    start_or_continue,
)
from llmtrain.data.prepare.plan import lines_before, listed_files, planned
from llmtrain.data.prepare.run_units import dtype_of, rejections, run_units, write_rejected
from llmtrain.data.prepare.settings import PrepareSettings
from llmtrain.data.prepare.sources import SourceFile, Unit, stat_fingerprint
from llmtrain.data.prepare.worker import UnitRecord
from llmtrain.data.token_stream import TokenStream, rows_path


def prepare(settings: PrepareSettings) -> Manifest:
    """Prepare, or finish, the folder `settings.out`; returns its manifest. Raises DataError."""
    settings.check()
    plugin_source.use(settings.plugins, settings.fields)
    _refuse_unnamed(settings)
    settings = sources.fetched(settings)
    started = time.monotonic()
    out = out_folder.opened(settings.out)
    files, validation = listed_files(settings)
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
        work = planned(settings, files, validation)
        if wanted:
            names = {file for file, _ in wanted}
            before = lines_before(work, {}, {unit.index for unit in work if unit.pieces[0].origin in names})
            work = marked(work, wanted, before)
        make_tokenizer(settings, [unit for unit in work if not unit.validation], out)
        encoder = tokenize.Encoder(out.here / "tokenizer", bare=not settings.special_tokens)
        ids = settings.kind.of_ids and examine_ids(settings, files, work, encoder)
        if first := encoder.begin.tolist() if settings.is_text or ids else []:
            log.info(f"each document begins with {untrusted.shown(encoder.decode(first))}")
        records = run_units(settings, work, out, plan["moment"])
        by_unit = {unit.index: record for unit, record in zip(work, records, strict=True)}
        written = _Written(settings, work, records)
        try:
            written.check(wanted)
        except DataError as error:
            clear(out)
            if left_out := _left_out(records):
                raise DataError(f"{error} ({left_out})") from error
            raise
        finally:  # the reason for an empty split
            write_rejected(out, rejections(work, by_unit))
        manifest = _manifest(written, [files, validation], plan, out, tuple(first))
        if settings.kind.templated:
            trained = [record.shards["train"] for record in records]
            samples = [record.sample for record in records]
            write_sample(out.here, samples, [0 if shard is None else shard.documents for shard in trained])
            out.show(SAMPLE)
        manifests.write_manifest(out.here, manifest)
        out.refuse_taken(bytes_of_shards(manifest))
        out.show(manifests.NAME)
        out.remove([UNFINISHED])
        summary = _summary(settings.kind, out, manifest, time.monotonic() - started)
    if left_out := _left_out(records):
        log.info(left_out)
    log.info(summary)
    return manifest


def _refuse_unnamed(settings: PrepareSettings) -> None:
    """Raise DataError if the command line names no source and no format of the plugins."""
    sources_read = {plugin_source.named_in(source) for source in (*settings.sources, *settings.validation_sources)}
    formats = [name for name, kind in RowKind.CHOICES.items() if plugins.within(kind, plugins.modules)]
    if not settings.plugins or settings.format in formats or sources_read & plugin_source.classes().keys():
        return
    ways = [f"--source {name}:WORDS" for name in plugin_source.classes()] + [f"--format {name}" for name in formats]
    remedy = f"write {' or '.join(ways)}" if ways else "it defines no class of llmtrain.Source or RowKind; leave it out"
    raise DataError(f"--plugin {' '.join(settings.plugins)}: no --source reads from it; {remedy}")


# --- the manifest ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Written:
    """What the workers wrote: a record for each unit of work."""

    settings: PrepareSettings
    work: list[Unit]
    records: list[UnitRecord]

    @cached_property
    def shards(self) -> dict[str, tuple[Shard, ...]]:
        """The shards of each split. A shard names the file that continues in it and the number of earlier lines."""
        lines = {unit.index: record.lines for unit, record in zip(self.work, self.records, strict=True)}
        before = lines_before(self.work, lines, set(lines))
        shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        for unit, record in zip(self.work, self.records, strict=True):
            name, earlier = (unit.pieces[0].origin, before[unit.index]) if unit.index in before else ("", 0)
            for split in SPLITS:
                if (shard := record.shards[split]) is not None:
                    shards[split].append(replace(shard, continues=name, records_before=earlier))
        return {split: tuple(shards[split]) for split in SPLITS}

    @cached_property
    def tokens(self) -> dict[str, int]:
        return {split: sum(shard.tokens for shard in self.shards[split]) for split in SPLITS}

    @cached_property
    def documents(self) -> dict[str, int]:
        return {split: sum(shard.documents for shard in self.shards[split]) for split in SPLITS}

    @property
    def rejected(self) -> int:
        return sum(len(record.rejected) for record in self.records)

    def check(self, wanted: Mapping[tuple[str, int], str]) -> None:
        """Raises DataError for a line of --exclude without a document (`wanted`) and for an empty split."""
        settings = self.settings
        refuse_unmatched(wanted, {each for record in self.records for each in record.excluded})
        lowest = min((record.lowest_draw for record in self.records), default=1.0)
        _check_splits(settings, self.tokens, self.documents, lowest, self.rejected)
        for split in SPLITS if settings.kind.has_rows and not settings.kind.never_trains else ():
            if self.documents[split] and not any(record.chat[split].counted for record in self.records if record.chat):
                named = settings.sources if split == "train" else settings.validation_sources or settings.sources
                raise DataError(
                    f"--source {' '.join(named)}: no token of its {split} rows is counted, so there is "
                    "nothing to learn or to measure; give records with counted tokens"
                )


def _manifest(
    written: _Written, files: list[list[SourceFile]], plan: dict[str, Any], out: OutFolder, first: tuple[int, ...]
) -> Manifest:
    """`first`: ids before each text."""
    settings, records = written.settings, written.records
    encoder = tokenize.Encoder(out.here / "tokenizer")
    tokenizer = tokenizer_folder.fingerprint(out.here / "tokenizer")
    dtype = "uint16" if dtype_of(written.work, encoder).itemsize == 2 else "uint32"
    return Manifest(
        dtype=dtype,
        vocab_size=encoder.vocab_size,
        separator_id=encoder.separator_id,
        first_tokens=first,
        tokens=written.tokens,
        documents=written.documents,
        rejected=written.rejected,
        cut=sum(record.cut for record in records),
        tokenizer_fingerprint=tokenizer,
        data_fingerprint=manifests.data_fingerprint(
            dtype, encoder.vocab_size, encoder.separator_id, tokenizer, written.shards, first
        ),
        source={
            "files": sum(map(len, files)),
            "bytes": sum(file.bytes for part in files for file in part),
            "stat": plan["stat"],
        },
        settings=plan["settings"],
        shards=written.shards,
        chat=_chat_figures(settings.kind, records, plan["moment"]) if settings.kind.has_rows else None,
    )


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
        given = " ".join(settings.validation_sources)
        raise DataError(f"--validation-source {given}: it gives no document; add text, or {without}")
    count = sum(documents.values())
    least = math.ceil(lowest_draw * 1000 + 1e-9) / 1000
    larger = f"hold out more: --validation-fraction {least:.3f} or more; or " if least < 1 else ""
    raise DataError(
        f"--validation-fraction {settings.fraction}: by chance none of {_documents(count)} is in the validation "
        "split, so there would be no validation loss. Give text for validation: --validation-source FILE; or "
        f"{larger if count > 1 else 'add text; or '}{without}"
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
        used = sum(shard.tokens for shard in in_place) * (2 if manifest.dtype == "uint16" else 4)
        cut += f"; {units.size(used)} used in place"
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
