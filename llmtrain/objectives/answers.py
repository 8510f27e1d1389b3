"""The answers in a micro-batch, and their counted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.data.stream.loader import AnswerBatch, MicroBatch
from llmtrain.models.loss import IGNORE


def answers_in(micro: MicroBatch) -> AnswerBatch:
    """The micro-batch of a loader of preferences or of unpaired answers."""
    assert isinstance(micro, AnswerBatch)
    return micro


def counted_tokens(micro: AnswerBatch) -> Tensor:
    """fp32 [A]: counted tokens of each answer."""
    none = torch.zeros(len(micro.rows) + 1, device=micro.labels.device)  # the last: tokens that belong to no answer
    return none.index_add(0, micro.answers.flatten(), (micro.labels != IGNORE).flatten().float())[:-1]
