"""Sequences of a run as arrays: inputs, labels, and what else a loss needs of them.

Labels are shifted by one already: labels[t] follows inputs[t].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

IGNORED = -100  # the label that no loss counts; torch's and Hugging Face's default


def ends_in(tokens: np.ndarray, separator_id: int, doubled: bool) -> np.ndarray:
    """Return where documents end, bool [..., T], in T + 1 tokens. `doubled`: documents also begin with a separator."""
    ends: np.ndarray = tokens[..., :-1] == separator_id
    return ends & (tokens[..., 1:] == separator_id) if doubled else ends


def labels_of(
    tokens: np.ndarray, separator_id: int, mask_document_starts: bool, doubled: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, labels), int64 [T] each, of T + 1 tokens. `doubled`: see `ends_in`.

    With `mask_document_starts` the label after a separator is -100, because no token predicts a document's first one.
    """
    inputs = tokens[:-1].astype(np.int64)
    labels = tokens[1:].astype(np.int64)
    if mask_document_starts:
        labels[ends_in(tokens, separator_id, doubled)] = IGNORED
    return inputs, labels


def positions_of(inputs: np.ndarray, separator_id: int, doubled: bool = False) -> np.ndarray:
    """Return each token's position in its document, int64 [b, T]: 0 at the start and after each document's end."""
    index = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int64), inputs.shape)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(ends_in(inputs, separator_id, doubled), index[:, 1:], 0)
    return index - np.maximum.accumulate(begins, axis=1)


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """A sequence for the model, int64 [T] each."""

    inputs: np.ndarray
    labels: np.ndarray
    """Label of each token; -100 is not counted."""
    positions: np.ndarray | None
    """Each token's position in its document; None: the sequence is one text."""
    by_token: dict[str, np.ndarray] = field(default_factory=dict)
    """Values of another model for each label, [T, ...]; 0 where it is not counted. From a teacher: "words", int64
    [T, k], the k likeliest tokens; "logs", fp32 [T, k + 1], their log-probabilities and that of all others."""

    def emptied(self, separator_id: int) -> Self:
        """Return a sequence of the same shapes that holds only separators, without a counted token or an answer.

        The model reads it in place of an excluded sequence, and the balancing loss of experts counts its tokens.
        """
        return replace(
            self,
            inputs=np.full_like(self.inputs, separator_id),
            labels=np.full_like(self.labels, IGNORED),
            positions=None if self.positions is None else np.arange(len(self.inputs)),
            by_token={name: np.zeros_like(values) for name, values in self.by_token.items()},
        )


@dataclass(frozen=True, kw_only=True)
class AnswerSequence(TokenSequence):
    """A sequence whose first documents are answers that an objective compares."""

    rows: np.ndarray
    """Number of each answer's row in the split, int64 [A]; the answers of one record follow each other."""
    reference: np.ndarray | None = None
    """Log-probability of each answer under the reference, fp32 [A], if the run has a reference."""
    facts: dict[str, np.ndarray] = field(default_factory=dict)
    """Further values of each answer by name, [A, ...], such as its label; the kind of row defines them."""
    mismatched: AnswerSequence | None = None
    """The same prompts, each with the answer to another prompt, for kinds of row that need them. Their row numbers
    follow those of the split."""

    def emptied(self, separator_id: int) -> Self:
        return replace(
            super().emptied(separator_id),
            rows=self.rows[:0],
            reference=None if self.reference is None else self.reference[:0],
            facts={name: values[:0] for name, values in self.facts.items()},
            mismatched=None if self.mismatched is None else self.mismatched.emptied(separator_id),
        )
