"""The learning rates of transformers' Trainer, step by step.

Source: transformers/optimization.py, the functions get_SHAPE_schedule_with_warmup.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from llmtrain.base.choice import AT_LEAST_1, BELOW_1, POSITIVE, SHARE, bounded
from llmtrain.optim.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Transformers(Schedule, choice="transformers"):
    """transformers' Trainer's rates: a warm-up from 0, and an end after the last step."""

    shape: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "constant",
        "constant_with_warmup",
    ] = "linear"
    """Its lr_scheduler_type."""
    warmup_ratio: float = bounded(0.0, BELOW_1, "0 means no warm-up")
    """Share of the run's steps in the warm-up, rounded up; not beside warmup_steps."""
    min_ratio: float = bounded(0.0, SHARE, "0 is transformers' default")
    """Factor at the end of cosine_with_min_lr and polynomial."""
    cycles: float = bounded(0.0, at_least=0)
    """num_cycles: half waves of a cosine, 0.5 if it is 0 here; whole ones with restarts, then 1."""
    power: float = bounded(1.0, POSITIVE, "1 is a line")
    """Exponent of polynomial."""
    timescale: int | None = bounded(None, AT_LEAST_1, "leave it out for the steps of the warm-up")
    """Of inverse_sqrt. Default: the warm-up's steps, or 10000 without one."""

    def filled(self, max_steps: int | None) -> Self:
        if not self.warmup_ratio or max_steps is None:
            return self
        return replace(self, warmup_steps=math.ceil(self.warmup_ratio * max_steps), warmup_ratio=0.0)

    def shortened(self, warmup_steps: int) -> Self:
        return replace(self, warmup_steps=warmup_steps, warmup_ratio=0.0)

    def factor(self, step: int, max_steps: int | None) -> float:
        full = self.filled(max_steps)
        if self.shape != "constant" and step < full.warmup_steps:
            return step / full.warmup_steps
        return full.after_warmup(step, max_steps)

    def after_warmup(self, step: int, max_steps: int | None) -> float:
        if self.shape.startswith("constant"):
            return 1.0
        if self.shape == "inverse_sqrt":
            timescale = self.timescale or self.warmup_steps or 10_000
            return 1.0 / math.sqrt((step - self.warmup_steps + timescale) / timescale)
        assert max_steps is not None, "the configuration check asks for max_steps, max_tokens or epochs"
        progress = min(1.0, (step - self.warmup_steps) / max(1, max_steps - self.warmup_steps))
        if self.shape == "cosine_with_restarts":
            return 0.5 * (1 + math.cos(math.pi * ((self.cycles or 1) * progress % 1.0))) if progress < 1 else 0.0
        if self.shape.startswith("cosine"):
            height = max(0.0, 0.5 * (1 + math.cos(2 * math.pi * (self.cycles or 0.5) * progress)))
        else:
            height = (1 - progress) ** self.power
        return self.min_ratio + (1 - self.min_ratio) * height
