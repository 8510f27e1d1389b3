"""Proofs that a rank's module computes the loss that transformers' own logits give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.base.errors import ModelError
from llmtrain.data.batches import MicroBatch
from llmtrain.engine.api import Engine
from llmtrain.engine.losses.function import NEXT_TOKEN, LossFunction, NextTokenLoss
from llmtrain.models.head import Head
from llmtrain.models.language import compare_losses
from llmtrain.models.loss import IGNORE
from llmtrain.models.score import gives_scores


class _LastScore:
    """The score of the last token in rows [1, T], for a proof."""

    figures: tuple[str, ...] = ("loss",)

    def __init__(self, *, given: bool = False) -> None:
        """`given`: `sums` gets the model's own scores instead of the hidden state."""
        self._given = given

    def weight(self, micro: MicroBatch) -> int:
        return len(micro.inputs)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1]."""
        last = torch.full((1,), micro.labels.numel() - 1, device=hidden.device)
        scores = hidden.float() if self._given else head.scores_at(hidden, last)
        return head.once(scores.sum().unsqueeze(0))


class _OfLogits(NextTokenLoss):
    """The next-token loss by torch, from logits instead of the hidden state."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        logits, labels = (head.own(each).flatten(0, 1) for each in (hidden.float(), micro.labels))
        return F.cross_entropy(logits, labels, reduction="sum").unsqueeze(0)


def check_head(engine: Engine, inputs: Tensor) -> None:
    """Prove on `inputs` [1, T] that the loss equals the loss of transformers' logits: a layout, a precision or a head
    may silently train on a wrong one. All ranks call it. Raises ModelError."""
    module = engine.module
    micro = MicroBatch(inputs=inputs, labels=inputs.roll(-1, dims=1), sample_indices=[])
    scores = gives_scores(module.config)
    ours, _ = engine.evaluate([micro], _LastScore() if scores else NEXT_TOKEN)
    module.wants_logits = True
    try:
        theirs, _ = engine.evaluate([micro], _LastScore(given=True) if scores else _OfLogits())
    finally:
        module.wants_logits = False
    compare_losses(module.hf, ours["loss"], theirs["loss"])


def check_isolation(engine: Engine, inputs: Tensor) -> None:
    """Prove on `inputs` [1, T], as two documents, that they are isolated. All ranks call it. Raises ModelError."""
    half = inputs.shape[1] // 2
    positions = torch.arange(inputs.shape[1]).remainder(half).unsqueeze(0)
    labels = inputs.roll(-1, dims=1)
    labels[:, :half] = IGNORE
    other = inputs.clone()
    other[:, :half] = inputs[:, :half].flip(1).roll(1, dims=1)
    last: LossFunction = _LastScore() if gives_scores(engine.module.config) else NEXT_TOKEN
    losses = []
    for tokens in (inputs, other):
        micro = MicroBatch(inputs=tokens, labels=labels, sample_indices=[], positions=positions)
        losses.append(engine.evaluate([micro], last)[0]["loss"])
    if not abs(losses[0] - losses[1]) <= 1e-5 * max(1.0, abs(losses[0])):
        raise ModelError(
            "data.isolate_documents: with other tokens in a row's first document the loss of its second changes "
            f"from {losses[0]:.6f} to {losses[1]:.6f}. This model makes its attention mask without positions; set "
            "data.isolate_documents to false."
        )
