"""llmtrain: train large language models with DeepSpeed.

The names below are for a user's own code (docs/extend.md). Each is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.base.choice import Bound, bounded
    from llmtrain.base.errors import UserError
    from llmtrain.checkpoint.hf.inference import load
    from llmtrain.commands.train import Result, train
    from llmtrain.objectives.by_token import ByToken
    from llmtrain.objectives.objective import Figure
    from llmtrain.objectives.preferences import Pairs
    from llmtrain.optim.schedules import Schedule
    from llmtrain.tracking.sink import Sink
    from llmtrain.training.parts import Done, Part
    from llmtrain.training.step import Position, Request

__version__ = "0.1.0"
__all__ = [
    "Bound",
    "ByToken",
    "Done",
    "Figure",
    "Pairs",
    "Part",
    "Position",
    "Request",
    "Result",
    "Schedule",
    "Sink",
    "UserError",
    "bounded",
    "load",
    "train",
]

_HOMES = {
    "Bound": "llmtrain.base.choice",
    "bounded": "llmtrain.base.choice",
    "Schedule": "llmtrain.optim.schedules",
    "UserError": "llmtrain.base.errors",
    "load": "llmtrain.checkpoint.hf.inference",
    "Result": "llmtrain.commands.train",
    "train": "llmtrain.commands.train",
    "Sink": "llmtrain.tracking.sink",
    "ByToken": "llmtrain.objectives.by_token",
    "Figure": "llmtrain.objectives.objective",
    "Pairs": "llmtrain.objectives.preferences",
    "Done": "llmtrain.training.parts",
    "Part": "llmtrain.training.parts",
    "Position": "llmtrain.training.step",
    "Request": "llmtrain.training.step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"llmtrain has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
