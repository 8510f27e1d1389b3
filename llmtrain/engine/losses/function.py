"""The protocol of functions that a run minimises or measures over micro-batches, and the loss of pretraining."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from llmtrain.base.errors import ModelError
from llmtrain.data.batches import MicroBatch
from llmtrain.models.head import Head
from llmtrain.models.loss import IGNORE
from llmtrain.objectives.objective import Objective


class LossFunction(Protocol):
    """Computes sums and a weight for a micro-batch. The loss of a step is the sum over all micro-batches of all ranks,
    divided by their summed weight."""

    figures: tuple[str, ...]
    """Names of the sums, which are divided by the weight and logged. The first, "loss", is minimised."""

    def weight(self, micro: MicroBatch) -> int:
        """Return a micro-batch's share of the divisor: counted tokens, rows or pairs. The tensors are on the host."""
        ...

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the sums of a micro-batch of complete rows, fp32 [figures]; ranks that share rows add their sums up.
        The last pipeline stage calls it; under ZeRO 3 it runs inside the head's forward. `hidden`: [B, T, H], the
        decoder's output; under sequence parallelism this rank's columns of it."""
        ...


class PerToken:
    """Base of a loss function whose divisor is the number of counted tokens."""

    figures: tuple[str, ...] = ("loss",)

    def weight(self, micro: MicroBatch) -> int:
        return int((micro.labels != IGNORE).sum())


Evaluate = Callable[[Iterable[MicroBatch], LossFunction], tuple[dict[str, float], int]]
"""An engine's `evaluate`: a loss function's figures over all ranks, and their weight. All ranks call it together."""


@runtime_checkable
class LooksAhead(Protocol):
    """A loss function whose value for one row depends on other rows of the global batch."""

    def look(self, micros: list[MicroBatch], evaluate: Evaluate) -> None:
        """Measure the global batch without a gradient, before `sums`. `micros`: this rank's micro-batches."""
        ...


def figures_of(objective: Objective) -> tuple[str, ...]:
    return ("loss", *(figure.name for figure in objective.figures))


def checked_terms(key: str, objective: Objective, method: str, terms: Any, like: Tensor) -> tuple[Tensor, ...]:
    """Return the terms in fp32. Raises ModelError if they are not a loss with a gradient and the objective's figures,
    each of the shape of `like`, the method's argument."""
    count, wanted = len(objective.figures), tuple(like.shape)
    tensors = isinstance(terms, tuple) and all(isinstance(term, Tensor) for term in terms)
    given = [tuple(term.shape) for term in terms] if tensors else _kinds(terms)
    if given != [wanted] * (1 + count):
        raise ModelError(
            f"{key}: {method} gives {given}; it must return a tuple of the loss and {count} figures, each of the "
            f"shape of its argument, {wanted}"
        )
    if like.requires_grad and not terms[0].requires_grad:
        raise ModelError(
            f"{key}: {method} gives a loss of {terms[0].dtype} without a gradient. Compute it from the "
            "argument by torch's functions, without detach(), item() and torch.no_grad()"
        )
    return tuple(term.float() for term in terms)


def _kinds(given: Any) -> str:
    """Return type names for a message: "float" or "(Tensor, float)"."""
    return f"({', '.join(map(_kinds, given))})" if isinstance(given, tuple) else type(given).__name__


class NextTokenLoss(PerToken):
    """The cross-entropy, in nats per counted token."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the sum over counted tokens in nats, [1]."""
        return head.nll_sum(hidden, micro.labels, micro.counted).unsqueeze(0)


NEXT_TOKEN = NextTokenLoss()


class WithZLoss(NextTokenLoss):
    """The cross-entropy with a z-loss; both are minimised."""

    figures = ("loss", "z_loss")

    def __init__(self, coefficient: float) -> None:
        """`coefficient`: factor of the z-loss, above 0."""
        self._coefficient = coefficient

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the sums of the loss in nats and of the z-loss in nats squared, [2]."""
        return head.nll_sums(hidden, micro.labels, micro.counted, self._coefficient)
