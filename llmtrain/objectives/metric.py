"""`Metric`: a user's figure of the validation data, from each token's negative log-likelihood."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from llmtrain.base.choice import Entry
from llmtrain.objectives.objective import Tensor


class Metric(Entry, section="metrics"):
    """A weighted mean over counted tokens, of all ranks and micro-batches: it does not depend on how they share them.

    A plugin's metric is a dataclass with a name (`class Rare(Metric, entry="rare")`): its fields stand below
    `metrics.rare`, and its figure is `eval/rare`.
    """

    in_training: ClassVar[bool] = False
    """Measure it on the training batches, too, as the figure `rare`: each micro-batch then goes through the head once
    more."""

    @abstractmethod
    def values(self, nll: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The values whose mean is the figure, [N], each of its token alone; or (values, weights), both [N].

        Args:
            nll: fp32 [N], the negative log-likelihoods of tokens, nats. Those that do not count are among them, as 1.0:
                their values are left out.
            labels: int64 [N], their ids; of those that do not count 0.
        """
        raise NotImplementedError
