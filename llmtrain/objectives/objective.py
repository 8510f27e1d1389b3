"""The section `objective`, and the figures and charts that an objective adds to a run's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from llmtrain.base.choice import Choice

Tensor = Any
"""torch.Tensor, of which formulas use only operators and methods, so that a configuration is read without torch."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number beside the loss, divided by the same weight. On validation data its key begins with `eval/`."""

    name: str
    unit: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of the report."""

    file: str
    title: str
    unit: str
    from_zero: bool = False
    """The vertical axis begins at 0."""
    curves: tuple[tuple[str, str], ...]
    """((metric, name of its curve), ...)."""


@dataclass(frozen=True, kw_only=True)
class Objective(Choice, section="objective"):
    """The loss that training minimises."""

    unit: ClassVar[str] = "nats/token"
    """Unit of the loss."""
    data: ClassVar[str] = "text"
    """Format of the prepared data that the objective needs. "text": it learns every counted token, in any format."""
    scores: ClassVar[bool] = False
    """The model gives a score for an answer instead of likelihoods."""
    figures: ClassVar[tuple[Figure, ...]] = ()
    """The figures that follow the loss, in the order in which they are computed."""
    charts: ClassVar[tuple[Chart, ...]] = ()

    name: str = field(init=False)
    """The loss that training minimises. Losses over answers are means over records (pairs, or single answers)."""

    @property
    def reported(self) -> tuple[Figure, ...]:
        return self.figures

    @property
    def reference(self) -> Literal["column", "online"] | None:
        """Return where the log-probabilities of the model before training come from; None if the loss does not need
        them."""
        return None

    @property
    def teacher(self) -> str | None:
        return None

    @property
    def teacher_revision(self) -> str | None:
        return None

    @property
    def top_k(self) -> int | None:
        """Return the number of the teacher's likeliest tokens in the data's column; None if there is no such column."""
        return None


def accuracies() -> list[str]:
    """Return the names of all objectives' figures that are the share of answers on the right side."""
    figures = (figure.name for chosen in Objective.CHOICES.values() for figure in chosen.figures)
    return [name for name in dict.fromkeys(figures) if name.endswith("/accuracy")]
