"""Learning-rate schedules: the factor on the peak learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over optimizer steps, as a factor of `optim.lr`."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; wsd = warm-up, stable, decay."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: int | None = None
    """wsd: optimizer steps of the final linear decay. Default: a tenth of the run."""
    min_ratio: float = 0.1
    """Factor at the end of the run (cosine, linear, wsd)."""


def learning_rate_factor(schedule: ScheduleConfig, step: int, max_steps: int | None) -> float:
    """Factor on the peak learning rate for optimizer step `step` (0 is the first).

    Warm-up rises linearly and reaches 1 at step `warmup_steps`; the decay reaches min_ratio at the last step.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "constant":
        return 1.0
    assert max_steps is not None, "the configuration check asks for max_steps or max_tokens"
    if schedule.name == "wsd":
        decay = schedule.decay_steps if schedule.decay_steps is not None else max(1, max_steps // 10)
        first = max_steps - decay
    else:
        first = schedule.warmup_steps
    progress = min(1.0, max(0.0, (step - first) / max(1, max_steps - 1 - first)))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1.0 - progress
    return schedule.min_ratio + (1 - schedule.min_ratio) * shape
