"""Divide the sequences of a step among data-parallel ranks of unequal speed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llmtrain.base.choice import Rules
from llmtrain.features import Feature

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmtrain.config.problems import Problems
    from llmtrain.config.run import Run, RunConfig
    from llmtrain.training.parts import Launch, Part


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How the data-parallel ranks divide the sequences of a step."""

    mode: Literal["equal", "measured"] = "equal"
    """measured: slow ranks take fewer sequences of a step, and fast ones up to twice train.micro_batch at a time."""


class BalanceFeature(Feature):
    section = BalanceConfig
    reorders = True
    most_sequences = 2
    renamed = (("train.balance", "balance.mode"),)

    def asked(self, config: RunConfig) -> bool:
        return config.section(BalanceConfig).mode == "measured"

    def rules(self) -> Rules:
        from llmtrain.features.balance.rules import OF_FORMS, OF_STEPS, RULES

        return Rules(of_values=RULES, of_forms=OF_FORMS, of_steps=OF_STEPS)

    def notes(self, run: Run) -> Iterable[str]:
        if run.mix.degrees.data == 1:
            yield "balance.mode measured has no effect: all ranks of this run work on the same sequences"

    def check_model(self, config: RunConfig, model: PreTrainedModel, problems: Problems) -> None:
        from llmtrain.models.experts import expert_blocks

        if expert_blocks(model):
            rule = "to balance its routers, a mixture of experts needs micro-batches of equal size on all ranks"
            problems.add("balance.mode", config.section(BalanceConfig).mode, rule, "set it to equal")

    def part(self, launch: Launch) -> Part | None:
        if launch.setup.run.mix.degrees.data == 1:
            return None
        from llmtrain.features.balance.part import LoadBalance

        return LoadBalance(launch)


FEATURE = BalanceFeature()
