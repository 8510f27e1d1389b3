"""The loss of pretraining: each counted token's negative log-likelihood, in nats; with or without a z-loss."""

from __future__ import annotations

from torch import Tensor

from llmtrain.data.stream.loader import MicroBatch
from llmtrain.engine.losses.function import PerToken
from llmtrain.models.head import Head


class NextTokenLoss(PerToken):
    """Nats per counted token."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[1]: nats."""
        return head.nll_sum(hidden, micro.labels, micro.counted).unsqueeze(0)


NEXT_TOKEN = NextTokenLoss()


class WithZLoss(NextTokenLoss):
    """The loss beside a z-loss: the gradient is of both."""

    figures = ("loss", "z_loss")

    def __init__(self, coefficient: float) -> None:
        """`coefficient`: above 0."""
        self._coefficient = coefficient

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[2]: nats, and nats squared."""
        return head.nll_sums(hidden, micro.labels, micro.counted, self._coefficient)
