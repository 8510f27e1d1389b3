"""Objectives over answers: over pairs of a chosen and a rejected answer to one prompt, or over single answers that are
desired or not.

s is the log-probability of an answer, summed over its n counted tokens (including the one that ends it); d is s minus
the reference's s; w is the chosen and l the rejected answer. Each loss is a mean over the pairs (for kto the answers)
of the global batch.

A new loss over pairs is a class here with `losses` and `equal`; its plain definition is in parity/plain_objectives.py.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from llmtrain.base.choice import NOT_NEGATIVE, POSITIVE, Bound, bounded
from llmtrain.objectives.objective import Chart, Figure, Objective, Tensor

_WRONG = Bound(at_least=0, below=0.5)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of a micro-batch. Tensors are fp32 [A], or [R, k] if each record has k answers (chosen, rejected)."""

    tokens: Tensor
    """Number of counted tokens of each answer."""
    log_prob: Tensor = None
    """Log-probability summed over counted tokens, in nats; of a model that gives likelihoods."""
    score: Tensor = None
    """Score of each answer; of a model that gives scores."""
    reference: Tensor = None
    """Log-probability under the reference, if there is one."""
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    """What the format of the data records about each answer, by name."""
    kl: float = math.nan
    """z for single answers: the mean of d over the batch's prompts, each with the answer to another prompt; at least
    0."""
    log_sigmoid: Callable[[Tensor], Tensor]

    @property
    def ratio(self) -> Tensor:
        """d: the log-probability minus the reference's."""
        assert self.reference is not None
        return self.log_prob - self.reference

    @property
    def mean(self) -> Tensor:
        """s / n: the log-probability per token."""
        return self.log_prob / self.tokens


def _gap(each_P2: Tensor) -> Tensor:
    return each_P2[:, 0] - each_P2[:, 1]


@dataclass(frozen=True)
class Equal:
    """Value and tolerances of the loss of an answer that is preferred to itself, or is both desired and not."""

    loss: float
    margin: float
    """Largest distance of the margin from 0, per nat per token of rounding."""
    slope: float
    """Largest change of the loss per unit of the margin."""


