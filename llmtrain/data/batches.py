"""Micro-batches: sequences as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from llmtrain.data.sequences import IGNORED, AnswerSequence, TokenSequence


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Input of a rank's forward pass: b sequences of T tokens."""

    inputs: torch.Tensor
    """int64 [b, T]."""
    labels: torch.Tensor
    """int64 [b, T], already shifted: labels[:, t] follows inputs[:, t]. -100 is not counted."""
    sequences: list[int]
    """Number of each sequence. Sequences that only pad a validation batch come last and have none."""
    positions: torch.Tensor | None = None
    """int64 [b, T]: each token's position in its document, with data.isolate_documents; None: 0 to T - 1."""
    by_token: dict[str, torch.Tensor] = field(default_factory=dict)
    """[b, T, ...]: see `TokenSequence.by_token`."""
    counted: int | None = None
    """Number of counted labels of a batch on a device, counted before: there the host would have to wait for it."""

    def to(self, device: torch.device) -> Self:
        """Return a copy with every tensor on `device`, without waiting for the copies."""
        counted = int((self.labels != IGNORED).sum()) if self.labels.device.type == "cpu" else self.counted
        return replace(self._with(lambda tensor: tensor.to(device, non_blocking=True)), counted=counted)

    def pinned(self) -> Self:
        """Return a copy in page-locked memory."""
        return self._with(torch.Tensor.pin_memory)

    def columns(self, count: int) -> Self:
        """Return the micro-batch with the first `count` tokens of each sequence."""
        return self._with(lambda tensor: tensor[:, :count])

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: change(tensor) for name, tensor in value.items()}
            return change(value) if isinstance(value, torch.Tensor) else value

        return replace(self, **{name: changed(value) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class AnswerBatch(MicroBatch):
    """Micro-batch of A answers; the answers of one record follow each other."""

    answers: torch.Tensor
    """int64 [b, T]: number of the answer with this token; A for a token of no answer."""
    rows: torch.Tensor
    """int64 [A]: each answer's row in the split."""
    reference: torch.Tensor | None = None
    """fp32 [A]: log-probability of each answer under the reference, nats."""
    facts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further values of each answer by name, [A, ...], such as its label; the kind of row defines them."""
    mismatched: AnswerBatch | None = None
    """This micro-batch's prompts, each with the answer to another one, of a kind that has them. It stays on the host.
    """

    def pinned(self) -> Self:
        mismatched = None if self.mismatched is None else self.mismatched.pinned()
        return replace(super().pinned(), mismatched=mismatched)


def batch_of(sequences: Sequence[TokenSequence], numbers: list[int]) -> MicroBatch:
    """Make a micro-batch. Only the first len(numbers) of `sequences` count; the others fill it up."""
    return MicroBatch(sequences=numbers, **_stacked(sequences, len(numbers)))


def answer_batch_of(sequences: Sequence[AnswerSequence], numbers: list[int]) -> AnswerBatch:
    """Make a micro-batch of answers. Only the first len(numbers) of `sequences` count; the others fill it up."""
    given, counted = _stacked(sequences, len(numbers)), sequences[: len(numbers)]
    total = sum(len(sequence.rows) for sequence in counted)
    answers = torch.full_like(given["labels"], total)
    first = 0
    for place, sequence in enumerate(counted):
        document = (given["positions"][place] == 0).cumsum(0) - 1
        answers[place] = torch.where(document < len(sequence.rows), document + first, total)
        first += len(sequence.rows)
    mismatched = [sequence.mismatched for sequence in sequences if sequence.mismatched is not None]
    references = [sequence.reference for sequence in sequences if sequence.reference is not None]
    return AnswerBatch(
        sequences=numbers,
        **given,
        answers=answers,
        rows=_joined([sequence.rows for sequence in sequences], len(counted)),
        reference=_joined(references, len(counted)) if references else None,
        facts={
            name: _joined([sequence.facts[name] for sequence in sequences], len(counted)) for name in sequences[0].facts
        },
        mismatched=answer_batch_of(mismatched, numbers) if mismatched else None,
    )


def _stacked(sequences: Sequence[TokenSequence], counted: int) -> dict[str, Any]:
    """Return the fields of a micro-batch by name. Only labels of the first `counted` sequences count."""

    def stacked(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(parts))

    labels = stacked([sequence.labels for sequence in sequences])
    labels[counted:] = IGNORED
    positions = [sequence.positions for sequence in sequences if sequence.positions is not None]
    return {
        "inputs": stacked([sequence.inputs for sequence in sequences]),
        "labels": labels,
        "positions": stacked(positions) if positions else None,
        "by_token": {
            name: stacked([sequence.by_token[name] for sequence in sequences]) for name in sequences[0].by_token
        },
    }


def _joined(parts: list[np.ndarray], counted: int) -> torch.Tensor:
    """Concatenate the first `counted` arrays. With `counted` 0 the result is empty and has the arrays' type."""
    return torch.from_numpy(np.concatenate([parts[0][:0], *parts[:counted]]))
