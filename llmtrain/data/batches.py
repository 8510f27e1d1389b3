"""Micro-batches: sequences as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from llmtrain.data.windows import IGNORED, AnswerWindow, Window


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Input of a rank's forward pass: b sequences of T tokens."""

    inputs: torch.Tensor
    """int64 [b, T]."""
    labels: torch.Tensor
    """int64 [b, T], already shifted: labels[:, t] follows inputs[:, t]. -100 is not counted."""
    sequences: list[int]
    """Number of each sequence (those that only pad a validation batch have none)."""
    positions: torch.Tensor | None = None
    """int64 [b, T] with data.isolate_documents: each token's position in its document. None: 0 to T - 1 in each one."""
    by_token: dict[str, torch.Tensor] = field(default_factory=dict)
    """[b, T, ...]: see `Window.by_token`."""
    counted: int | None = None
    """Number of counted labels, on a device, where counting them would make the host wait."""

    def to(self, device: torch.device) -> Self:
        """Copy with every tensor on `device`; the host does not wait."""
        counted = int((self.labels != IGNORED).sum()) if self.labels.device.type == "cpu" else self.counted
        return replace(self._with(lambda tensor: tensor.to(device, non_blocking=True)), counted=counted)

    def pinned(self) -> Self:
        """Copy in page-locked memory."""
        return self._with(torch.Tensor.pin_memory)

    def columns(self, count: int) -> Self:
        """The first `count` tokens of each sequence."""
        return self._with(lambda tensor: tensor[:, :count])

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: change(tensor) for name, tensor in value.items()}
            return change(value) if isinstance(value, torch.Tensor) else value

        return replace(self, **{name: changed(value) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class AnswerBatch(MicroBatch):
    """Micro-batch of A answers; those of one record follow each other."""

    answers: torch.Tensor
    """int64 [b, T]: the answer that each token belongs to; A: none."""
    rows: torch.Tensor
    """int64 [A]: each answer's row in the split."""
    reference: torch.Tensor | None = None
    """fp32 [A]: log-probability of each answer under the reference, nats."""
    facts: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the kind of row knows of each answer, [A, ...], by name."""
    mismatched: AnswerBatch | None = None
    """This micro-batch's prompts, each with the answer to another one, of a kind that has them. It stays on the host.
    """

    def pinned(self) -> Self:
        mismatched = None if self.mismatched is None else self.mismatched.pinned()
        return replace(super().pinned(), mismatched=mismatched)


def batch_of(windows: Sequence[Window], sequences: list[int]) -> MicroBatch:
    """Micro-batch of windows, of which the first len(sequences) count."""
    return MicroBatch(sequences=sequences, **_stacked(windows, len(sequences)))


def answer_batch_of(windows: Sequence[AnswerWindow], sequences: list[int]) -> AnswerBatch:
    """Micro-batch of windows of answers, of which the first len(sequences) count."""
    given, counted = _stacked(windows, len(sequences)), windows[: len(sequences)]
    total = sum(len(window.rows) for window in counted)
    answers = torch.full_like(given["labels"], total)
    first = 0
    for place, window in enumerate(counted):
        document = (given["positions"][place] == 0).cumsum(0) - 1
        answers[place] = torch.where(document < len(window.rows), document + first, total)
        first += len(window.rows)
    mismatched = [window.mismatched for window in windows if window.mismatched is not None]
    references = [window.reference for window in windows if window.reference is not None]
    return AnswerBatch(
        sequences=sequences,
        **given,
        answers=answers,
        rows=_joined([window.rows for window in windows], len(counted)),
        reference=_joined(references, len(counted)) if references else None,
        facts={name: _joined([window.facts[name] for window in windows], len(counted)) for name in windows[0].facts},
        mismatched=answer_batch_of(mismatched, sequences) if mismatched else None,
    )


def _stacked(windows: Sequence[Window], counted: int) -> dict[str, Any]:
    """Fields of a micro-batch, by name; the labels of windows after the first `counted` are not counted."""

    def stacked(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(parts))

    labels = stacked([window.labels for window in windows])
    labels[counted:] = IGNORED
    positions = [window.positions for window in windows if window.positions is not None]
    return {
        "inputs": stacked([window.inputs for window in windows]),
        "labels": labels,
        "positions": stacked(positions) if positions else None,
        "by_token": {name: stacked([window.by_token[name] for window in windows]) for name in windows[0].by_token},
    }


def _joined(parts: list[np.ndarray], counted: int) -> torch.Tensor:
    """The first `counted` arrays in a row; with none, an empty one of the same type."""
    return torch.from_numpy(np.concatenate([parts[0][:0], *parts[:counted]]))
