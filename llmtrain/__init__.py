"""llmtrain: train large language models with DeepSpeed.

The names below are for a user's own code (docs/extend.md). Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.base.choice import bounded
    from llmtrain.base.errors import UserError
    from llmtrain.checkpoint.hf.usable import load
    from llmtrain.commands.prepare import prepare
    from llmtrain.commands.train import train
    from llmtrain.data.kinds import RowKind
    from llmtrain.data.prepare.plugin_source import Source
    from llmtrain.objectives.by_token import ByToken
    from llmtrain.objectives.metric import Metric
    from llmtrain.objectives.objective import Figure
    from llmtrain.objectives.preferences import OverAnswers, Pairs
    from llmtrain.optim.optimizers import Optimizer
    from llmtrain.optim.schedules import Schedule
    from llmtrain.tracking.sink import Sink
    from llmtrain.training.parts import Part
    from llmtrain.training.step import Request

__version__ = "0.1.0"
__all__ = [
    "ByToken",
    "Figure",
    "Metric",
    "Optimizer",
    "OverAnswers",
    "Pairs",
    "Part",
    "Request",
    "RowKind",
    "Schedule",
    "Sink",
    "Source",
    "UserError",
    "bounded",
    "load",
    "prepare",
    "train",
]

_HOMES = {
    "ByToken": "llmtrain.objectives.by_token",
    "Figure": "llmtrain.objectives.objective",
    "Metric": "llmtrain.objectives.metric",
    "Optimizer": "llmtrain.optim.optimizers",
    "OverAnswers": "llmtrain.objectives.preferences",
    "Pairs": "llmtrain.objectives.preferences",
    "Part": "llmtrain.training.parts",
    "Request": "llmtrain.training.step",
    "RowKind": "llmtrain.data.kinds",
    "Schedule": "llmtrain.optim.schedules",
    "Sink": "llmtrain.tracking.sink",
    "Source": "llmtrain.data.prepare.plugin_source",
    "UserError": "llmtrain.base.errors",
    "bounded": "llmtrain.base.choice",
    "load": "llmtrain.checkpoint.hf.usable",
    "prepare": "llmtrain.commands.prepare",
    "train": "llmtrain.commands.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"llmtrain has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
