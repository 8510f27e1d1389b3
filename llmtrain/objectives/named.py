"""The objective that a run names. What it is made of is imported with it: most runs are of the next token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from llmtrain.config.objective import DISTILL, SCORED, UNPAIRED
from llmtrain.config.objective import NEXT_TOKEN as NEXT_TOKEN_NAME
from llmtrain.config.run import ObjectiveConfig
from llmtrain.objectives.next_token import NEXT_TOKEN
from llmtrain.objectives.objective import Objective

if TYPE_CHECKING:
    from llmtrain.models.teacher import Teacher


def objective_of(config: ObjectiveConfig, teacher: Teacher | None = None) -> Objective:
    """Objective of a run. `teacher`: for distillation, on the ranks that compute a loss."""
    if config.name == NEXT_TOKEN_NAME:
        return NEXT_TOKEN
    if config.name == DISTILL:
        from llmtrain.objectives.distill import Distill

        return Distill(config, teacher)
    if config.name in SCORED:
        from llmtrain.objectives.reward import Reward

        return Reward(config)
    from llmtrain.objectives.preference import Kto, Preference

    return Kto(config) if config.name in UNPAIRED else Preference(config)


def with_reference(
    objective: Objective, config: ObjectiveConfig, base: Callable[[], AbstractContextManager[None]]
) -> Objective:
    """The objective as a run minimises it: with a reference that is computed at each step, where it wants that.

    `base`: a context in which the model computes as it did when training started.
    """
    if config.reference != "online":
        return objective
    from llmtrain.objectives.online import OnlineReference

    return OnlineReference(objective, base)
