"""Spikes of a run's loss: record each step, report spikes, keep checkpoints before them, and train steps again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.base.choice import NOT_NEGATIVE, Bound, Rule, Rules, bounded
from llmtrain.features import Feature
from llmtrain.optim.optimizers import norm_of

if TYPE_CHECKING:
    from llmtrain.config.run import Run, RunConfig
    from llmtrain.training.parts import Launch, Part


@dataclass(frozen=True, kw_only=True)
class SpikesConfig:
    """Spikes of the loss or the gradient norm: every run reports them."""

    pinned: int = bounded(2, NOT_NEGATIVE, "2 is the default, 0 keeps none")
    """For how many of the newest spikes the checkpoint before the spike is kept for `llmtrain replay`. 0 = none."""
    skip_outliers: float | None = bounded(None, Bound(above=0), "6 is common, null leaves out none")
    """Leave out a step's update if its loss, or its gradient norm's logarithm, is more than this number of deviations
    above the median of the 20 steps before. Each step then takes another all-reduce on the host, and waits for the
    device. null = none."""


def _norm_comes_late(run: Run) -> bool:
    skips = run.config.section(SpikesConfig).skip_outliers is not None
    return skips and norm_of(run.mix.optimizer, zero=run.mix.zero_stage > 0) == "update"


# fmt: off
_OF_FORMS: tuple[Rule, ...] = (
    Rule(("spikes.skip_outliers", "optim.name"), _norm_comes_late,
         "DeepSpeed's ZeRO updates Muon's momentum before the gradient norm is known",
         "set it to null, or use adamw", {"optim.name": "muon", "spikes.skip_outliers": 6.0}),
)
# fmt: on


class SpikesFeature(Feature):
    section = SpikesConfig
    renamed = (("fault.pinned", "spikes.pinned"), ("optim.skip_outliers", "spikes.skip_outliers"))
    commands = (("replay", "llmtrain.features.spikes.command", "train steps again, compare them, name rows"),)

    def asked(self, config: RunConfig) -> bool:
        return True

    def rules(self) -> Rules:
        return Rules(of_forms=_OF_FORMS)

    def part(self, launch: Launch) -> Part:
        from llmtrain.features.spikes.steps import REPLAYED

        if REPLAYED in os.environ:
            from llmtrain.features.spikes.looks import Replay

            return Replay(launch)
        from llmtrain.features.spikes.record import Record

        return Record(launch)

    def keeps(self, checkpoints: Path) -> Iterable[Path]:
        from llmtrain.features.spikes.pins import pinned

        return pinned(checkpoints)


FEATURE = SpikesFeature()
