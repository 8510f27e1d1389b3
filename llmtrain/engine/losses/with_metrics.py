"""A loss function with a user's metrics: a metric is the quotient of a sum of values and a sum of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmtrain.base.errors import ModelError
from llmtrain.data.batches import MicroBatch
from llmtrain.engine.losses.function import LooksAhead, LossFunction
from llmtrain.engine.ranks.plugin_code import called
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE

if TYPE_CHECKING:
    from llmtrain.objectives.metric import Metric

_VALUES, _WEIGHTS = "metrics.{}: values", "metrics.{}: weights"
"""Names of the two sums of a metric, which `quotients` removes."""


def with_metrics(loss: LossFunction, metrics: Mapping[str, Metric]) -> LossFunction:
    return WithMetrics(loss, metrics) if metrics else loss


class WithMetrics:
    """Returns the sums of a loss function, followed by the sums of metrics, which have no gradient."""

    def __init__(self, loss: LossFunction, metrics: Mapping[str, Metric]) -> None:
        self._loss, self._metrics = loss, metrics
        pairs = [form.format(name) for name in metrics for form in (_VALUES, _WEIGHTS)]
        self.figures = (*loss.figures, *pairs)
        if isinstance(loss, LooksAhead):
            self.look = loss.look

    def weight(self, micro: MicroBatch) -> int:
        return self._loss.weight(micro)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        return torch.cat([self._loss.sums(head, hidden, micro), self._of_metrics(head, hidden, micro)])

    @torch.no_grad()
    def _of_metrics(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        counts = (micro.labels != IGNORE).flatten()
        nll = head.token_nll(hidden, micro.labels, micro.counted).flatten()
        sums = [
            each
            for name, metric in self._metrics.items()
            for each in sums_of(name, metric, nll, micro.labels.flatten(), counts)
        ]
        return head.once(torch.stack(sums))


def sums_of(name: str, metric: Metric, nll: Tensor, labels: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum of values x weights, sum of weights) over the counted tokens, fp32. The metric's arguments keep the
    other tokens, so that the host need not wait for the number of counted ones. Raises ModelError if a plugin's class
    returns anything else than a tensor or two of the right shape."""
    key, nll, labels = f"metrics.{name}", nll.where(counts, 1.0), labels.where(counts, 0)
    given: Any = called(metric, key, "values", lambda: metric.values(nll, labels))
    values, weights = given if isinstance(given, tuple) and len(given) == 2 else (given, torch.ones_like(nll))
    for each in (values, weights):
        if not isinstance(each, Tensor) or each.shape != nll.shape:
            shape = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise ModelError(
                f"{key}: values gives {shape}; it must return a tensor of a value for each token, of the "
                f"shape of its first argument, {tuple(nll.shape)}, or a pair of such tensors (values, weights)"
            )
    weights = weights.float().where(counts, 0.0)
    return (values.float() * weights).where(counts, 0.0).sum(), weights.sum()


def quotients(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of `WithMetrics` with one quotient for each metric. A metric with weight 0 is left out."""
    found = {}
    for key, value in figures.items():
        name = key.removeprefix("metrics.").removesuffix(": values")
        if key == _VALUES.format(name):
            if weight := figures[_WEIGHTS.format(name)]:
                found[name] = value / weight
        elif not (key.startswith("metrics.") and key.endswith(": weights")):
            found[key] = value
    return found
