"""Objectives that compare: of two answers to a prompt, one was chosen and one rejected; of one, it is desired or not.

s is the log-probability of an answer, summed over its n counted tokens (the one where generation stops is among them),
d = s - s of the reference, w the chosen and l the rejected answer. Each loss is a mean over the pairs (of kto: the
answers) of the global batch, whatever they share a sequence with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.config.objective import options
from llmtrain.config.run import ObjectiveConfig
from llmtrain.data.stream.loader import AnswerBatch, MicroBatch, UnpairedBatch
from llmtrain.models.head import Head
from llmtrain.objectives.answers import answers_in, counted_tokens
from llmtrain.objectives.objective import Evaluate


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of P pairs, fp32 [P, 2] each: the chosen answer and the rejected one."""

    log_prob: Tensor
    """Summed over counted tokens, nats."""
    tokens: Tensor
    """Counted tokens of each answer."""
    reference: Tensor | None

    @property
    def ratio(self) -> Tensor:
        """Log-probability over that of the reference: d."""
        assert self.reference is not None
        return self.log_prob - self.reference

    @property
    def mean(self) -> Tensor:
        """Log-probability per token: s / n."""
        return self.log_prob / self.tokens


_Loss = Callable[[Answers, dict[str, float]], tuple[Tensor, Tensor]]
"""(losses, margins), [P] each: a margin is above 0 where the chosen answer is preferred."""


def _gap(each_P2: Tensor) -> Tensor:
    return each_P2[:, 0] - each_P2[:, 1]


def dpo(a: Answers, o: dict[str, float]) -> tuple[Tensor, Tensor]:
    """-(1 - e) log sigmoid(b (d_w - d_l)) - e log sigmoid(-b (d_w - d_l)).

    arXiv 2305.18290; with e > 0 the conservative one (E. Mitchell's note on cDPO, 2023).
    """
    margin = o["beta"] * _gap(a.ratio)
    return -(1 - o["smoothing"]) * F.logsigmoid(margin) - o["smoothing"] * F.logsigmoid(-margin), margin


def robust(a: Answers, o: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Loss whose mean is the plain loss though a share e of labels is wrong (arXiv 2403.00409)."""
    margin, wrong = o["beta"] * _gap(a.ratio), o["smoothing"]
    return (wrong * F.logsigmoid(-margin) - (1 - wrong) * F.logsigmoid(margin)) / (1 - 2 * wrong), margin


def ipo(a: Answers, o: dict[str, float]) -> tuple[Tensor, Tensor]:
    """(d_w / n_w - d_l / n_l - 1 / (2 b))^2 (arXiv 2310.12036, per token as TRL has it)."""
    margin = _gap(a.ratio / a.tokens)
    return (margin - 1 / (2 * o["beta"])).square(), margin


def dpo_norm(a: Answers, o: dict[str, float]) -> tuple[Tensor, Tensor]:
    """-log sigmoid(b (d_w / n_w - d_l / n_l)) (arXiv 2411.15124)."""
    margin = o["beta"] * _gap(a.ratio / a.tokens)
    return -F.logsigmoid(margin), margin


def rpo(a: Answers, o: dict[str, float]) -> tuple[Tensor, Tensor]:
    """-log sigmoid(b (d_w - d_l)) - alpha s_w / n_w (arXiv 2404.19733)."""
    margin = o["beta"] * _gap(a.ratio)
    return -F.logsigmoid(margin) - o["alpha"] * a.mean[:, 0], margin


def simpo(a: Answers, o: dict[str, float]) -> tuple[Tensor, Tensor]:
    """-log sigmoid(b (s_w / n_w - s_l / n_l) - gamma) (arXiv 2405.14734)."""
    margin = o["beta"] * _gap(a.mean)
    return -F.logsigmoid(margin - o["gamma"]), margin


def orpo(a: Answers, o: dict[str, float]) -> tuple[Tensor, Tensor]:
    """-s_w / n_w - b log sigmoid(log odds_w - log odds_l), odds p / (1 - p) of p = exp(s / n) (arXiv 2403.07691)."""
    margin = _gap(a.mean - torch.log(-torch.expm1(a.mean)))
    return -a.mean[:, 0] - o["beta"] * F.logsigmoid(margin), margin


LOSSES: dict[str, _Loss] = {loss.__name__: loss for loss in (dpo, robust, ipo, dpo_norm, rpo, simpo, orpo)}


class Preference:
    """A loss over pairs."""

    figures: tuple[str, ...] = (
        "loss",
        "pairs/margin",
        "pairs/accuracy",
        "pairs/chosen_log_prob",
        "pairs/rejected_log_prob",
        "pairs/chosen_tokens",
        "pairs/rejected_tokens",
    )

    def __init__(self, config: ObjectiveConfig) -> None:
        self._loss, self._options = LOSSES[config.name], options(config)

    def weight(self, micro: MicroBatch) -> int:
        """Pairs."""
        return len(answers_in(micro).rows) // 2

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[7]."""
        batch = answers_in(micro)
        log_prob, tokens = (each.view(-1, 2) for each in answers_of(head, hidden, batch))
        reference = None if batch.reference is None else batch.reference.view(-1, 2)
        answers = Answers(log_prob, tokens, reference)
        losses, margins = self._loss(answers, self._options)
        figures = [losses, margins, (margins > 0).float(), *answers.log_prob.T, *answers.tokens.T]
        return head.once(torch.stack(figures).sum(1))


class _LogRatio:
    """The mean of d."""

    figures: tuple[str, ...] = ("loss",)

    def weight(self, micro: MicroBatch) -> int:
        """Answers."""
        return len(answers_in(micro).rows)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1]."""
        batch = answers_in(micro)
        assert batch.reference is not None
        return head.once((answers_of(head, hidden, batch)[0] - batch.reference).sum().unsqueeze(0))


class Kto:
    """1 - sigmoid(b (d - z)) of a desired answer, 1 - sigmoid(b (z - d)) of another, each with its kind's weight.

    z >= 0 is the mean of d over the prompts of the global batch, each with the answer to another one: an estimate of
    the divergence from the reference, through which no gradient goes (arXiv 2402.01306).
    """

    figures: tuple[str, ...] = ("loss", "unpaired/kl", "unpaired/accuracy", "unpaired/log_prob", "unpaired/tokens")

    def __init__(self, config: ObjectiveConfig) -> None:
        self._options = options(config)
        self._kl = math.nan

    def look(self, micros: list[MicroBatch], evaluate: Evaluate) -> None:
        """z."""
        others = [micro.mismatched for micro in micros if isinstance(micro, UnpairedBatch)]
        self._kl = max(0.0, evaluate(others, _LogRatio())[0]["loss"])

    def weight(self, micro: MicroBatch) -> int:
        """Answers."""
        return len(answers_in(micro).rows)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[5]."""
        assert isinstance(micro, UnpairedBatch) and micro.reference is not None
        log_prob, tokens = answers_of(head, hidden, micro)
        o = self._options
        above = o["beta"] * (log_prob - micro.reference - self._kl)
        margins = torch.where(micro.desirable, above, -above)
        kinds = torch.where(micro.desirable, o["desirable_weight"], o["undesirable_weight"])
        losses = kinds * (1 - torch.sigmoid(margins))
        same = torch.full_like(losses, self._kl)
        return head.once(torch.stack([losses, same, (margins > 0).float(), log_prob, tokens]).sum(1))


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
