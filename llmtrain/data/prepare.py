"""`llmtrain prepare`: from text to a folder of token shards that training maps into memory.

    find files -> cut into units -> tokenizer -> workers write shards, one pair a unit -> manifest.json, last

A killed run continues where it was: `unfinished/` holds the plan and a record of every finished unit.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from llmtrain import log, units
from llmtrain.data import manifest as manifests
from llmtrain.data import tokenize
from llmtrain.data.manifest import SPLITS, Manifest, Shard, write_atomically
from llmtrain.data.pool import run_units
from llmtrain.data.progress import Progress
from llmtrain.data.records import Document, Rejection, read_piece
from llmtrain.data.shards import PreparedSet
from llmtrain.data.sources import SourceFile, Unit, find_files, plan_units, stat_fingerprint, unit_bytes_for
from llmtrain.data.worker import UNFINISHED, WorkerSettings, unit_record_path
from llmtrain.errors import DataError, UserError

REJECTED = "rejected.jsonl"
_BPE_SAMPLE_BYTES = 128 << 20  # more text does not change the frequent merges; it only takes time and memory
_LISTED = 1000  # rejections beyond the allowed number that are still listed before the run stops


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What to prepare, and how. Exactly one of `tokenizer` and `vocab_size` is given."""

    sources: tuple[str, ...]
    out: str
    tokenizer: str | None = None
    vocab_size: int | None = None
    field: str = "text"
    format: str = "auto"
    validation_fraction: float = 0.05
    max_document_bytes: int = 16 << 20
    shard_bytes: int | None = None
    max_rejected: int = 0
    processes: int | None = None

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result; max_rejected and processes do not."""
        values: dict[str, Any] = {
            "source": list(self.sources),
            "field": self.field,
            "format": self.format,
            "validation_fraction": self.validation_fraction,
            "max_document_bytes": self.max_document_bytes,
            "shard_bytes": self.shard_bytes,
        }
        if self.tokenizer is not None:
            return {**values, "tokenizer": tokenize.fingerprint(Path(self.tokenizer))}
        return {**values, "vocab_size": self.vocab_size}


def prepare(settings: PrepareSettings) -> Manifest:
    """Make (or finish, or find complete) the prepared folder `settings.out`; returns its manifest. Raises DataError."""
    _check(settings)
    started = time.monotonic()
    out = Path(settings.out)
    inside = os.path.realpath(out) + os.sep  # `--source . --out data/x`: our own output is no input
    files = [
        f for f in find_files(settings.sources, settings.format) if not os.path.realpath(f.path).startswith(inside)
    ]
    plan = {"settings": settings.identity(), "stat": stat_fingerprint(files)}
    with _locked(out):
        if (out / manifests.NAME).exists():
            return _already_complete(out, plan)
        _start_or_continue(out, plan)
        total = sum(file.bytes for file in files)
        work = plan_units(files, settings.shard_bytes or unit_bytes_for(total))
        log.info(f"{len(files)} files, {units.size(total)}, in {len(work)} shards")
        _make_tokenizer(settings, work, out)
        records = _run(settings, work, out)
        manifest = _manifest(files, plan, records, out)
        _write_rejected(out, records)
        manifests.write_manifest(out, manifest)
        shutil.rmtree(out / UNFINISHED)
    log.info(_summary(out, manifest, time.monotonic() - started))
    return manifest


def _check(settings: PrepareSettings) -> None:
    if (settings.tokenizer is None) == (settings.vocab_size is None):
        raise DataError(
            "give exactly one of --tokenizer FOLDER (a Hugging Face tokenizer) and --vocab-size N (train one here)"
        )
    if not 0 <= settings.validation_fraction < 1:
        raise DataError(f"--validation-fraction {settings.validation_fraction}: must be at least 0 and below 1")
    for name in ("max_document_bytes", "shard_bytes", "processes"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise DataError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if settings.max_rejected < 0:
        raise DataError(f"--max-rejected {settings.max_rejected}: must be at least 0")


# --- the folder: new, unfinished or complete ------------------------------------------------------


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Only one `prepare` in a folder. The lock is on the folder itself, so a killed process leaves none behind."""
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DataError(f"--out {out}: cannot be made a folder ({error.strerror}); choose another") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"--out {out}: another `llmtrain prepare` is at work in it; wait for it") from error
        yield
    except OSError as error:
        raise DataError(
            f"--out {out}: cannot be written ({error.strerror or error}); make room and run the same command again"
        ) from error
    finally:
        for partial in out.glob("*.tmp"):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        for partial in (out / UNFINISHED).glob("*.tmp"):
            partial.unlink()
        if not existed and not any(out.iterdir()):
            out.rmdir()
        os.close(descriptor)