@dataclass(frozen=True, kw_only=True)
class OverAnswers(Objective):
    """An objective over the answers of one format of data (`data`). A new objective of this kind is a class with
    `terms`."""

    @abstractmethod
    def terms(self, answers: Answers) -> tuple[Tensor, ...]:
        """Return the loss and the figures, in their order, for each record."""
        raise NotImplementedError

    def equal(self, figures: Mapping[str, float]) -> Equal:
        """Return the `Equal` of the loss, by its definition. Without this method the loss is not checked before the
        first step. `figures`: those of the checked batch, because some losses contain its mean log-probability besides
        the margin."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Referenced(OverAnswers):
    """An objective that compares with the model before training."""

    reference: Literal["column", "online"] = "column"
    """Where the reference's log-probabilities come from. column: from the data, in which `llmtrain reference` has
    written them; online: from the model with its adapter switched off, computed at each step."""


_MARGIN = (
    Figure(
        name="pairs/margin",
        unit="1",
        meaning="Objectives over pairs: the number that the loss increases, such as beta times the difference of "
        "log-ratios.",
    ),
    Figure(name="pairs/accuracy", unit="0 to 1", meaning="Share of the global batch's pairs whose margin is above 0."),
)
_TOKENS = (
    Figure(name="pairs/chosen_tokens", unit="tokens/answer", meaning="Counted tokens of a chosen answer (mean)."),
    Figure(
        name="pairs/rejected_tokens",
        unit="tokens/answer",
        meaning="Counted tokens of a rejected answer (mean).",
    ),
)


@dataclass(frozen=True, kw_only=True)
class OverPairs(OverAnswers):
    """A loss over pairs."""

    unit: ClassVar[str] = "nats/pair"
    data: ClassVar[str] = "preference"
    charts: ClassVar[tuple[Chart, ...]] = (
        Chart(
            file="accuracy",
            title="Pairs preferred rightly",
            unit="share",
            from_zero=True,
            curves=(("pairs/accuracy", "training"), ("eval/pairs/accuracy", "validation")),
        ),
        Chart(
            file="margin",
            title="Margin",
            unit="1",
            curves=(("pairs/margin", "training"), ("eval/pairs/margin", "validation")),
        ),
    )

    @abstractmethod
    def losses(self, a: Answers) -> tuple[Tensor, Tensor]:
        """Return (losses, margins), [P] each. A margin is above 0 if the chosen answer is preferred."""
        raise NotImplementedError

    def terms(self, answers: Answers) -> tuple[Tensor, ...]:
        losses, margins = self.losses(answers)
        sides = answers.score if self.scores else answers.log_prob
        return losses, margins, (margins > 0).float(), *sides.T, *answers.tokens.T


@dataclass(frozen=True, kw_only=True)
class Pairs(OverPairs):
    """A loss on the log-probabilities of pairs. A new one is a class with `losses`. A plugin can use `a.ratio` if it
    has the field `reference: Literal["column", "online"] = "column"`, as `Referenced` has."""

    figures: ClassVar[tuple[Figure, ...]] = (
        *_MARGIN,
        Figure(
            name="pairs/chosen_log_prob",
            unit="nats/answer",
            meaning="Log-probability of the chosen answers, summed over their tokens.",
        ),
        Figure(
            name="pairs/rejected_log_prob",
            unit="nats/answer",
            meaning="Log-probability of the rejected answers.",
        ),
        *_TOKENS,
    )
    charts: ClassVar[tuple[Chart, ...]] = (
        *OverPairs.charts,
        Chart(
            file="log_probability",
            title="Log-probability of answers",
            unit="nats/answer",
            curves=(("pairs/chosen_log_prob", "chosen"), ("pairs/rejected_log_prob", "rejected")),
        ),
    )

    beta: float = bounded(0.1, POSITIVE, "0.1 is the default")
    """Factor on the difference between the two answers."""


@dataclass(frozen=True, kw_only=True)
class Dpo(Pairs, Referenced, choice="dpo"):
    """Direct preference optimisation."""

    smoothing: float = bounded(0.0, _WRONG, "0.1 is usual")
    """Share of pairs that are assumed to be labelled the wrong way round; above 0 this is conservative DPO."""

    def losses(self, a: Answers) -> tuple[Tensor, Tensor]:
        """-(1 - e) log sigmoid(b (d_w - d_l)) - e log sigmoid(-b (d_w - d_l)) (arXiv 2305.18290). With e > 0 it is
        conservative DPO (E. Mitchell's note on cDPO, 2023)."""
        margin = self.beta * _gap(a.ratio)
        return -(1 - self.smoothing) * a.log_sigmoid(margin) - self.smoothing * a.log_sigmoid(-margin), margin

    def equal(self, figures: Mapping[str, float]) -> Equal:
        return Equal(math.log(2), self.beta * figures["pairs/chosen_tokens"], 1)


@dataclass(frozen=True, kw_only=True)
class Robust(Pairs, Referenced, choice="robust"):
    """A loss whose mean equals dpo's on correct labels, although a share of the labels is wrong."""

    smoothing: float = bounded(0.1, _WRONG, "0.1 is usual")
    """Share of pairs that are labelled the wrong way round."""

    def losses(self, a: Answers) -> tuple[Tensor, Tensor]:
        """((1 - e) (-log sigmoid(b (d_w - d_l))) + e log sigmoid(-b (d_w - d_l))) / (1 - 2 e) (arXiv 2403.00409)."""
        margin, wrong = self.beta * _gap(a.ratio), self.smoothing
        return (wrong * a.log_sigmoid(-margin) - (1 - wrong) * a.log_sigmoid(margin)) / (1 - 2 * wrong), margin

    def equal(self, figures: Mapping[str, float]) -> Equal:
        return Equal(math.log(2), self.beta * figures["pairs/chosen_tokens"], 1 / (1 - 2 * self.smoothing))


@dataclass(frozen=True, kw_only=True)
class Ipo(Pairs, Referenced, choice="ipo"):
    """The squared distance of the difference per token from a target."""

    def losses(self, a: Answers) -> tuple[Tensor, Tensor]:
        """(d_w / n_w - d_l / n_l - 1 / (2 b))^2 (arXiv 2310.12036, per token as in TRL)."""
        margin = _gap(a.ratio / a.tokens)
        return (margin - 1 / (2 * self.beta)).square(), margin

    def equal(self, figures: Mapping[str, float]) -> Equal:
        return Equal(1 / (4 * self.beta**2), 1, 1 / self.beta)


@dataclass(frozen=True, kw_only=True)
class DpoNorm(Pairs, Referenced, choice="dpo_norm"):
    """dpo with log-ratios per token."""

    beta: float = bounded(5.0, POSITIVE, "5 is the default")

    def losses(self, a: Answers) -> tuple[Tensor, Tensor]:
        """-log sigmoid(b (d_w / n_w - d_l / n_l)) (arXiv 2411.15124)."""
        margin = self.beta * _gap(a.ratio / a.tokens)
        return -a.log_sigmoid(margin), margin

    def equal(self, figures: Mapping[str, float]) -> Equal:
        return Equal(math.log(2), self.beta, 1)


@dataclass(frozen=True, kw_only=True)
class Rpo(Pairs, Referenced, choice="rpo"):
    """dpo plus the negative log-likelihood of the chosen answer."""

    alpha: float = bounded(1.0, NOT_NEGATIVE, "1 is the default")
    """Factor on the chosen answer's negative log-likelihood per token."""

    def losses(self, a: Answers) -> tuple[Tensor, Tensor]:
        """-log sigmoid(b (d_w - d_l)) - alpha s_w / n_w (arXiv 2404.19733)."""
        margin = self.beta * _gap(a.ratio)
        return -a.log_sigmoid(margin) - self.alpha * a.mean[:, 0], margin

    def equal(self, figures: Mapping[str, float]) -> Equal:
        tokens = figures["pairs/chosen_tokens"]
        mean = figures["pairs/chosen_log_prob"] / tokens
        return Equal(math.log(2) - self.alpha * mean, self.beta * tokens, 1)


@dataclass(frozen=True, kw_only=True)
class SimPo(Pairs, choice="simpo"):
    """Log-probabilities per token, with a target margin."""

    beta: float = bounded(2.0, POSITIVE, "2 is the default")
    gamma: float = bounded(0.5, NOT_NEGATIVE, "0.5 is the default")
    """Target margin between the two rewards."""

    def losses(self, a: Answers) -> tuple[Tensor, Tensor]:
        """-log sigmoid(b (s_w / n_w - s_l / n_l) - gamma) (arXiv 2405.14734)."""
        margin = self.beta * _gap(a.mean)
        return -a.log_sigmoid(margin - self.gamma), margin

    def equal(self, figures: Mapping[str, float]) -> Equal:
        return Equal(math.log1p(math.exp(self.gamma)), self.beta, 1)


@dataclass(frozen=True, kw_only=True)
class Orpo(Pairs, choice="orpo"):
    """The negative log-likelihood of the chosen answer, and the odds ratio of the two answers."""

    beta: float = bounded(0.1, POSITIVE, "0.1 is the default")
    """Factor on the term of the odds ratio."""

    def losses(self, a: Answers) -> tuple[Tensor, Tensor]:
        """-s_w / n_w - b log sigmoid(log odds_w - log odds_l), with odds p / (1 - p) for p = exp(s / n) (arXiv
        2403.07691)."""
        margin = _gap(a.mean - (-a.mean.expm1()).log())
        return -a.mean[:, 0] - self.beta * a.log_sigmoid(margin), margin

    def equal(self, figures: Mapping[str, float]) -> Equal:
        mean = figures["pairs/chosen_log_prob"] / figures["pairs/chosen_tokens"]
        return Equal(-mean + self.beta * math.log(2), 1 / -math.expm1(mean), self.beta)


@dataclass(frozen=True, kw_only=True)
class Kto(Referenced, choice="kto"):
    """Single answers that are desired or not."""

    unit: ClassVar[str] = "per answer"
    data: ClassVar[str] = "unpaired"
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure(
            name="unpaired/kl",
            unit="nats/answer",
            meaning="kto's z: mean log-ratio to the reference of the global batch's prompts, each with the answer to "
            "another prompt.",
        ),
        Figure(
            name="unpaired/accuracy",
            unit="0 to 1",
            meaning="Share of answers on the side of z that fits their label.",
        ),
        Figure(
            name="unpaired/log_prob",
            unit="nats/answer",
            meaning="Log-probability of an answer, summed over its tokens.",
        ),
        Figure(name="unpaired/tokens", unit="tokens/answer", meaning="Counted tokens of an answer (mean)."),
    )
    charts: ClassVar[tuple[Chart, ...]] = (
        Chart(
            file="judged",
            title="Judged answers on the right side",
            unit="share",
            from_zero=True,
            curves=(("unpaired/accuracy", "training"), ("eval/unpaired/accuracy", "validation")),
        ),
        Chart(
            file="divergence",
            title="Divergence from the reference",
            unit="nats/answer",
            from_zero=True,
            curves=(("unpaired/kl", "z"),),
        ),
    )

    beta: float = bounded(0.1, POSITIVE, "0.1 is the default")
    """Factor on the difference between an answer's log-ratio and z."""
    desirable_weight: float = bounded(1.0, POSITIVE, "1 is the default")
    """Factor on the loss of a desired answer."""
    undesirable_weight: float = bounded(1.0, POSITIVE, "1 is the default")
    """Factor on the loss of an undesired answer."""

    def terms(self, answers: Answers) -> tuple[Tensor, ...]:
        """1 - sigmoid(b (d - z)) for a desired answer and 1 - sigmoid(b (z - d)) for another, each times its weight. z
        is the mean of d over the global batch's prompts, each with the answer to another prompt, and at least 0. It
        estimates the divergence from the reference, and has no gradient (arXiv 2402.01306)."""
        above = self.beta * (answers.ratio - answers.kl)
        desired = answers.facts["desirable"]
        margins = above.where(desired, -above)
        weights = desired * self.desirable_weight + ~desired * self.undesirable_weight
        losses = weights * (1 - margins.sigmoid())
        same = losses.new_full(losses.shape, answers.kl)
        return losses, same, (margins > 0).float(), answers.log_prob, answers.tokens

    def equal(self, figures: Mapping[str, float]) -> Equal:
        loss = (self.desirable_weight + self.undesirable_weight) / 4  # 1 - sigmoid(0) of each, the mean of two
        return Equal(loss, self.beta * figures["unpaired/tokens"], loss)


