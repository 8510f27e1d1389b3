"""Rules of the section `samples`."""

from __future__ import annotations

from llmtrain.base.choice import Rule
from llmtrain.features.samples import SamplesConfig

RULES: tuple[Rule, ...] = (
    Rule(
        ("samples.prompts",),
        lambda r: r.objective.scores and r.section(SamplesConfig).prompts,
        lambda r, _: f"objective.name {r.objective.name} trains a model that gives scores and cannot write text",
        "remove it",
        {"objective.name": "reward", "samples.prompts": ["a"]},
    ),
)
