"""Loss functions over a model's likeliest tokens: distillation, and a collector for a teacher's column."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from llmtrain.data.batches import MicroBatch
from llmtrain.engine.losses.function import PerToken, figures_of
from llmtrain.models.distillation import TeacherSays, Terms, TopWords
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE
from llmtrain.objectives.by_token import Distill

if TYPE_CHECKING:
    from llmtrain.models.teacher import Teacher


class DistillLoss(PerToken):
    """The loss of `models/distillation.py`, per counted token."""

    def __init__(self, objective: Distill, teacher: Teacher | None) -> None:
        """`teacher`: None on a rank that computes no loss, and for data with a teacher's column."""
        self.figures = figures_of(objective)
        self._terms = Terms(beta=objective.beta, temperature=objective.temperature, alpha=objective.alpha)
        self._teacher = teacher

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the sums of the four figures, [4]."""
        return head.distilled_sums(hidden, micro.labels, self._says(head, hidden, micro), self._terms)

    def _says(self, head: Head, hidden: Tensor, micro: MicroBatch) -> TeacherSays:
        if self._teacher is not None:
            return self._teacher.logits(micro.inputs, micro.positions)
        words, logs = (head.own(micro.by_token[name]).flatten(0, 1) for name in ("words", "logs"))
        return TopWords(words=words, logs=logs).of


class Likeliest(PerToken):
    """Collects a model's likeliest tokens at each label, for the teacher's column that `llmtrain reference` writes."""

    def __init__(self, top_k: int, temperature: float) -> None:
        self._top_k, self._temperature = top_k, temperature
        self.found: list[tuple[list[int], Tensor, Tensor]] = []
        """(numbers of a micro-batch's sequences; token ids, int64 [n, k]; log-probabilities, fp32 [n, k + 1], see
        `TopWords`) for its n counted labels. They are on the host, complete on all ranks that share the rows; in a
        pipeline only on the last stage."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the summed probability of all other tokens, [1]."""
        counted = micro.labels != IGNORE
        own = head.own(counted)
        likeliest = head.top_words(hidden[own], self._top_k, self._temperature)
        words, logs = (
            head.whole(each.new_zeros(*own.shape, each.shape[1]).masked_scatter(own.unsqueeze(-1), each))[counted]
            for each in (likeliest.words, likeliest.logs)
        )
        self.found.append((micro.sequences, words.cpu(), logs.cpu()))
        return likeliest.logs[:, -1].exp().sum().unsqueeze(0)
