"""Decisions that hang on the figures of evaluations: which checkpoints stay, and when a run ends early."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from llmtrain.checkpoint.retain import Best
from llmtrain.config.run import StopEarly


class BestSteps:
    """The best evaluated steps of a run whose checkpoints are there or under way."""

    def __init__(self, best: Best, there: Iterable[tuple[int, float]]) -> None:
        """`there`: (step, figure) of checkpoints that the run has."""
        self._best, self._steps = best, dict(best.first(there))

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def take(self, step: int, figures: Mapping[str, float]) -> None:
        """Count an evaluation; one that is not finite is never among the best."""
        value = figures.get(self._best.metric, math.nan)  # a plugin's, of weights that are all 0, is not there
        if math.isfinite(value):
            others = ((each, kept) for each, kept in self._steps.items() if each != step)
            self._steps = dict(self._best.first([*others, (step, value)]))

    def lost(self, step: int) -> None:
        """There is no checkpoint of that step: its save has failed."""
        self._steps.pop(step, None)


class Patience:
    """Counts evaluations that are no better than the best before them: `train.stop_early`."""

    def __init__(self, settings: StopEarly) -> None:
        self._settings = settings
        self._best: float | None = None
        self._newest: float | None = None
        self._best_step = self._waited = 0

    def take(self, step: int, figures: Mapping[str, float]) -> None:
        """Count an evaluation."""
        value = figures.get(str(self._settings.metric), math.nan)
        self._newest = value if math.isfinite(value) else None
        sign = -1 if self._settings.mode == "max" else 1
        better = self._best is None or sign * (self._best - value) > self._settings.min_delta
        if better and math.isfinite(value):
            self._best, self._best_step, self._waited = value, step, 0
        else:
            self._waited += 1

    @property
    def reason(self) -> str:
        """The sentence with which the run ends; empty: it goes on."""
        if self._waited < self._settings.patience:
            return ""
        newest, was = "not finite" if self._newest is None else f"{self._newest:.4f}", "none was finite"
        if self._best is not None:
            was = f"it is {newest}, and was {self._best:.4f} at step {self._best_step}"
        by = f" by more than min_delta {self._settings.min_delta:g}" if self._settings.min_delta else ""
        how = f"has not become better{by} in {self._waited} evaluations"
        return f"{self._settings.metric} {how} ({was}; train.stop_early)"

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self._best, "best_step": self._best_step, "waited": self._waited, "newest": self._newest}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `to_json` gave."""
        self._best, self._best_step, self._waited = kept["best"], kept["best_step"], kept["waited"]
        self._newest = kept.get("newest")
