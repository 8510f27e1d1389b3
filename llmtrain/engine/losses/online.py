"""The reference of an objective over answers, computed at each step: the model without what its adapter has learnt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
from torch import Tensor

from llmtrain.data.stream.loader import AnswerBatch, MicroBatch, UnpairedBatch
from llmtrain.engine.dist.control import from_all
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.engine.losses.answers import PerAnswer, answers_in, answers_of
from llmtrain.engine.losses.function import Evaluate, LooksAhead, LossFunction
from llmtrain.models.head import Head


class LogProbs(PerAnswer):
    """A loss function that keeps the log-probabilities of answers, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []
        """(rows of the split, int64 [A]; log-probabilities, fp32 [A]) of each, on the device; in a pipeline on the last
        stage only."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1]."""
        batch = answers_in(micro)
        log_prob, _ = answers_of(head, hidden, batch)
        self.found.append((batch.rows, log_prob))
        return head.once(-log_prob.sum().unsqueeze(0))

    def of_all(self, ranks: Ranks, count: int) -> np.ndarray:
        """fp32 [count]: what all ranks have found, by row of the split; NaN where nobody has. All ranks call it
        together."""
        mine = [np.concatenate([part.cpu().numpy() for part in parts]) for parts in zip(*self.found, strict=True)]
        values = np.full(count, np.nan, dtype=np.float32)
        for found in filter(None, from_all(ranks, mine)):
            values[found[0]] = found[1]
        return values


class OnlineReference:
    """A loss function whose reference is the run's own base: before each step it goes over the global batch without a
    gradient. A forward pass more a step, and neither a second model nor a column in the data."""

    def __init__(self, loss: LossFunction, base: Callable[[], AbstractContextManager[None]]) -> None:
        """`base`: a context in which the model computes as its base does."""
        self.figures = loss.figures
        self._loss, self._base = loss, base
        self._known: dict[tuple[int, ...], Tensor] = {}
        """By a micro-batch's samples: of its answers, fp32 [A]."""

    def look(self, micros: list[MicroBatch], evaluate: Evaluate) -> None:
        """The reference's log-probabilities; then what the loss function itself wants to know."""
        given = [answers_in(micro) for micro in micros]
        unpaired = [micro for micro in given if isinstance(micro, UnpairedBatch)]
        others = [micro.mismatched for micro in unpaired]
        with self._base():
            known, of_others = (_log_probs(some, evaluate) for some in (given, others))
        self._known = {tuple(micro.sample_indices): each for micro, each in zip(given, known, strict=False)}
        if not isinstance(self._loss, LooksAhead):
            return
        there: list[MicroBatch] = list(given)
        if of_others:  # else another stage of the pipeline has them, and computes
            there = [
                replace(micro, reference=own, mismatched=replace(micro.mismatched, reference=other))
                for micro, own, other in zip(unpaired, known, of_others, strict=True)
            ]
        self._loss.look(there, evaluate)

    def weight(self, micro: MicroBatch) -> int:
        """The loss function's."""
        return self._loss.weight(micro)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """The loss function's."""
        known = self._known[tuple(micro.sample_indices)]
        return self._loss.sums(head, hidden, replace(answers_in(micro), reference=known))


def _log_probs(micros: list[AnswerBatch], evaluate: Evaluate) -> list[Tensor]:
    collect = LogProbs()
    if micros:
        evaluate(micros, collect)
    return [log_prob for _, log_prob in collect.found]