def _already_complete(out: Path, plan: dict[str, Any]) -> Manifest:
    manifest = PreparedSet(out).manifest
    different = _differences(manifest.settings, plan["settings"])
    if manifest.source["stat"] != plan["stat"]:
        different.append("the source files have changed since")
    if different:
        raise DataError(
            f"--out {out}: it already holds data that was prepared differently: {'; '.join(different)}. "
            "Choose another --out, or delete the folder to prepare it anew"
        )
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)  # a kill between manifest and clean-up leaves it
    log.info(f"{out}: already complete, nothing to do ({units.count(sum(manifest.tokens.values()))} tokens)")
    return manifest


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def _start_or_continue(out: Path, plan: dict[str, Any]) -> None:
    """Leave `out` with `unfinished/plan.json` equal to `plan` and nothing in it that belongs to another plan."""
    path = out / UNFINISHED / "plan.json"
    if path.exists():
        before = json.loads(path.read_bytes())
        if different := _differences(before["settings"], plan["settings"]):
            raise DataError(
                f"--out {out}: an unfinished preparation with other settings lies there: {'; '.join(different)}. "
                "Repeat its settings to finish it, choose another --out, or delete the folder"
            )
        if before["stat"] == plan["stat"]:
            return
        log.info(f"{out}: the source files have changed since the last, unfinished run: starting over")
        for leftover in (*out.glob("*-*.bin"), out / REJECTED):
            leftover.unlink(missing_ok=True)
        for folder in (UNFINISHED, "tokenizer"):
            shutil.rmtree(out / folder, ignore_errors=True)
    elif any(entry.suffix != ".tmp" and entry.name != UNFINISHED for entry in out.iterdir()):
        raise DataError(f"--out {out}: the folder is not empty and not made by `llmtrain prepare`; choose another")
    (out / UNFINISHED).mkdir(exist_ok=True)
    write_atomically(path, json.dumps(plan).encode())


# --- the tokenizer --------------------------------------------------------------------------------


def _make_tokenizer(settings: PrepareSettings, work: list[Unit], out: Path) -> None:
    folder = out / "tokenizer"
    if folder.exists():  # of the run that this one continues
        return
    if settings.tokenizer is not None:
        tokenize.Encoder(Path(settings.tokenizer))  # refuse it before anything is written
        tokenize.copy_tokenizer(Path(settings.tokenizer), folder)
        return
    assert settings.vocab_size is not None
    started = time.monotonic()
    tokenize.train_bpe(_sample(settings, work, out), settings.vocab_size, folder)
    log.info(
        f"trained a byte-level BPE of {settings.vocab_size} tokens in {units.duration(time.monotonic() - started)}"
    )


def _sample(settings: PrepareSettings, work: list[Unit], out: Path) -> Iterator[str]:
    """The text to train the BPE on: of every unit its beginning, the same amount of each, 128 MiB in all.

    Raises DataError at its end when it met too many bad records: better now than after the training.
    """
    share = _BPE_SAMPLE_BYTES // len(work)
    rejected: list[dict[str, Any]] = []
    for unit in work:
        used = 0
        for item in _records(settings, unit):
            if isinstance(item, Document):
                used += len(item.data)
                yield item.text
            else:
                rejected.append(item.as_dict())
            if used >= share or len(rejected) > settings.max_rejected + _LISTED:
                break
    _stop_if_too_many(settings, out, {0: {"rejected": rejected}})


def _records(settings: PrepareSettings, unit: Unit) -> Iterator[Document | Rejection]:
    for piece in unit.pieces:
        yield from read_piece(piece, settings.field, settings.max_document_bytes)


# --- the shards -----------------------------------------------------------------------------------


def _run(settings: PrepareSettings, work: list[Unit], out: Path) -> list[dict[str, Any]]:
    """Process what is not yet done; returns the records of all units, in order."""
    item_size = tokenize.Encoder(out / "tokenizer").dtype.itemsize
    records = {unit.index: record for unit in work if (record := _finished(out, unit, item_size)) is not None}
    if records:
        log.info(f"{len(records)} of {len(work)} shards are already done")
    worker_settings = WorkerSettings(
        out=str(out),
        field=settings.field,
        max_document_bytes=settings.max_document_bytes,
        validation_fraction=settings.validation_fraction,
        reject_limit=settings.max_rejected + _LISTED,
    )
    progress = Progress(sum(unit.bytes for unit in work), sum(unit.bytes for unit in work if unit.index in records))

    def keep(unit: Unit, record: dict[str, Any]) -> None:
        records[unit.index] = record
        progress.finish(unit)
        _stop_if_too_many(settings, out, records)

    _stop_if_too_many(settings, out, records)
    processes = settings.processes or len(os.sched_getaffinity(0))
    with progress:
        todo = [unit for unit in work if unit.index not in records]
        run_units(todo, worker_settings, processes, progress.under_way, keep)
    return [records[unit.index] for unit in work]


def _finished(out: Path, unit: Unit, item_size: int) -> dict[str, Any] | None:
    """The unit's record, if it is done and its shards are there with their full size."""
    path = unit_record_path(out, unit.index)
    if not path.exists():
        return None
    record = json.loads(path.read_bytes())
    for entry in filter(None, record["shards"].values()):
        shard = out / entry["file"]
        if not shard.exists() or shard.stat().st_size != entry["tokens"] * item_size:
            return None
    return record