@dataclass(frozen=True, kw_only=True)
class Reward(OverPairs, choice="reward"):
    """A model that scores answers, and should score the chosen one higher."""

    scores = True
    figures: ClassVar[tuple[Figure, ...]] = (
        *_MARGIN,
        Figure(
            name="pairs/chosen_reward",
            unit="1",
            meaning="objective.name reward: mean score of the chosen answers.",
        ),
        Figure(
            name="pairs/rejected_reward",
            unit="1",
            meaning="Mean score of the rejected answers.",
        ),
        *_TOKENS,
    )
    charts: ClassVar[tuple[Chart, ...]] = (
        *OverPairs.charts,
        Chart(
            file="rewards",
            title="Rewards",
            unit="1",
            curves=(("pairs/chosen_reward", "chosen"), ("pairs/rejected_reward", "rejected")),
        ),
    )

    centering: float = bounded(0.0, NOT_NEGATIVE, "0 is the default, 0.01 is usual")
    """Factor on the squared sum of a pair's scores, which pulls their mean to 0."""

    def losses(self, a: Answers) -> tuple[Tensor, Tensor]:
        """-log sigmoid(r_w - r_l) + c (r_w + r_l)^2, where r is the score at an answer's last counted token: the first
        term is the negative log-likelihood of the preference in the Bradley-Terry model (arXiv 1706.03741, 2203.02155).
        Preferences do not determine the zero of the scores, so c pulls their mean there (arXiv 2312.09244)."""
        margins = _gap(a.score)
        return -a.log_sigmoid(margins) + self.centering * a.score.sum(1).square(), margins

    def equal(self, figures: Mapping[str, float]) -> Equal:
        reward, c = figures["pairs/chosen_reward"], self.centering
        return Equal(math.log(2) + c * (2 * reward) ** 2, max(1.0, abs(reward)), 1 + 8 * c * abs(reward))
