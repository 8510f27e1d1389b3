"""What depends on the number of a step alone: the learning rate, dropout's random numbers, and what is due."""

from __future__ import annotations

import math

import torch

from llmtrain.config.run import ScheduleConfig


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


def is_due(every: int | None, steps: range) -> bool:
    """Whether what happens every so many steps (None, 0: never) happens after these, of which a site may skip some."""
    return every is not None and every > 0 and any(step % every == 0 for step in steps)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout of a step is a pure function of (seed, step, rank): resume needs no saved generator state.

    The ranks of a tensor-parallel group give the same `rank`: what they all compute, they drop alike (Span of
    models/parallel/tensor_layers.py lets them differ where each has its own heads or features).
    """
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**64)  # torch takes no more bits
