"""The section `objective`, and the description of the figures and charts that an objective adds to a run's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from llmtrain.base.choice import Choice

Tensor = Any
"""torch's; formulas use only its operators and methods, so that a configuration is read without torch."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number in addition to the loss, divided by the same weight; its key for validation data begins with `eval/`."""

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
    """(metric, name of its curve)."""


@dataclass(frozen=True, kw_only=True)
class Objective(Choice, section="objective"):
    """The loss that training minimises."""

    unit: ClassVar[str] = "nats/token"
    """Unit of its loss."""
    data: ClassVar[str] = "text"
    """Format of the prepared data whose answers it compares; text: it learns each counted token, of any kind of row."""
    scores: ClassVar[bool] = False
    """The model gives a score for an answer, instead of likelihoods."""
    figures: ClassVar[tuple[Figure, ...]] = ()
    """The figures after the loss, in the order of their computation."""
    charts: ClassVar[tuple[Chart, ...]] = ()

    name: str = field(init=False)
    """The loss that training minimises. Losses over answers are means over the records of answers."""

    @property
    def reported(self) -> tuple[Figure, ...]:
        return self.figures

    @property
    def reference(self) -> Literal["column", "online"] | None:
        """Source of the log-probabilities under the model that training starts from; None: without a reference."""
        return None

    @property
    def teacher(self) -> str | None:
        return None

    @property
    def teacher_revision(self) -> str | None:
        return None

    @property
    def top_k(self) -> int | None:
        """Number of the teacher's likeliest words in the data's column; None: no such column."""
        return None


def accuracies() -> list[str]:
    """Names of the figures that are a share of answers on the right side, of any objective."""
    figures = (figure.name for chosen in Objective.CHOICES.values() for figure in chosen.figures)
    return [name for name in dict.fromkeys(figures) if name.endswith("/accuracy")]
