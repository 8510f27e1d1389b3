"""Texts: packed end to end, each followed by the separator.

Sequence i of a split is its tokens [i*T, i*T + T + 1): inputs are the first T, labels the last T, so labels are already
shifted by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmtrain.config.run import DataConfig
from llmtrain.data.kinds.kind import RowKind
from llmtrain.data.manifest import Manifest
from llmtrain.data.row import Row
from llmtrain.data.sequences import IGNORED, TokenSequence, labels_of, positions_of
from llmtrain.data.token_stream import TokenStream

if TYPE_CHECKING:
    from llmtrain.data.kinds.packing import RowReader
    from llmtrain.data.origins import Origin, Origins
    from llmtrain.data.tokenize import Encoder


@dataclass(frozen=True, kw_only=True)
class Text(RowKind, format="text"):
    """Text, in files of any of these formats."""

    title = "texts"
    tokenizer = ""
    also: ClassVar[tuple[str, ...]] = ("auto", "jsonl", "parquet")
    templated = False
    has_rows = False
    reads_records = False

    field: str = "text"

    def encoder(self, folder: Path, dtype: np.dtype, bare: bool) -> Any:
        from llmtrain.data.tokenize import Encoder  # a run encodes nothing

        return Encoder(folder, bare=bare)

    def encode_all(self, encoder: Encoder, texts: list[str]) -> list[list[Row] | str]:
        # A tokenizer may drop all characters that it does not know.
        none = "the tokenizer gives no token for it"
        return [[Row(encoder.document(ids), ids[:0])] if len(ids) else none for ids in encoder.encode(texts)]

    def reader(self, stream: TokenStream, config: DataConfig, manifest: Manifest) -> TextReader | RowReader:
        return TextReader(stream, config, manifest.separator_id, manifest.doubled)


def sequences_in(tokens: int, sequence_length: int) -> int:
    """Return the number of sequences; each needs one more token for its last label, which the next one begins with."""
    return max(0, (tokens - 1) // sequence_length)


class TextReader:
    """Reads sequences of texts that are joined end to end."""

    taught: Any = None
    """The teacher's column of the split (`Taught`), if the run has one."""

    def __init__(self, stream: TokenStream, config: DataConfig, separator_id: int, doubled: bool = False) -> None:
        self.stream, self._config, self._separator_id, self._doubled = stream, config, separator_id, doubled
        self.count = sequences_in(stream.tokens, config.sequence_length)

    def read(self, index: int) -> TokenSequence:
        length = self._config.sequence_length
        tokens = self.stream.read(index * length, length + 1)
        inputs, labels = labels_of(tokens, self._separator_id, self._config.mask_document_starts, self._doubled)
        isolated = self._config.isolate_documents
        positions = positions_of(inputs[None], self._separator_id, self._doubled)[0] if isolated else None
        return TokenSequence(inputs=inputs, labels=labels, positions=positions)

    def fetch(self, indices: Iterable[int]) -> None:
        """Read these sequences from a store concurrently. Raises DataError."""
        length = self._config.sequence_length
        self.stream.fetch((index * length, length + 1) for index in indices)

    def begin(self, index: int) -> int:
        return index * self._config.sequence_length

    def origins(self, index: int, known: Origins) -> Iterator[Origin]:
        """Yield the documents in a sequence; of the first and the last it may hold only a part."""
        length = self._config.sequence_length
        return known.within(index * length, (index + 1) * length)

    def sequences_of(self, origin: Origin) -> range:
        """Return the sequences with parts of a document. Tokens after the last sequence are in none."""
        length = self._config.sequence_length
        return range(origin.begin // length, min(self.count, (origin.end - 1) // length + 1))

    @property
    def context(self) -> list[Any] | None:
        """Settings that change which tokens a prediction sees."""
        config = self._config
        return [config.sequence_length, config.isolate_documents, config.mask_document_starts]

    @property
    def place_count(self) -> int:
        """Number of places in a teacher's column (stream/reference_and_teacher.py)."""
        return self.count * self._config.sequence_length

    def places(self, index: int, sequence: TokenSequence) -> np.ndarray:
        """Return the places of the sequence's counted labels in a teacher's column, int64 [labels]."""
        return index * self._config.sequence_length + np.flatnonzero(sequence.labels != IGNORED)
