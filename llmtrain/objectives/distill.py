"""Distillation: the divergence of each counted token's distribution from a teacher's, and the next-token loss."""

from __future__ import annotations

from torch import Tensor

from llmtrain.config.objective import options
from llmtrain.config.run import ObjectiveConfig
from llmtrain.data.stream.loader import MicroBatch, TaughtBatch
from llmtrain.models.distillation import TeacherSays, Terms, TopWords
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
        """`teacher`: None on a rank that computes no loss, and where the data has a teacher's column."""
        self._terms, self._teacher = Terms(**options(config)), teacher

    def weight(self, micro: MicroBatch) -> int:
        """Labels that count."""
        return int((micro.labels != IGNORE).sum())

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[4]."""
        return head.distilled_sums(hidden, micro.labels, self._says(head, hidden, micro), self._terms)

    def _says(self, head: Head, hidden: Tensor, micro: MicroBatch) -> TeacherSays:
        if isinstance(micro, TaughtBatch):
            words, logs = (head.own(each).flatten(0, 1) for each in (micro.words, micro.logs))
            return TopWords(words=words, logs=logs).of
        assert self._teacher is not None
        return self._teacher.logits(micro.inputs, micro.positions)


class Likeliest:
    """An objective that keeps a model's likeliest words in place of each label, micro-batch by micro-batch."""

    figures: tuple[str, ...] = ("loss",)

    def __init__(self, top_k: int, temperature: float) -> None:
        self._top_k, self._temperature = top_k, temperature
        self.found: list[tuple[list[int], Tensor, Tensor]] = []
        """(samples of a micro-batch, words int64 [n, k], logs fp32 [n, k + 1]: see `TopWords`) of its n counted labels,
        on the host, of all ranks that share their rows; in a pipeline on the last stage only."""

    def weight(self, micro: MicroBatch) -> int:
        """Labels that count."""
        return int((micro.labels != IGNORE).sum())

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1]: the mass that the words leave to all others."""
        counted = micro.labels != IGNORE
        own = head.own(counted)
        likeliest = head.top_words(hidden[own], self._top_k, self._temperature)
        words, logs = (
            head.whole(each.new_zeros(*own.shape, each.shape[1]).masked_scatter(own.unsqueeze(-1), each))[counted]
            for each in (likeliest.words, likeliest.logs)
        )
        self.found.append((micro.sample_indices, words.cpu(), logs.cpu()))
        return likeliest.logs[:, -1].exp().sum().unsqueeze(0)
