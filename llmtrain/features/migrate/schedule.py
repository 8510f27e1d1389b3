"""The learning rates of transformers' Trainer, step by step, and those of torchtitan and Megatron-LM.

Source: transformers/optimization.py, the functions get_SHAPE_schedule_with_warmup.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from llmtrain.base.choice import AT_LEAST_1, BELOW_1, POSITIVE, SHARE, bounded
from llmtrain.optim.schedules import Schedule

Shape = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    "constant",
    "constant_with_warmup",
]


@dataclass(frozen=True, kw_only=True)
class Transformers(Schedule, choice="transformers"):
    """transformers' Trainer's rates: a warm-up from 0, and an end after the last step."""

    shape: Shape = "linear"
    """Its lr_scheduler_type."""
    warmup_ratio: float = bounded(0.0, BELOW_1, "0 means no warm-up")
    """Share of the run's steps in the warm-up, rounded up; in place of warmup_steps."""
    warmup_from_zero: bool = True
    """Step k of a warm-up of w has k / w, the first 0, or min_ratio with warmup_stable_decay; false: (k + 1) / w, as in
    torchtitan."""
    min_ratio: float = bounded(0.0, SHARE, "0 is transformers' default")
    """Factor at the end."""
    cycles: float = bounded(0.0, at_least=0)
    """num_cycles: waves of a cosine, 0.5 if it is 0 here; with restarts half waves, then 1."""
    power: float = bounded(1.0, POSITIVE, "1 is a line")
    """Exponent of polynomial."""
    timescale: int | None = bounded(None, AT_LEAST_1, "leave it out for the steps of the warm-up")
    """Of inverse_sqrt. Default: the warm-up's steps, or 10000 without one."""
    decay_steps: int | None = bounded(None, AT_LEAST_1, "leave it out for a tenth of the run")
    """Of warmup_stable_decay: the steps of its end. Default: a tenth of the run."""
    decay_type: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """Of warmup_stable_decay: the shape of its end."""

    def filled(self, max_steps: int | None) -> Self:
        if max_steps is None:
            return self
        warmup = math.ceil(self.warmup_ratio * max_steps) if self.warmup_ratio else self.warmup_steps
        return replace(self, warmup_steps=warmup, warmup_ratio=0.0)

    def shortened(self, warmup_steps: int) -> Self:
        return replace(self, warmup_steps=warmup_steps, warmup_ratio=0.0, decay_steps=None)

    def factor(self, step: int, max_steps: int | None) -> float:
        full = self.filled(max_steps)
        if self.shape != "constant" and step < full.warmup_steps:
            if not self.warmup_from_zero:
                return (step + 1) / full.warmup_steps
            least = self.min_ratio if self.shape == "warmup_stable_decay" else 0.0
            return least + (1 - least) * step / full.warmup_steps
        return full.after_warmup(step, max_steps)

    def after_warmup(self, step: int, max_steps: int | None) -> float:
        if self.shape.startswith("constant"):
            return 1.0
        if self.shape == "inverse_sqrt":
            timescale = self.timescale or self.warmup_steps or 10_000
            return 1.0 / math.sqrt((step - self.warmup_steps + timescale) / timescale)
        assert max_steps is not None, "the configuration check asks for max_steps, max_tokens or epochs"
        falls_from = self.warmup_steps
        if self.shape == "warmup_stable_decay":
            falls_from = max_steps - (self.decay_steps or max(1, max_steps // 10))
        progress = min(1.0, max(0, step - falls_from) / max(1, max_steps - falls_from))
        return self.min_ratio + (1 - self.min_ratio) * self._height(progress)

    def _height(self, progress: float) -> float:
        """1 at progress 0, 0 at progress 1."""
        if self.shape == "cosine_with_restarts":
            return 0.5 * (1 + math.cos(math.pi * ((self.cycles or 1) * progress % 1.0))) if progress < 1 else 0.0
        if self.shape == "warmup_stable_decay" and self.decay_type != "cosine":
            return 1 - (progress if self.decay_type == "linear" else math.sqrt(progress))
        if self.shape in ("linear", "polynomial"):
            return (1 - progress) ** self.power
        return max(0.0, 0.5 * (1 + math.cos(2 * math.pi * (self.cycles or 0.5) * progress)))