def _stop_if_too_many(settings: PrepareSettings, out: Path, records: dict[int, dict[str, Any]]) -> None:
    rejected = [entry for index in sorted(records) for entry in records[index]["rejected"]]
    if len(rejected) <= settings.max_rejected:
        return
    _write_rejected(out, [records[index] for index in sorted(records)])
    shown = "".join(f"\n  {_place(entry)}: {entry['reason']}" for entry in rejected[:5])
    raise DataError(
        f"{len(rejected)} bad records so far, --max-rejected is {settings.max_rejected}:{shown}\n"
        f"All found so far are listed in {out / REJECTED}. Mend the source, or allow them with --max-rejected N "
        "and run the same command again: finished shards are kept"
    )


def _place(entry: dict[str, Any]) -> str:
    return f"{entry['file']}, " + (f"line {entry['line']}" if "line" in entry else f"row {entry['row']}")


def _write_rejected(out: Path, records: list[dict[str, Any]]) -> None:
    rejected = [entry for record in records for entry in record["rejected"]]
    if rejected:
        write_atomically(out / REJECTED, "".join(json.dumps(entry) + "\n" for entry in rejected).encode())
    else:
        (out / REJECTED).unlink(missing_ok=True)


# --- the manifest ---------------------------------------------------------------------------------


def _manifest(files: list[SourceFile], plan: dict[str, Any], records: list[dict[str, Any]], out: Path) -> Manifest:
    encoder = tokenize.Encoder(out / "tokenizer")
    shards: dict[str, tuple[Shard, ...]] = {
        split: tuple(Shard(**record["shards"][split]) for record in records if record["shards"][split])
        for split in SPLITS
    }
    tokens: dict[str, int] = {split: sum(shard.tokens for shard in shards[split]) for split in SPLITS}
    if not tokens["train"]:
        raise DataError(f"--source {' '.join(plan['settings']['source'])}: it gives no training document")
    if not tokens["validation"] and plan["settings"]["validation_fraction"]:
        log.warn("no document fell into the validation split: too few documents, or a small --validation-fraction")
    content = sum(int(record["content"], 16) for record in records) % (1 << 128)
    names = [[file.label, file.bytes] for file in files]
    tokenizer = tokenize.fingerprint(out / "tokenizer")
    dtype = "uint16" if encoder.dtype.itemsize == 2 else "uint32"
    return Manifest(
        dtype=dtype,
        vocab_size=encoder.vocab_size,
        separator_id=encoder.separator_id,
        tokens=tokens,
        documents={split: sum(shard.documents for shard in shards[split]) for split in SPLITS},
        rejected=sum(len(record["rejected"]) for record in records),
        tokenizer_fingerprint=tokenizer,
        source_fingerprint=xxhash.xxh3_128_hexdigest(json.dumps([names, f"{content:032x}"]).encode()),
        data_fingerprint=manifests.data_fingerprint(dtype, encoder.vocab_size, encoder.separator_id, tokenizer, shards),
        source={"files": len(files), "bytes": sum(file.bytes for file in files), "stat": plan["stat"]},
        settings=plan["settings"],
        shards=shards,
    )


def _summary(out: Path, manifest: Manifest, elapsed_s: float) -> str:
    tokens = ", ".join(f"{units.count(manifest.tokens[split])} {split}" for split in SPLITS)
    return (
        f"{out}: {units.count(sum(manifest.documents.values()))} documents, tokens: {tokens}; vocabulary "
        f"{manifest.vocab_size} ({manifest.dtype}), {manifest.rejected} rejected, {units.duration(elapsed_s)}"
    )


# --- the command line -----------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmtrain prepare",
        description="Tokenize a corpus into memory-mapped shards with a train and a validation split.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--source",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="files, folders or globs (text, code, jsonl, parquet; .gz and .zst too), a saved `datasets` folder, "
        "or stdlib: the running Python's own standard library",
    )
    add("--out", required=True, metavar="FOLDER", help="the prepared folder")
    add("--tokenizer", metavar="FOLDER", help="Hugging Face folder with a tokenizer.json")
    add("--vocab-size", type=int, metavar="N", help="train a byte-level BPE of N tokens on the source instead")
    add("--field", default="text", help="the field (jsonl) or column (parquet, datasets) that holds the text")
    add("--format", default="auto", choices=["auto", "text", "jsonl", "parquet"], help="auto: by the file name")
    add("--validation-fraction", type=float, default=0.05, metavar="F", help="share of the documents held out")
    add("--max-document-bytes", type=int, default=16 << 20, metavar="N", help="a longer document is rejected")
    add("--shard-bytes", type=int, metavar="N", help="input bytes per shard (default: a 64th, 1 to 256 MiB)")
    add("--max-rejected", type=int, default=0, metavar="N", help="stop when more than N records are bad")
    add("--processes", type=int, metavar="N", help="worker processes (default: all cores)")
    return parser


def main(argv: list[str]) -> int:
    """`llmtrain prepare`: returns the exit code; a user's mistake is one message on standard error."""
    values = vars(_parser().parse_args(argv))
    settings = PrepareSettings(sources=tuple(values.pop("source")), **values)

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        prepare(settings)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\ninterrupted; finished shards are kept in {settings.out}: the same command continues", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0
