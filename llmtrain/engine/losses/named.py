"""The loss function for each kind of objective. Classes with a method `losses` or `terms` share one for their kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.data.batches import MicroBatch
from llmtrain.data.kinds import RowKind
from llmtrain.engine.losses.function import NEXT_TOKEN, LossFunction, PerToken, WithZLoss, checked_terms, figures_of
from llmtrain.engine.ranks.plugin_code import called
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE
from llmtrain.objectives.by_token import ByToken, Distill, NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.objectives.preferences import Answers, OverAnswers

if TYPE_CHECKING:
    from llmtrain.models.teacher import Teacher


def loss_of(objective: Objective, teacher: Teacher | None = None) -> LossFunction:
    """Return the loss function of an objective, without an online reference. `teacher`: for distillation, on the ranks
    that compute a loss."""
    if isinstance(objective, Distill):
        from llmtrain.engine.losses.likeliest import DistillLoss

        return DistillLoss(objective, teacher)
    if isinstance(objective, OverAnswers):
        from llmtrain.engine.losses.answers import AnswerLoss, MismatchLoss

        kind = RowKind.of(objective.data)
        return (MismatchLoss if kind.mismatched else AnswerLoss)(objective, kind)
    if isinstance(objective, ByToken):
        return TokenLoss(objective)
    if isinstance(objective, NextToken):
        return WithZLoss(objective.z_loss) if objective.z_loss else NEXT_TOKEN
    raise TypeError(f"{type(objective).__name__} has no loss function here")


def with_reference(
    loss: LossFunction, objective: Objective, base: Callable[[], AbstractContextManager[None]]
) -> LossFunction:
    """Return the loss function with an online reference, if the objective has one. `base`: a context in which the model
    computes with the values it had before training."""
    if objective.reference != "online":
        return loss
    from llmtrain.engine.losses.answers import OnlineReference

    return OnlineReference(loss, base)


class TokenLoss(PerToken):
    """Sums the terms of an objective by the token over counted tokens."""

    def __init__(self, objective: ByToken) -> None:
        self.figures, self._objective = figures_of(objective), objective

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        counts = (micro.labels != IGNORE).flatten()
        nll = head.token_nll(hidden, micro.labels, micro.counted).flatten()
        terms = terms_of(self._objective, nll.where(counts, 1.0))  # at 0 a formula may have no gradient
        return head.once(torch.stack([term.where(counts, 0.0).sum() for term in terms]))


def terms_of(objective: ByToken, nll: Tensor) -> tuple[Tensor, ...]:
    """Return the objective's terms for each token, fp32 [N] each. Raises ModelError if a plugin returns others."""
    key = f"objective.name {objective.name}"
    terms = called(objective, key, "terms", lambda: objective.terms(nll))
    return checked_terms(key, objective, "terms", (terms,) if isinstance(terms, Tensor) else terms, nll)


def sample_terms(objective: Objective) -> tuple[str, list[float]]:
    """Call an objective by the token or over answers on a few fixed numbers. Returns (name of its method, values of all
    terms, the loss first). Raises ModelError as a step would."""
    if isinstance(objective, ByToken):
        return "terms", torch.cat(terms_of(objective, torch.linspace(0.25, 4.0, 8).requires_grad_())).tolist()
    from llmtrain.engine.losses.answers import method_of, terms_over

    assert isinstance(objective, OverAnswers)
    kind = RowKind.of(objective.data)
    count = 4 * max(2, kind.together)

    def by_record(each: Tensor) -> Tensor:
        return each.view(-1, kind.together) if kind.together > 1 else each

    each = by_record(torch.linspace(0.25, 4.0, count).requires_grad_())
    facts = {name: by_record(torch.from_numpy(values)) for name, values in kind.invented(np.arange(count)).items()}
    sample = {"score": each} if objective.scores else {"log_prob": -each, "reference": -each.detach().flip(0)}
    answers = Answers(tokens=torch.full_like(each, 8.0), facts=facts, kl=0.1, log_sigmoid=F.logsigmoid, **sample)
    return method_of(objective), torch.cat(terms_over(objective, answers)).tolist()
