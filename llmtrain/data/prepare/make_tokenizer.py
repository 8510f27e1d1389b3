"""Make the tokenizer of a prepared folder: copy it, or train it on the sources; compare it with ids in the sources."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from llmtrain.base import log, units
from llmtrain.data import tokenize, tokenizer_folder
from llmtrain.data.prepare import token_corpora
from llmtrain.data.prepare.out_folder import OutFolder
from llmtrain.data.prepare.records import Document, Rejection, read_piece
from llmtrain.data.prepare.run_units import LISTED, too_many
from llmtrain.data.prepare.settings import PrepareSettings
from llmtrain.data.prepare.sources import SourceFile, Unit
from llmtrain.data.prepare.worker import UnitRecord
from llmtrain.data.row import RefusedError

_BPE_SAMPLE_BYTES = 128 << 20  # more text does not change the frequent merges; it only takes time and memory


def make_tokenizer(settings: PrepareSettings, work: list[Unit], out: OutFolder) -> None:
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


def examine_ids(
    settings: PrepareSettings, files: list[SourceFile], work: list[Unit], encoder: tokenize.Encoder
) -> bool:
    """Check the first ids of some files and records against the tokenizer.

    Returns True if they begin with the tokens that the tokenizer puts before a text. Raises DataError: they are from
    another tokenizer.
    """
    samples = token_corpora.beginnings([file.path for file in files if file.kind == "tokens"], encoder.separator_id)
    rows = settings.kind.encoder(Path(str(settings.tokenizer)), np.dtype(np.int64), bare=True)
    pieces = [piece for unit in work for piece in unit.pieces if piece.kind != "tokens"]
    for piece in pieces[:1]:
        for item in islice(read_piece(piece, None, settings.max_document_bytes), 20):
            if isinstance(item, Document):
                with suppress(RefusedError):  # a worker rejects it
                    samples += [(piece.label, ids)] if len(ids := rows.ids(rows.record(item.text))[0]) else []
    begins = bool(samples) and token_corpora.examine(samples, encoder)
    # A token that also ends documents need not be the first one of any.
    return begins and not settings.kind.has_rows and encoder.separator_id not in encoder.begin[:1]


def _sample(settings: PrepareSettings, work: list[Unit], out: OutFolder) -> Iterator[str]:
    """Yield the texts to train the BPE on: an equal amount from the beginning of every unit, 128 MiB in all.

    Raises DataError at the end for too many bad records, so that the training is not in vain.
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
            if used >= share or count > settings.max_rejected + LISTED:
                break
    if count > settings.max_rejected:
        raise too_many(settings, out, work, records)


def _records(settings: PrepareSettings, unit: Unit) -> Iterator[Document | Rejection]:
    for piece in unit.pieces:
        yield from read_piece(piece, settings.field, settings.max_document_bytes)
