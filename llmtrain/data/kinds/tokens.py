"""Token ids instead of text: documents, or rows with counted tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.config.run import DataConfig
from llmtrain.data.kinds.kind import RowKind
from llmtrain.data.kinds.packing import RowReader
from llmtrain.data.kinds.text import Text, TextReader
from llmtrain.data.manifest import Manifest
from llmtrain.data.row import RefusedError, Row
from llmtrain.data.token_stream import TokenStream

_MARKS = ("labels", "loss_mask")
"""Fields of a record that mark its counted tokens."""


@dataclass(frozen=True, kw_only=True)
class Tokens(Text, format="tokens"):
    """Documents as token ids: records with input_ids, or files of Megatron, datatrove or OLMo."""

    title = "token ids"
    tokenizer = "the tokenizer of the token ids"
    also = ()
    reads_records = True
    of_ids = True

    field: str = "input_ids"

    def encoder(self, folder: Path, dtype: np.dtype, bare: bool) -> TokenEncoder:
        return TokenEncoder(folder, self.field, dtype, counted=self.has_rows)

    def encode(self, encoder: Any, record: dict[str, Any]) -> list[Row]:
        return [encoder.row_of(record)]

    def encode_all(self, encoder: Any, texts: list[str]) -> list[list[Row] | str]:
        return RowKind.encode_all(self, encoder, texts)


@dataclass(frozen=True, kw_only=True)
class TokenRows(Tokens, format="token-rows"):
    """Records with input_ids and labels or loss_mask."""

    title = "token ids with labels or loss_mask"
    has_rows = True

    def reader(self, stream: TokenStream, config: DataConfig, manifest: Manifest) -> RowReader | TextReader:
        return RowReader(stream, config, manifest.separator_id)


class TokenEncoder:
    """Makes rows of token ids for the shards, for one worker."""

    dated = False
    too_long = 0
    unread: frozenset[str] = frozenset()

    def __init__(self, folder: Path, field: str, dtype: np.dtype, *, counted: bool) -> None:
        """`field`: field of a record with the ids. `counted`: records say which tokens count.

        Raises DataError: the folder has no usable tokenizer.
        """
        from llmtrain.data.tokenize import Encoder  # a run encodes nothing

        encoder = Encoder(folder)
        self.separator_id, self.vocab_size = encoder.separator_id, encoder.vocab_size
        self._field, self._dtype, self._counted = field, dtype, counted

    def outside(self, ids: np.ndarray, first: int) -> str:
        """Return a sentence on the first id outside the vocabulary, or "". `first`: number of the first id, for it."""
        if not len(ids) or (ids.min() >= 0 and ids.max() < self.vocab_size):
            return ""
        wrong = (ids < 0) | (ids >= self.vocab_size)
        at = int(wrong.argmax())
        return (
            f"the id {ids[at]} at token {first + at} is outside the tokenizer's vocabulary [0, {self.vocab_size}), as "
            f"{wrong.mean():.2%} of this part are: the ids are another tokenizer's; give that one with --tokenizer"
        )

    def row(self, ids: np.ndarray) -> Row:
        """Return a document as a row, without its end token, which the writer of shards adds."""
        ids = ids[:-1] if len(ids) and ids[-1] == self.separator_id and not self._counted else ids
        return Row(ids.astype(self._dtype), np.ones(len(ids) if self._counted else 0, bool))

    def record(self, text: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(text)
        return record

    def ids(self, record: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the record's ids, int64 [tokens], and the record, both without padding. Raises RefusedError."""
        if self._field not in record:
            raise RefusedError(f"no field {self._field!r} (its fields: {', '.join(sorted(record)[:8])}); see --field")
        ids = self._integers(record[self._field], self._field)
        if "attention_mask" in record:
            real = self._bits(ids, record, "attention_mask")
            marks = {name: self._beside(ids, record, name)[real].tolist() for name in _MARKS if name in record}
            record = record | marks
            ids = ids[real]
        return ids, record

    def row_of(self, given: dict[str, Any]) -> Row:
        """Return the row of a record. Raises RefusedError."""
        ids, record = self.ids(given)
        if wrong := self.outside(ids, 0):
            raise RefusedError(wrong)
        marks = [name for name in _MARKS if name in record]
        if not self._counted:
            if marks:
                raise RefusedError(f"it has {marks[0]}, which mark the counted tokens: add --format token-rows")
            row = self.row(ids)
        elif len(marks) != 1:
            raise RefusedError("it has neither labels nor loss_mask" if not marks else "it has labels and loss_mask")
        else:
            row = Row(ids.astype(self._dtype), self._marked(ids, record, marks[0]))
        if not len(row.ids):
            raise RefusedError("empty document")
        return row

    def _marked(self, ids: np.ndarray, record: dict[str, Any], name: str) -> np.ndarray:
        """Return which tokens count, bool [tokens], from the record's field `name`. Raises RefusedError."""
        if name == "loss_mask":
            return self._bits(ids, record, name)
        marks = self._beside(ids, record, name)
        counted = marks != -100
        if (marks[counted] != ids[counted]).any():
            raise RefusedError("each label must be its token's id or -100; do not shift the labels")
        return counted

    def _bits(self, ids: np.ndarray, record: dict[str, Any], name: str) -> np.ndarray:
        """bool [tokens]. Raises RefusedError."""
        marks = self._beside(ids, record, name)
        if not np.isin(marks, (0, 1)).all():
            raise RefusedError(f"{name} holds numbers other than 0 and 1")
        return marks == 1

    def _beside(self, ids: np.ndarray, record: dict[str, Any], name: str) -> np.ndarray:
        """int64 [tokens]. Raises RefusedError."""
        marks = self._integers(record[name], name)
        if len(marks) != len(ids):
            raise RefusedError(f"{len(ids)} {self._field} and {len(marks)} {name}; each token needs one")
        return marks

    @staticmethod
    def _integers(values: Any, name: str) -> np.ndarray:
        """int64 [tokens]. Raises RefusedError."""
        integers = isinstance(values, list) and all(type(each) in (int, bool) for each in values)
        if not integers or any(not -(2**31) <= each < 2**32 for each in values):
            raise RefusedError(f"field {name!r} is not a list of integers")
        return np.array(values, dtype=np.int64)
