"""Loss functions over answers: those of objectives, a collector of log-probabilities, and the online reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.data.batches import AnswerBatch, MicroBatch
from llmtrain.data.kinds import RowKind
from llmtrain.engine.losses.function import Evaluate, LooksAhead, LossFunction, checked_terms, figures_of
from llmtrain.engine.ranks.plugin_code import called
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE
from llmtrain.objectives.preferences import Answers, OverAnswers, OverPairs


def answers_in(micro: MicroBatch) -> AnswerBatch:
    assert isinstance(micro, AnswerBatch)
    return micro


class PerAnswer:
    """Base of a loss function whose divisor is the number of answers."""

    figures: tuple[str, ...] = ("loss",)

    def weight(self, micro: MicroBatch) -> int:
        return len(answers_in(micro).rows)


def counted_tokens(micro: AnswerBatch) -> Tensor:
    """Return the number of counted tokens of each answer, fp32 [A]."""
    none = torch.zeros(len(micro.rows) + 1, device=micro.labels.device)  # one more: tokens of no answer
    return none.index_add(0, micro.answers.flatten(), (micro.labels != IGNORE).flatten().float())[:-1]


def answers_of(head: Head, hidden: Tensor, micro: AnswerBatch) -> tuple[Tensor, Tensor]:
    """Return (log-probability, number of counted tokens) of each answer, fp32 [A], on all ranks that share the rows.
    `hidden`: [B, t, H], as `LossFunction.sums` gets it."""
    nll, answers = head.token_nll(hidden, micro.labels, micro.counted).flatten(), micro.answers.flatten()
    # One entry more, for tokens of no answer. Summed in fp64: a GPU adds in any order, but an answer's log-probability,
    # rounded once, is the same in training as it was in the reference.
    none = nll.new_zeros(len(micro.rows) + 1, dtype=torch.float64)
    sums = none.index_add(0, answers, nll.double())[:-1].float()
    return -sums, counted_tokens(micro)


def last_tokens(batch: AnswerBatch) -> Tensor:
    """Return the index of each answer's last counted token in the flattened inputs, int64 [A]."""
    labels, answers = batch.labels.flatten(), batch.answers.flatten()
    places = torch.arange(labels.numel(), device=labels.device).where(labels != IGNORE, -1)
    none = places.new_full((len(batch.rows) + 1,), -1)  # one more: tokens of no answer
    last = none.scatter_reduce(0, answers, places, "amax")[:-1]
    return last + 1  # the label at t is the token at t + 1, in the same row


def terms_over(objective: OverAnswers, answers: Answers) -> tuple[Tensor, ...]:
    """Return the objective's terms for each record, fp32 [R] each. Raises ModelError if a plugin returns others."""
    key, method = f"objective.name {objective.name}", method_of(objective)
    terms = called(objective, key, method, lambda: objective.terms(answers))
    like = answers.score if objective.scores else answers.log_prob
    return checked_terms(key, objective, method, terms, like[:, 0] if like.dim() > 1 else like)


def method_of(objective: OverAnswers) -> str:
    """Return the name of the method that a plugin's class defines: `losses` for an objective over pairs, else
    `terms`."""
    return "losses" if isinstance(objective, OverPairs) else "terms"


class AnswerLoss:
    """The terms of an objective over answers, summed over records."""

    kl = math.nan

    def __init__(self, objective: OverAnswers, kind: RowKind) -> None:
        self.figures, self._objective, self._together = figures_of(objective), objective, kind.together

    def weight(self, micro: MicroBatch) -> int:
        return len(answers_in(micro).rows) // self._together

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        batch, measured = answers_in(micro), dict[str, Tensor]()
        if self._objective.scores:
            measured = {"score": head.scores_at(hidden, last_tokens(batch)), "tokens": counted_tokens(batch)}
        else:
            measured["log_prob"], measured["tokens"] = answers_of(head, hidden, batch)
            if batch.reference is not None:
                measured["reference"] = batch.reference
        answers = Answers(
            **{name: self._by_record(each) for name, each in measured.items()},
            facts={name: self._by_record(each) for name, each in batch.facts.items()},
            kl=self.kl,
            log_sigmoid=F.logsigmoid,
        )
        return head.once(torch.stack(terms_over(self._objective, answers)).sum(1))

    def _by_record(self, each: Tensor) -> Tensor:
        """Return [R records, k answers of each] from [A answers]; unchanged if k is 1."""
        return each.view(-1, self._together, *each.shape[1:]) if self._together > 1 else each


