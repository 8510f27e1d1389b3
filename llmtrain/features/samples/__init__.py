"""Continuations of texts at each evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmtrain.base.choice import AT_LEAST_1, HostPath, Rules, bounded
from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig
    from llmtrain.data.stream.train_data import TrainData
    from llmtrain.training.parts import Launch, Part


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Texts that the model continues at each evaluation by its likeliest tokens. The continuations go to the log,
    events.jsonl, the trackers and the report."""

    prompts: list[str] | HostPath = field(default_factory=list)
    """A list of texts, or the path of a file with a text on each line."""
    tokens: int = bounded(32, AT_LEAST_1, "32 is the default")
    """Upper limit of tokens in a continuation. Each takes a forward pass."""


class SamplesFeature(Feature):
    section = SamplesConfig
    renamed = (("train.sample_prompts", "samples.prompts"), ("train.sample_tokens", "samples.tokens"))
    idle = "there are no samples.prompts"
    observes = True
    measures = True

    def asked(self, config: RunConfig) -> bool:
        return bool(config.section(SamplesConfig).prompts)

    def rules(self) -> Rules:
        from llmtrain.features.samples.rules import RULES

        return Rules(of_values=RULES)

    def check_data(self, config: RunConfig, data: TrainData) -> None:
        from llmtrain.features.samples.continuing import Prompts

        section = config.section(SamplesConfig)
        Prompts.of(section.prompts, section.tokens, data)

    def part(self, launch: Launch) -> Part:
        from llmtrain.features.samples.part import Samples

        return Samples(launch)


FEATURE = SamplesFeature()
