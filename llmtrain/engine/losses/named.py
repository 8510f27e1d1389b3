"""The loss function of each kind of objective that a run can name.

An objective whose class has `losses` or `terms` needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.base.errors import ModelError
from llmtrain.data.stream.loader import MicroBatch, TaughtBatch, UnpairedBatch
from llmtrain.engine.dist.plugin_code import called
from llmtrain.engine.losses.answers import PerAnswer, answers_in, answers_of, counted_tokens, last_tokens
from llmtrain.engine.losses.function import Evaluate, LossFunction, PerToken
from llmtrain.engine.losses.next_token import NEXT_TOKEN, WithZLoss
from llmtrain.engine.losses.online import OnlineReference
from llmtrain.models.distillation import TeacherSays, Terms, TopWords
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE
from llmtrain.objectives.by_token import ByToken, Distill, NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.objectives.preferences import Answers, OverAnswers

if TYPE_CHECKING:
    from llmtrain.models.teacher import Teacher


def loss_of(objective: Objective, teacher: Teacher | None = None) -> LossFunction:
    """The loss function of an objective, but for a reference that is computed at each step.

    `teacher`: for distillation, on the ranks that compute a loss.
    """
    if isinstance(objective, Distill):
        return DistillLoss(objective, teacher)
    if isinstance(objective, OverAnswers):
        return UnpairedLoss(objective) if objective.data == "unpaired" else PairLoss(objective)
    if isinstance(objective, ByToken):
        return TokenLoss(objective)
    if isinstance(objective, NextToken):
        return WithZLoss(objective.z_loss) if objective.z_loss else NEXT_TOKEN
    raise TypeError(f"{type(objective).__name__} has no loss function here")


def with_reference(
    loss: LossFunction, objective: Objective, base: Callable[[], AbstractContextManager[None]]
) -> LossFunction:
    """The loss function as a run minimises it: with a reference that is computed at each step, where it wants that.

    `base`: a context in which the model computes as it did when training started.
    """
    return OnlineReference(loss, base) if objective.reference == "online" else loss


def _figures(objective: Objective) -> tuple[str, ...]:
    return ("loss", *(figure.name for figure in objective.figures))


class TokenLoss(PerToken):
    """The terms of an objective by the token."""

    def __init__(self, objective: ByToken) -> None:
        self.figures, self._objective = _figures(objective), objective

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[figures]."""
        counts = (micro.labels != IGNORE).flatten()
        nll = head.token_nll(hidden, micro.labels, micro.counted).flatten()
        terms = terms_of(self._objective, nll.where(counts, 1.0))  # of 0 a formula may have no gradient
        return head.once(torch.stack([term.where(counts, 0.0).sum() for term in terms]))


def terms_of(objective: ByToken, nll: Tensor) -> tuple[Tensor, ...]:
    """The terms of tokens, fp32 [N] each. Raises ModelError where a plugin's class gives others."""
    key = f"objective.name {objective.name}"
    terms = called(objective, key, "terms", lambda: objective.terms(nll))
    return _checked(key, objective, "terms", (terms,) if isinstance(terms, Tensor) else terms, nll)


def sample_terms(objective: Objective) -> tuple[str, list[float]]:
    """(the method, its values) of an objective by the token or over answers, for a few numbers that are always the
    same. Raises ModelError as a step does."""
    numbers = torch.linspace(0.25, 4.0, 8)
    if isinstance(objective, ByToken):
        return "terms", torch.cat(terms_of(objective, numbers)).tolist()
    assert isinstance(objective, OverAnswers)
    each = numbers if objective.data == "unpaired" else numbers.view(-1, 2)
    tokens, desirable = torch.full_like(each, 8.0), each > 2.0
    if objective.scores:
        answers = Answers(score=each, tokens=tokens, log_sigmoid=F.logsigmoid)
    else:
        answers = Answers(log_prob=-each, tokens=tokens, reference=-each.flip(0), desirable=desirable, kl=0.1,
                          log_sigmoid=F.logsigmoid)  # fmt: skip
    key = f"objective.name {objective.name}"
    terms = called(objective, key, "losses", lambda: objective.terms(answers))
    return "losses", torch.cat(_checked(key, objective, "losses", terms, each.view(len(each), -1)[:, 0])).tolist()


