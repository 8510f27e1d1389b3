"""Learning-rate schedules: the factor on the peak learning rate at each step.

A new schedule is a class here, with its fields and `after_warmup`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from llmtrain.base.choice import AT_LEAST_1, NOT_NEGATIVE, SHARE, Choice, bounded


@dataclass(frozen=True, kw_only=True)
class Schedule(Choice, section="schedule"):
    """A schedule of the learning rate: a factor on the peak learning rates for each optimizer step."""

    needs_length: ClassVar[bool] = True
    """The factor depends on the number of steps of the run."""
    name: str = field(init=False)
    """Shape after the warm-up."""
    warmup_steps: int = bounded(0, NOT_NEGATIVE, "0 means no warm-up")
    """Optimizer steps of linear warm-up."""

    def filled(self, max_steps: int | None) -> Self:
        """Return the schedule with defaults filled in that depend on the run's length."""
        return self

    def shortened(self, warmup_steps: int) -> Self:
        """Return the same shape for a run of a few steps."""
        return replace(self, warmup_steps=warmup_steps)

    def decay(self) -> int:
        """Return how many steps at the end of the run the schedule decays; they must not overlap with the warm-up."""
        return 0

    def factor(self, step: int, max_steps: int | None) -> float:
        """Return the factor on the peak learning rate at optimizer step `step` (0 is the first). Warm-up rises linearly
        and reaches 1 at step `warmup_steps`. `max_steps` None: no limit, which is allowed only if `needs_length` is
        False."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return self.after_warmup(step, max_steps)

    @abstractmethod
    def after_warmup(self, step: int, max_steps: int | None) -> float:
        """Return the factor at a step after the warm-up."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Falling(Schedule):
    """A schedule that reaches `min_ratio` at the last step."""

    min_ratio: float = bounded(0.1, SHARE, "0.1 is the default")
    """Factor at the end of the run."""

    def after_warmup(self, step: int, max_steps: int | None) -> float:
        assert max_steps is not None, "the configuration check asks for max_steps, max_tokens or epochs"
        first = self.falls_from(max_steps)
        progress = min(1.0, max(0.0, (step - first) / max(1, max_steps - 1 - first)))
        return self.min_ratio + (1 - self.min_ratio) * self.shape(progress)

    def falls_from(self, max_steps: int) -> int:
        """Return the last step with factor 1."""
        return self.warmup_steps

    def shape(self, progress: float) -> float:
        """Return the height of the curve: 1 at progress 0, 0 at progress 1."""
        return 1.0 - progress


@dataclass(frozen=True, kw_only=True)
class Cosine(Falling, choice="cosine"):
    """Half a cosine."""

    def shape(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Linear(Falling, choice="linear"):
    """A straight line."""


@dataclass(frozen=True, kw_only=True)
class Wsd(Falling, choice="wsd"):
    """Warm-up, stable, decay: the factor stays 1 and falls linearly at the end of the run."""

    decay_steps: int | None = bounded(None, AT_LEAST_1, "leave it out for a tenth of the run")
    """Optimizer steps of the final linear decay. Default: a tenth of the run."""

    def filled(self, max_steps: int | None) -> Self:
        if self.decay_steps is not None or max_steps is None:
            return self
        return replace(self, decay_steps=max(1, max_steps // 10))

    def shortened(self, warmup_steps: int) -> Self:
        return replace(self, warmup_steps=warmup_steps, decay_steps=None)

    def decay(self) -> int:
        return self.decay_steps or 0

    def falls_from(self, max_steps: int) -> int:
        return max_steps - self.filled(max_steps).decay() - 1


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule, choice="constant"):
    """The peak learning rate to the end."""

    needs_length = False

    def after_warmup(self, step: int, max_steps: int | None) -> float:
        return 1.0
