"""Rows of prepared conversations with their counted tokens, and documents of texts, for people."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmtrain.base.errors import DataError
from llmtrain.data.manifest import Manifest, Split
from llmtrain.data.sequences import ends_in
from llmtrain.data.shards import PreparedSet
from llmtrain.data.token_stream import TokenStream
from llmtrain.data.tokenize import Encoder

_SHOWN_TOKENS = 2000
"""Most tokens of a text that are shown, because a document may be a book."""
_READ_TOKENS = 4 << 20


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens that are alike: all counted or none, all text or one special token."""

    text: str
    counted: bool
    special: bool
    """True if this is one special token, shown by its name."""


@dataclass(frozen=True)
class Shown:
    heading: str
    runs: list[Run]


def shown_text(data: PreparedSet, encoder: Encoder, split: Split, index: int) -> Shown:
    """Return document `index` of a split of texts, shortened. Raises DataError."""
    stream, documents = data.split(split), data.manifest.documents[split]
    if not 0 <= index < documents:
        raise DataError(f"--index {index}: the {split} split of {data.name} has documents 0 to {documents - 1}")
    start, end = _document(stream, data.manifest, index)
    ids = stream.read(start, min(end - start, _SHOWN_TOKENS))
    more = f", the first {_SHOWN_TOKENS} of them" if end - start > _SHOWN_TOKENS else ""
    heading = f"document {index} of {split}: {end - start} tokens{more}"
    return Shown(heading, _runs(ids.tolist(), np.ones(len(ids), bool), encoder))


def _document(stream: TokenStream, manifest: Manifest, index: int) -> tuple[int, int]:
    begin = at = seen = 0
    while at < stream.tokens:
        length = min(_READ_TOKENS, stream.tokens - at)
        ids = np.append(stream.read(at, min(length + 1, stream.tokens - at)), manifest.separator_id)  # after the last
        ends = np.flatnonzero(ends_in(ids[: length + 1], manifest.separator_id, manifest.doubled))
        if index < seen + len(ends):
            begin = begin if index == seen else at + int(ends[index - seen - 1]) + 1
            return begin, at + int(ends[index - seen]) + 1
        begin = at + int(ends[-1]) + 1 if len(ends) else begin
        seen, at = seen + len(ends), at + length
    return begin, stream.tokens


def shown_row(data: PreparedSet, encoder: Encoder, split: Split, index: int) -> Shown:
    stream = data.split(split)
    lengths = stream.row_lengths()
    if not 0 <= index < len(lengths):
        raise DataError(f"--index {index}: the {split} split of {data.name} has rows 0 to {len(lengths) - 1}")
    start, length = int(lengths[:index].sum()), int(lengths[index])
    ids, counted = stream.read(start, length), stream.counted(start, length)
    assert counted is not None
    about = data.kind.about(stream, index)
    heading = f"row {index} of {split}{about}: {length} tokens, {int(counted.sum())} counted"
    return Shown(heading, _runs(ids.tolist(), counted, encoder))


def _runs(ids: list[int], counted: np.ndarray, encoder: Encoder) -> list[Run]:
    runs: list[Run] = []
    begin = 0
    for at in range(1, len(ids) + 1):
        special = ids[begin] in encoder.special
        same = at < len(ids) and counted[at] == counted[begin] and not special and ids[at] not in encoder.special
        if not same:
            runs.append(Run(encoder.decode(ids[begin:at]), bool(counted[begin]), special))
            begin = at
    return runs
