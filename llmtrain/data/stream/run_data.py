"""What a run reads, open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmtrain.data.stream.train_data import EvalSet, TrainData

if TYPE_CHECKING:
    from llmtrain.data.stream.choices import ChoiceSet


@dataclass(frozen=True, kw_only=True)
class RunData:
    """All data of a run, with the objective's columns."""

    stages: tuple[TrainData, ...]
    """Data of each stage; equal data is one object."""
    sets: dict[str, EvalSet] = field(default_factory=dict)
    """The sets of the section `eval`, by name."""
    choices: dict[str, ChoiceSet] = field(default_factory=dict)
    """Sets of multiple-choice questions, by name."""
    references: list[str] | None = None
    """Distinct hashes of the weights that computed the reference's log-probabilities; None: no reference column."""
    teachers: list[str] = field(default_factory=list)
    """Distinct hashes of the weights that computed the teacher's columns."""
    teacher_config: dict[str, Any] | None = None
    """Configuration of the teacher; None: no teacher, or columns without a configuration."""

    @property
    def first(self) -> TrainData:
        return self.stages[0]