class MismatchLoss(AnswerLoss):
    """An objective whose loss also needs the divergence from the reference, measured on the global batch's prompts,
    each with the answer to another prompt."""

    def look(self, micros: list[MicroBatch], evaluate: Evaluate) -> None:
        """Measure the divergence from the reference for `Answers.kl`."""
        self.kl = max(0.0, evaluate(mismatched_of(micros), _LogRatio())[0]["loss"])


def mismatched_of(micros: Iterable[MicroBatch]) -> list[AnswerBatch]:
    """Return the prompts of the micro-batches, each with the answer to another prompt; empty for other kinds of row."""
    return [micro.mismatched for micro in micros if isinstance(micro, AnswerBatch) and micro.mismatched is not None]


class _LogRatio(PerAnswer):
    """The mean over answers of log-probability minus the reference's."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the sum over the micro-batch's answers, [1]."""
        batch = answers_in(micro)
        assert batch.reference is not None
        return head.once((answers_of(head, hidden, batch)[0] - batch.reference).sum().unsqueeze(0))


class LogProbs(PerAnswer):
    """A loss function that collects the log-probabilities of answers."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []
        """(rows of the split, int64 [A]; log-probabilities, fp32 [A]) of each micro-batch, on the device; in a pipeline
        on the last stage only."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Keep the log-probabilities, and return minus their sum, [1]."""
        batch = answers_in(micro)
        log_prob, _ = answers_of(head, hidden, batch)
        self.found.append((batch.rows, log_prob))
        return head.once(-log_prob.sum().unsqueeze(0))

    def of_all(self, ranks: Ranks, count: int) -> np.ndarray:
        """Return the log-probabilities that all ranks have collected, by row of the split: fp32 [count], NaN for rows
        without one. All ranks call it together."""
        columns = [np.concatenate([part.cpu().numpy() for part in parts]) for parts in zip(*self.found, strict=True)]
        values = np.full(count, np.nan, dtype=np.float32)
        for pair in filter(None, ranks.gather(columns)):
            values[pair[0]] = pair[1]
        return values


class OnlineReference:
    """A loss function whose reference is the run's own base model, computed on the global batch before each step. This
    takes one more forward pass a step, but no second model and no column in the data."""

    def __init__(self, loss: LossFunction, base: Callable[[], AbstractContextManager[None]]) -> None:
        """`base`: a context in which the model computes as the base model."""
        self.figures = loss.figures
        self._loss, self._base = loss, base
        self._references: dict[tuple[int, ...], Tensor] = {}
        """Numbers of a micro-batch's sequences -> log-probabilities of its answers, fp32 [A]."""

    def look(self, micros: list[MicroBatch], evaluate: Evaluate) -> None:
        batches = [answers_in(micro) for micro in micros]
        others = mismatched_of(batches)
        with self._base():
            references, of_others = (_log_probs(some, evaluate) for some in (batches, others))
        self._references = {tuple(micro.sequences): each for micro, each in zip(batches, references, strict=False)}
        if not isinstance(self._loss, LooksAhead):
            return
        compared: list[MicroBatch] = list(batches)
        if of_others:  # else another pipeline stage has them, and computes
            compared = [
                replace(micro, reference=reference, mismatched=replace(mismatched, reference=other))
                for micro, mismatched, reference, other in zip(batches, others, references, of_others, strict=True)
            ]
        self._loss.look(compared, evaluate)

    def weight(self, micro: MicroBatch) -> int:
        return self._loss.weight(micro)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        reference = self._references[tuple(micro.sequences)]
        return self._loss.sums(head, hidden, replace(answers_in(micro), reference=reference))


def _log_probs(micros: list[AnswerBatch], evaluate: Evaluate) -> list[Tensor]:
    collect = LogProbs()
    if micros:
        evaluate(micros, collect)
    return [log_prob for _, log_prob in collect.found]
