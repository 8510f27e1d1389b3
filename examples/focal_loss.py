"""An objective: the focal loss, which counts tokens less that the model knows well (`objective.name: focal`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from llmtrain import ByToken, Figure, bounded


@dataclass(frozen=True, kw_only=True)
class Focal(ByToken, choice="focal"):
    """(1 - p)^gamma times the negative log-likelihood of each token, whose probability is p (Lin et al., 2017)."""

    figures: ClassVar[tuple[Figure, ...]] = (
        Figure(name="focal/next_token_loss", unit="nats/token", meaning="The negative log-likelihood."),
    )
    gamma: float = bounded(2.0, at_least=0)
    """Exponent."""

    def terms(self, nll: Tensor) -> tuple[Tensor, ...]:
        return (1 - (-nll).exp()) ** self.gamma * nll, nll.detach()
