"""A schedule: the inverse square root of the step (`schedule.name: sqrt`)."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain import Schedule, bounded


@dataclass(frozen=True, kw_only=True)
class Sqrt(Schedule, choice="sqrt"):
    """The inverse square root of the steps after the warm-up."""

    needs_length = False
    scale: float = bounded(1000.0, above=0)
    """Optimizer steps after which the learning rate is 0.7 of its peak."""

    def after_warmup(self, step: int, max_steps: int | None) -> float:
        return (1 + (step - self.warmup_steps) / self.scale) ** -0.5
