"""Distillation: the divergence of each counted token's distribution from a teacher's, and the next-token loss."""

from __future__ import annotations

from torch import Tensor

from llmtrain.config.objective import options
from llmtrain.config.run import ObjectiveConfig
from llmtrain.data.loader import MicroBatch
from llmtrain.models.distillation import Terms
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE
from llmtrain.models.teacher import Teacher


class Distill:
    """The loss of `models/distillation.py`, per counted token."""

    figures: tuple[str, ...] = (
        "loss",
        "distill/divergence",
        "distill/next_token_loss",
        "distill/teacher_entropy",
    )

    def __init__(self, config: ObjectiveConfig, teacher: Teacher | None) -> None:
        """`teacher`: None on a rank that computes no loss."""
        self._terms, self._teacher = Terms(**options(config)), teacher

    def weight(self, micro: MicroBatch) -> int:
        """Labels that count."""
        return int((micro.labels != IGNORE).sum())

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[4]."""
        assert self._teacher is not None
        teacher = self._teacher.logits(micro.inputs, micro.positions)
        return head.distilled_sums(hidden, micro.labels, teacher, self._terms)
