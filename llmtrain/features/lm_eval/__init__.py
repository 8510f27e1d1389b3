"""Scores of a trained model on tasks of lm-eval's harness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.tracking.metrics import MetricKey


class LmEval(Feature):
    commands = (
        ("eval", "llmtrain.features.lm_eval.command", "score a trained model on tasks of lm-eval, such as hellaswag"),
    )

    def metrics(self) -> Mapping[str, MetricKey]:
        from llmtrain.tracking.metrics import MetricKey

        meaning = "Scores of a checkpoint by `llmtrain eval`, at the checkpoint's step."
        return {"tasks/TASK/METRIC": MetricKey("as lm-eval", meaning)}


FEATURE = LmEval()
