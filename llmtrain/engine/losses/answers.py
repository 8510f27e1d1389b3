"""The answers in a micro-batch, and their counted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.data.stream.loader import AnswerBatch, MicroBatch
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE


def answers_in(micro: MicroBatch) -> AnswerBatch:
    """The micro-batch of a loader of preferences or of unpaired answers."""
    assert isinstance(micro, AnswerBatch)
    return micro


class PerAnswer:
    """Base of a loss function whose divisor is the answers."""

    figures: tuple[str, ...] = ("loss",)

    def weight(self, micro: MicroBatch) -> int:
        """Answers."""
        return len(answers_in(micro).rows)


def counted_tokens(micro: AnswerBatch) -> Tensor:
    """fp32 [A]: counted tokens of each answer."""
    none = torch.zeros(len(micro.rows) + 1, device=micro.labels.device)  # the last: tokens that belong to no answer
    return none.index_add(0, micro.answers.flatten(), (micro.labels != IGNORE).flatten().float())[:-1]


def answers_of(head: Head, hidden: Tensor, micro: AnswerBatch) -> tuple[Tensor, Tensor]:
    """(log-probability, counted tokens) of each answer of a micro-batch, fp32 [A]; on all ranks that share its rows.

    hidden: [B, t, H], what the loss was given.
    """
    nll, answers = head.token_nll(hidden, micro.labels, micro.counted).flatten(), micro.answers.flatten()
    # The last one is of tokens that belong to no answer. Summed in fp64: a GPU adds in any order, and one answer's
    # log-probability, rounded once, is the same in training as it was in the reference.
    none = nll.new_zeros(len(micro.rows) + 1, dtype=torch.float64)
    sums = none.index_add(0, answers, nll.double())[:-1].float()
    return -sums, counted_tokens(micro)


def last_tokens(batch: AnswerBatch) -> Tensor:
    """int64 [A]: where each answer's last counted token lies in the micro-batch's inputs, flattened."""
    labels, answers = batch.labels.flatten(), batch.answers.flatten()
    places = torch.arange(labels.numel(), device=labels.device).where(labels != IGNORE, -1)
    none = places.new_full((len(batch.rows) + 1,), -1)  # the last one is of tokens that belong to no answer
    labelled = none.scatter_reduce(0, answers, places, "amax")[:-1]
    return labelled + 1  # the label at t is the token at t + 1, which is in the same row
