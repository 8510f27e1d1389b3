"""Sequences of a run as arrays: inputs, labels, and what else a loss needs of them.

Labels are shifted by one already: labels[t] follows inputs[t].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

IGNORED = -100  # the label that no loss counts; torch's and Hugging Face's default


def ends_in(tokens: np.ndarray, separator_id: int, doubled: bool) -> np.ndarray:
    """bool [..., T] of T + 1 tokens: a document ends there. `doubled`: documents begin with the separator, too."""
    ends: np.ndarray = tokens[..., :-1] == separator_id
    return ends & (tokens[..., 1:] == separator_id) if doubled else ends


def labels_of(
    tokens: np.ndarray, separator_id: int, mask_document_starts: bool, doubled: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels), int64 [T] each, of T + 1 tokens. `doubled`: see `ends_in`.

    With `mask_document_starts` the label after a separator is -100: no token predicts a document's first one.
    """
    inputs = tokens[:-1].astype(np.int64)
    labels = tokens[1:].astype(np.int64)
    if mask_document_starts:
        labels[ends_in(tokens, separator_id, doubled)] = IGNORED
    return inputs, labels


def positions_of(inputs: np.ndarray, separator_id: int, doubled: bool = False) -> np.ndarray:
    """int64 [b, T]: each token's position in its document, from 0 at the start and after every document's end."""
    index = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int64), inputs.shape)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(ends_in(inputs, separator_id, doubled), index[:, 1:], 0)
    return index - np.maximum.accumulate(begins, axis=1)


@dataclass(frozen=True, kw_only=True)
class Window:
    """A sequence for the model, int64 [T] each."""

    inputs: np.ndarray
    labels: np.ndarray
    """-100 is not counted."""
    positions: np.ndarray | None
    """Each token's position in its document; None: the sequence is one text."""
    by_token: dict[str, np.ndarray] = field(default_factory=dict)
    """Numbers of another model for each label, [T, ...]; 0 if it is not counted. Of a teacher's column "words", int64
    [T, k]: the likeliest ones; "logs", fp32 [T, k + 1]: their log-probabilities, and all other words' mass."""

    def emptied(self, separator_id: int) -> Self:
        """Return a sequence of separators with the same shapes, without a counted token or an answer.

        The model reads these tokens, and the balancing loss of experts counts them, instead of the excluded ones.
        """
        return replace(
            self,
            inputs=np.full_like(self.inputs, separator_id),
            labels=np.full_like(self.labels, IGNORED),
            positions=None if self.positions is None else np.arange(len(self.inputs)),
            by_token={name: np.zeros_like(values) for name, values in self.by_token.items()},
        )


@dataclass(frozen=True, kw_only=True)
class AnswerWindow(Window):
    """A sequence whose first documents are answers that an objective compares."""

    rows: np.ndarray
    """Rows of the split that are these documents, int64 [A]; those of one record follow each other."""
    reference: np.ndarray | None = None
    """Their log-probabilities under the reference, fp32 [A], if the run has one."""
    facts: dict[str, np.ndarray] = field(default_factory=dict)
    """What the kind knows of each answer, [A, ...], by name."""
    mismatched: AnswerWindow | None = None
    """The prompts, each with the answer to another one, of a kind that has them. Their rows come after the split's."""

    def emptied(self, separator_id: int) -> Self:
        return replace(
            super().emptied(separator_id),
            rows=self.rows[:0],
            reference=None if self.reference is None else self.reference[:0],
            facts={name: values[:0] for name, values in self.facts.items()},
            mismatched=None if self.mismatched is None else self.mismatched.emptied(separator_id),
        )
