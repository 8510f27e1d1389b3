"""`Metric`: a user's figure of the validation data, from each token's negative log-likelihood."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from llmtrain.base.choice import Entry
from llmtrain.objectives.objective import Tensor


class Metric(Entry, section="metrics"):
    """A weighted mean over counted tokens, independent of their distribution over ranks and micro-batches. A plugin's
    metric is a dataclass with a name (`class Rare(Metric, entry="rare")`): its fields are below `metrics.rare`, and its
    figure is `eval/rare`."""

    in_training: ClassVar[bool] = False
    """Measure the metric on training batches too, as the figure `rare`: each micro-batch passes the head twice."""

    @abstractmethod
    def values(self, nll: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The values whose mean is the figure, [N], each of its token alone; or (values, weights), both [N].

        Args:
            nll: fp32 [N], the negative log-likelihoods of tokens, nats; 1.0 for uncounted tokens, whose values are left
                out.
            labels: int64 [N], their ids; 0 for uncounted tokens.
        """
        raise NotImplementedError
