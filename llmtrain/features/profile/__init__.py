"""A profile of some steps, in profile/ of the run's folder: torch's traces, memory over time, and a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.base.choice import Rules
from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig
    from llmtrain.training.parts import Launch, Part


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A profile of some steps, in profile/ of the run's folder: torch's traces, memory over time, and a page."""

    steps: str | None = None
    """FIRST:LAST, such as 20:23: profile these optimizer steps, at most 20, both included; null = none."""

    def range(self) -> tuple[int, int]:
        """Return (first, last). Raises ValueError: `steps` is no range."""
        first, colon, last = (self.steps or "").partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) < int(first) + 20):
            raise ValueError(self.steps)
        return int(first), int(last)


class ProfileFeature(Feature):
    section = ProfileConfig
    observes = True

    def asked(self, config: RunConfig) -> bool:
        return config.section(ProfileConfig).steps is not None

    def rules(self) -> Rules:
        from llmtrain.features.profile.rules import OF_STEPS, RULES

        return Rules(of_values=RULES, of_steps=OF_STEPS)

    def part(self, launch: Launch) -> Part:
        from llmtrain.features.profile.part import Profile

        return Profile(launch)


FEATURE = ProfileFeature()
