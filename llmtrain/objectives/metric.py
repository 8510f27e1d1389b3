"""`Metric`: a user's figure of the validation data, computed from each token's negative log-likelihood."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from llmtrain.base.choice import Entry
from llmtrain.objectives.objective import Tensor


class Metric(Entry, section="metrics"):
    """A weighted mean over counted tokens, which does not depend on how tokens are divided among ranks and
    micro-batches. A plugin's metric is a dataclass with a name (`class Rare(Metric, entry="rare")`): its fields are set
    below `metrics.rare`, and its figure is `eval/rare`."""

    in_training: ClassVar[bool] = False
    """Also measure the metric on training batches, as the figure `rare`; each micro-batch then passes the head
    twice."""

    @abstractmethod
    def values(self, nll: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the values whose mean is the figure, [N], or (values, weights), both [N]. A value must depend on its
        token only.

        Args:
            nll: fp32 [N], the negative log-likelihood of each token in nats; 1.0 for uncounted tokens, whose values are
                left out.
            labels: int64 [N], the id of each token; 0 for uncounted tokens.
        """
        raise NotImplementedError
