"""Objectives over texts and conversations, which are means over counted tokens."""

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
            meaning="Mean square of log Z, with `objective.z_loss`; without the coefficient, and not part of `loss`.",
        ),
    )

    z_loss: float = bounded(0.0, NOT_NEGATIVE, "1e-4 is PaLM's, 0 means none")
    """Coefficient of the mean log^2 Z over counted tokens, which is added to the minimised loss against drifting
    logits; Z is the sum of a token's exponentiated logits. 1e-4 is common; 0 = none. `loss` does not include it."""

    @property
    def reported(self) -> tuple[Figure, ...]:
        return self.figures if self.z_loss else ()


@dataclass(frozen=True, kw_only=True)
class ByToken(Objective):
    """A function of each counted token's negative log-likelihood. A new objective of this kind is a class with
    `terms`."""

    @abstractmethod
    def terms(self, nll: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the loss of each token, or a tuple of the loss and the figures in their order; each is fp32 [N]. A
        term must depend only on its own token, because which other tokens are in the micro-batch is arbitrary. `nll`:
        the negative log-likelihood of each token in nats, fp32 [N]."""
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
    """0 is KL(teacher || student), 1 is KL(student || teacher); between them it is the generalised Jensen-Shannon
    divergence."""
    temperature: float = bounded(1.0, POSITIVE, "1 is the default")
    """Divides the logits of both models in the divergence, which is then multiplied by its square."""
    alpha: float = bounded(0.0, SHARE, "0 is the default")
    """Share of the next-token loss; the rest is the divergence's."""
    teacher: HostPath | None = None
    """Folder of the model to learn from, or ORG/NAME on the Hub; with the student's vocabulary and tokenizer. Optional
    with `top_k` once `llmtrain reference` has written the column."""
    teacher_revision: str | None = None
    """Branch, tag or commit for ORG/NAME in `teacher`; null = main. A run keeps the commit with which it started."""
    top_k: int | None = bounded(None, AT_LEAST_1, "such as 64; leave it out for the complete distribution")
    """Learn from this number of the teacher's likeliest tokens and the total probability of all others, in a column
    that `llmtrain reference` adds to the data; null = from the complete distribution, which the teacher computes at
    each step."""
