"""The objective of a reward model: of two answers to a prompt, the chosen one has the higher score."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.config.objective import options
from llmtrain.config.run import ObjectiveConfig
from llmtrain.data.stream.loader import AnswerBatch, MicroBatch
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE
from llmtrain.objectives.answers import answers_in, counted_tokens


class Reward:
    """-log sigmoid(r_w - r_l) + c (r_w + r_l)^2, the mean over the pairs of the global batch.

    r is the score at an answer's last counted token, w the chosen and l the rejected answer: the likelihood of the
    preference in the model of Bradley and Terry (arXiv 1706.03741, 2203.02155). A preference does not say where the
    scale's zero lies: c draws the mean of the two scores there (arXiv 2312.09244).
    """

    figures: tuple[str, ...] = (
        "loss",
        "pairs/margin",
        "pairs/accuracy",
        "pairs/chosen_reward",
        "pairs/rejected_reward",
        "pairs/chosen_tokens",
        "pairs/rejected_tokens",
    )

    def __init__(self, config: ObjectiveConfig) -> None:
        self._centering = options(config)["centering"]

    def weight(self, micro: MicroBatch) -> int:
        """Pairs."""
        return len(answers_in(micro).rows) // 2

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[7]."""
        batch = answers_in(micro)
        rewards = head.scores_at(hidden, last_tokens(batch)).view(-1, 2)
        margins = rewards[:, 0] - rewards[:, 1]
        losses = -F.logsigmoid(margins) + self._centering * rewards.sum(1).square()
        tokens = counted_tokens(batch).view(-1, 2)
        return head.once(torch.stack([losses, margins, (margins > 0).float(), *rewards.T, *tokens.T]).sum(1))


def last_tokens(batch: AnswerBatch) -> Tensor:
    """int64 [A]: where each answer's last counted token lies in the micro-batch's inputs, flattened."""
    labels, answers = batch.labels.flatten(), batch.answers.flatten()
    places = torch.arange(labels.numel(), device=labels.device).where(labels != IGNORE, -1)
    none = places.new_full((len(batch.rows) + 1,), -1)  # the last one is of tokens that belong to no answer
    labelled = none.scatter_reduce(0, answers, places, "amax")[:-1]
    return labelled + 1  # the label at t is the token at t + 1, which is in the same row
