"""An exponential moving average of the trained parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmtrain.base.choice import AT_LEAST_1, BELOW_1, Rules, bounded
from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig
    from llmtrain.features.ema.plain import PlainEma
    from llmtrain.training.parts import Part
    from llmtrain.training.setup import Setup


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average of the trained parameters: evaluated in addition (`eval/ema/loss`), saved in
    checkpoints, exported by `llmtrain checkpoint to-hf --weights ema`. It takes 4 bytes a parameter, sharded like the
    masters."""

    decay: float | None = bounded(None, BELOW_1, "0.999 is common; null means no average")
    """mean = decay x mean + (1 - decay) x parameter; null = no average."""
    every: int = bounded(1, AT_LEAST_1, "1 is the default")
    """Optimizer steps between two updates of the mean."""


class EmaFeature(Feature):
    section = EmaConfig
    variants = ("ema",)

    def asked(self, config: RunConfig) -> bool:
        return config.section(EmaConfig).decay is not None

    def rules(self) -> Rules:
        from llmtrain.features.ema.rules import OF_STEPS, RULES

        return Rules(of_values=RULES, of_steps=OF_STEPS)

    def part_of(self, setup: Setup) -> Part:
        from llmtrain.features.ema.part import Ema

        return Ema(setup)

    def shortened(self, section: EmaConfig, steps: int) -> EmaConfig:
        if section.decay is None:
            return section
        return replace(section, decay=min(0.75, section.decay), every=min(2, steps, section.every))

    def plain(self, config: RunConfig) -> PlainEma:
        from llmtrain.features.ema.plain import PlainEma

        return PlainEma(config.section(EmaConfig))


FEATURE = EmaFeature()
