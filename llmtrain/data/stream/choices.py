"""Prepared multiple-choice questions as batches, and their figures from the log-probability of each choice.

A row is a question with one of its choices. It has a row of the batch for itself and is padded on the right, so that
any causal model can be measured, whatever the run does with documents. A row longer than `data.sequence_length` loses
its beginning, as in lm-eval (0.4.13, `HFLM._loglikelihood_tokens`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from llmtrain.base.errors import DataError
from llmtrain.data.batches import AnswerBatch
from llmtrain.data.kinds.choices import Choices
from llmtrain.data.sequences import IGNORED
from llmtrain.data.shards import PreparedSet

_NARROWEST = 32
"""Row length of the shortest batches in tokens. Others have a power of 2 times as many, so that shapes are few: a
pipeline takes one shape at a time."""


class ChoiceSet:
    """The questions of a folder prepared with `llmtrain prepare --format choices`."""

    def __init__(
        self,
        folder: str | Path,
        *,
        sequence_length: int,
        shared: int = 1,
        cache: str | None = None,
    ) -> None:
        """`sequence_length`: most tokens that the model may see at once. `shared`: number of ranks that share a row.

        Raises DataError when the folder holds other data, or a choice without its question is too long.
        """
        self.prepared = PreparedSet(folder, cache)
        kind = self.prepared.kind
        if not isinstance(kind, Choices):
            raise DataError(
                f"{folder}: holds no multiple-choice questions; prepare them with --format choices, or name a folder "
                "of texts or conversations in eval.sets"
            )
        self._stream = self.prepared.split("validation")
        self._entries, self._lengths = self._stream.entries(kind.entry), self._stream.row_lengths()
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._first = np.flatnonzero(self._entries["first"])
        self._tokens = self._stream.read(0, self._stream.tokens)
        self._check()
        counted = self._stream.counted(0, self._stream.tokens)
        assert counted is not None
        longest = int(np.add.reduceat(counted, self._starts, dtype=np.int64).max())
        if longest > sequence_length:
            raise DataError(
                f"{folder}: its longest choice has {longest} tokens, data.sequence_length is {sequence_length}, and "
                "only questions are cut; raise that, or leave the record out"
            )
        self._fed = np.minimum(self._lengths - 1, sequence_length)
        self._shared, self._length = shared, sequence_length
        self.cut = int((self._lengths - 1 > sequence_length).sum())
        """Number of rows that lose their beginning."""

    def _check(self) -> None:
        """Check the rows' entries. Raises DataError: they are damaged."""
        right = self._entries["right"]
        whole = len(self._first) > 0 and self._first[0] == 0 and bool(self._entries["characters"].all())
        if not whole or (np.add.reduceat(right, self._first, dtype=np.int64) != 1).any():
            wrong = "not each of its questions has one answer"
        elif (largest := int(self._tokens.max())) >= self.prepared.manifest.vocab_size:
            wrong = f"holds the id {largest}, outside the vocabulary [0, {self.prepared.manifest.vocab_size})"
        else:
            return
        raise DataError(
            f"{self.prepared.name}: {wrong}: it is damaged; copy it again, or delete it and prepare it again"
        )

    @property
    def rows(self) -> int:
        return len(self._lengths)

    def batches(
        self, tokens: int, rank: int, data_parallel: int, *, pin_memory: bool = False
    ) -> Iterator[list[AnswerBatch]]:
        """Yield lists of this rank's micro-batches. A list has one shape, and all ranks get equally many of each shape.

        `tokens`: largest number of tokens in a micro-batch, padding included.
        """
        widths = np.array([self._width(int(fed)) for fed in self._fed])
        for width in np.unique(widths)[::-1].tolist():  # the largest first: too little memory shows at once
            rows = np.flatnonzero(widths == width)
            each = max(1, min(tokens // width, -(-len(rows) // data_parallel)))
            yield [
                self._batch(rows[start + rank * each : start + (rank + 1) * each], each, width, pin_memory)
                for start in range(0, len(rows), each * data_parallel)
            ]

    def _width(self, fed: int) -> int:
        width = max(_NARROWEST, 1 << (fed - 1).bit_length())
        return min(self._length, -(-width // self._shared) * self._shared)

    def _batch(self, rows: np.ndarray, height: int, width: int, pin_memory: bool) -> AnswerBatch:
        """Make a micro-batch of shape [height, width]; rows that only fill it up do not count."""
        inputs = np.full((height, width), self.prepared.manifest.separator_id, dtype=np.int64)
        labels = np.full((height, width), IGNORED, dtype=np.int64)
        answers = np.full((height, width), len(rows), dtype=np.int64)
        for place, row in enumerate(rows.tolist()):
            fed = int(self._fed[row])
            begin = int(self._starts[row] + self._lengths[row]) - fed - 1
            ids = self._tokens[begin : begin + fed + 1].astype(np.int64)
            counted = self._stream.counted(begin, fed + 1)
            assert counted is not None
            inputs[place, :fed], answers[place] = ids[:-1], place
            labels[place, :fed] = np.where(counted[1:], ids[1:], IGNORED)
        batch = AnswerBatch(
            inputs=torch.from_numpy(inputs),
            labels=torch.from_numpy(labels),
            sequences=rows.tolist(),
            answers=torch.from_numpy(answers),
            rows=torch.from_numpy(rows),
        )
        return batch.pinned() if pin_memory else batch

    def chosen(self, log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of each question's likeliest choice, without and with division by its characters.

        Both are int64 [questions], -1 where a log-probability is not finite. `log_probs`: nats [rows].
        """
        by_character = log_probs / self._entries["characters"]
        bounds = zip(self._first, [*self._first[1:], self.rows], strict=True)
        found = [
            [
                int(each[begin:end].argmax()) if np.isfinite(each[begin:end]).all() else -1
                for each in (log_probs, by_character)
            ]
            for begin, end in bounds
        ]
        best, normalised = np.array(found, dtype=np.int64).T
        return best, normalised

    def figures(self, log_probs: np.ndarray) -> dict[str, float]:
        """Return accuracy, accuracy_norm (log-probabilities divided by the choice's characters) and bits_per_byte.

        The first two are lm-eval's acc and acc_norm; the last is of the right choices. `log_probs`: nats [rows].
        """
        right = np.flatnonzero(self._entries["right"])
        places = right - self._first
        best, normalised = self.chosen(log_probs)
        bits = -float(log_probs[right].sum(dtype=np.float64)) / math.log(2)
        return {
            "accuracy": float((best == places).mean()),
            "accuracy_norm": float((normalised == places).mean()),
            "bits_per_byte": bits / int(self._entries["bytes"][right].sum(dtype=np.int64)),
        }
