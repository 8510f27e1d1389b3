"""Objectives over texts and conversations: means over counted tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from llmtrain.base.choice import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, SHARE, HostPath, bounded
from llmtrain.objectives.objective import Figure, Objective, Tensor


@dataclass(frozen=True, kw_only=True)
class NextToken(Objective, choice="next_token"):
    """Negative log-likelihood of each token."""

    figures: ClassVar[tuple[Figure, ...]] = (
        Figure(
            name="z_loss",
            unit="nats^2/token",
            meaning="Mean square of log Z, with `objective.z_loss`: before its coefficient and not in `loss`.",
        ),
    )

    z_loss: float = bounded(0.0, NOT_NEGATIVE, "1e-4 is PaLM's, 0 means none")
    """Coefficient of the mean log^2 Z over counted tokens in the minimised loss, against drifting logits; Z is the sum
    over a token's exponentiated logits. 1e-4 is common; 0 = none. `loss` does not include it."""

    @property
    def reported(self) -> tuple[Figure, ...]:
        return self.figures if self.z_loss else ()


@dataclass(frozen=True, kw_only=True)
class ByToken(Objective):
    """A function of each counted token's negative log-likelihood. A new one is a class with `terms`."""

    @abstractmethod
    def terms(self, nll: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The loss of each token, or a tuple of the loss and the figures, in order. Each is fp32 [N] like `nll`, the
        negative log-likelihoods of tokens in nats. A term depends only on its own token: the other tokens of its
        micro-batch are chance."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Distill(Objective, choice="distill"):
    """Divergence from a teacher's distribution."""

    figures: ClassVar[tuple[Figure, ...]] = (
        Figure(
            name="distill/divergence",
            unit="nats/token",
            meaning="Distillation: the student's divergence from the teacher.",
        ),
        Figure(
            name="distill/next_token_loss",
            unit="nats/token",
            meaning="Distillation: the student's next-token loss.",
        ),
        Figure(
            name="distill/teacher_entropy",
            unit="nats/token",
            meaning="Entropy of the teacher's distribution at objective.temperature.",
        ),
    )

    beta: float = bounded(0.0, SHARE, "0 is the default")
    """0 is KL(teacher || student), 1 is KL(student || teacher), between them the generalised Jensen-Shannon divergence.
    """
    temperature: float = bounded(1.0, POSITIVE, "1 is the default")
    """Divides both models' logits in the divergence, which is then multiplied with its square."""
    alpha: float = bounded(0.0, SHARE, "0 is the default")
    """Share of the next-token loss; the divergence has the rest."""
    teacher: HostPath | None = None
    """Folder of the model to learn from, or ORG/NAME on the Hub; with the student's vocabulary and tokenizer. Optional
    with `top_k` once the column is written."""
    teacher_revision: str | None = None
    """With ORG/NAME in `teacher`: branch, tag or commit; null = main. A run keeps the commit that it found."""
    top_k: int | None = bounded(None, AT_LEAST_1, "64 is a good one; leave it out for the complete distribution")
    """Learn from this number of the teacher's likeliest words, with the mass of all others, in the data's column by
    `llmtrain reference`; null = the complete distribution, computed by the teacher at each step."""
