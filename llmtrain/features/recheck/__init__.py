"""Checks that find a processor whose arithmetic is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.base.choice import NOT_NEGATIVE, Rules, bounded
from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig
    from llmtrain.training.parts import Launch, Part


@dataclass(frozen=True, kw_only=True)
class RecheckConfig:
    """Checks of the ranks' arithmetic: some sequences of one data-parallel rank are computed on all, which must get
    equal losses and gradients."""

    every: int = bounded(0, NOT_NEGATIVE, "500 is common, 0 = never")
    """Optimizer steps between two checks. A launch begins with one. ZeRO 0 to 2. 0 = never."""


class RecheckFeature(Feature):
    section = RecheckConfig
    observes = True
    renamed = (("fault.recheck_every", "recheck.every"),)

    def asked(self, config: RunConfig) -> bool:
        return config.section(RecheckConfig).every > 0

    def rules(self) -> Rules:
        from llmtrain.features.recheck.rules import OF_FORMS

        return Rules(of_forms=OF_FORMS)

    def part(self, launch: Launch) -> Part | None:
        if launch.setup.run.mix.degrees.data == 1:
            return None
        from llmtrain.features.recheck.part import Recheck

        return Recheck(launch)


FEATURE = RecheckFeature()