def _checked(key: str, objective: Objective, method: str, terms: Any, like: Tensor) -> tuple[Tensor, ...]:
    """The terms in fp32. Raises ModelError: they are not a loss with a gradient, and the figures, each shaped `like`
    the argument."""
    count, wanted = len(objective.figures), tuple(like.shape)
    tensors = isinstance(terms, tuple) and all(isinstance(term, Tensor) for term in terms)
    given = [tuple(term.shape) for term in terms] if tensors else _kinds(terms)
    if given != [wanted] * (1 + count):
        raise ModelError(f"{key}: {method} gives {given}; wanted is a tuple of the loss and {count} figures, of the "
                         f"shape of its argument, {wanted}")  # fmt: skip
    if like.requires_grad and not terms[0].requires_grad:
        raise ModelError(f"{key}: {method} gives a loss of {terms[0].dtype} without a gradient. Compute it from the "
                         "argument by torch's functions, without detach(), item() and torch.no_grad()")  # fmt: skip
    return tuple(term.float() for term in terms)


def _kinds(given: Any) -> str:
    """Types, for a message: "float" or "(Tensor, float)"."""
    return f"({', '.join(map(_kinds, given))})" if isinstance(given, tuple) else type(given).__name__


class DistillLoss(PerToken):
    """The loss of `models/distillation.py`, per counted token."""

    def __init__(self, objective: Distill, teacher: Teacher | None) -> None:
        """`teacher`: None on a rank that computes no loss, and where the data has a teacher's column."""
        self.figures = _figures(objective)
        self._terms = Terms(beta=objective.beta, temperature=objective.temperature, alpha=objective.alpha)
        self._teacher = teacher

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[4]."""
        return head.distilled_sums(hidden, micro.labels, self._says(head, hidden, micro), self._terms)

    def _says(self, head: Head, hidden: Tensor, micro: MicroBatch) -> TeacherSays:
        if isinstance(micro, TaughtBatch):
            words, logs = (head.own(each).flatten(0, 1) for each in (micro.words, micro.logs))
            return TopWords(words=words, logs=logs).of
        assert self._teacher is not None
        return self._teacher.logits(micro.inputs, micro.positions)


class PairLoss:
    """The terms of an objective over pairs."""

    def __init__(self, objective: OverAnswers) -> None:
        self.figures, self._objective = _figures(objective), objective

    def weight(self, micro: MicroBatch) -> int:
        """Pairs."""
        return len(answers_in(micro).rows) // 2

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[figures]."""
        batch = answers_in(micro)
        if self._objective.scores:
            score, tokens = head.scores_at(hidden, last_tokens(batch)).view(-1, 2), counted_tokens(batch).view(-1, 2)
            answers = Answers(score=score, tokens=tokens, log_sigmoid=F.logsigmoid)
        else:
            log_prob, tokens = (each.view(-1, 2) for each in answers_of(head, hidden, batch))
            known = None if batch.reference is None else batch.reference.view(-1, 2)
            answers = Answers(log_prob=log_prob, tokens=tokens, reference=known, log_sigmoid=F.logsigmoid)
        key, objective = f"objective.name {self._objective.name}", self._objective
        terms = called(objective, key, "losses", lambda: objective.terms(answers))
        like = (answers.score if objective.scores else answers.log_prob)[:, 0]
        return head.once(torch.stack(_checked(key, objective, "losses", terms, like)).sum(1))


class UnpairedLoss(PerAnswer):
    """The terms of an objective over answers judged alone."""

    def __init__(self, objective: OverAnswers) -> None:
        self.figures, self._objective = _figures(objective), objective
        self._kl = 0.0

    def look(self, micros: list[MicroBatch], evaluate: Evaluate) -> None:
        """The divergence from the reference: `Answers.kl`."""
        others = [micro.mismatched for micro in micros if isinstance(micro, UnpairedBatch)]
        self._kl = max(0.0, evaluate(others, _LogRatio())[0]["loss"])

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[figures]."""
        assert isinstance(micro, UnpairedBatch)
        log_prob, tokens = answers_of(head, hidden, micro)
        answers = Answers(log_prob=log_prob, tokens=tokens, reference=micro.reference, desirable=micro.desirable,
                          kl=self._kl, log_sigmoid=F.logsigmoid)  # fmt: skip
        return head.once(torch.stack(self._objective.terms(answers)).sum(1))


class _LogRatio(PerAnswer):
    """The mean of d."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1]."""
        batch = answers_in(micro)
        assert batch.reference is not None
        return head.once((answers_of(head, hidden, batch)[0] - batch.reference).sum().unsqueeze(0))
