"""Find memory and time of a run before its start, by a rehearsal, and compare them with what its ranks have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.base.choice import BELOW_1, Rules, bounded
from llmtrain.features import Expected, Feature

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from llmtrain.config.problems import Problems
    from llmtrain.config.run import Run, RunConfig
    from llmtrain.engine.ranks.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What the last answer of `llmtrain plan` must say, so that the run may start."""

    memory_margin: float | None = bounded(None, BELOW_1, "0.05 keeps 5 % free; null checks nothing")
    """Refuse to start if the plan leaves less than this share of a device's memory free; null = always start."""


def autos(config: RunConfig) -> list[str]:
    """Return the keys whose value is auto, which are decided by the memory."""
    from llmtrain.config.rules import value_of

    return [key for key in PlanFeature.decides if value_of(key, config) == "auto"]


class PlanFeature(Feature):
    section = PlanConfig
    observes = True
    renamed = (("train.memory_margin", "plan.memory_margin"),)
    decides = ("train.micro_batch", "model.recompute.layers")
    commands = (("plan", "llmtrain.features.plan.command", "rehearse a run: its memory, and if it fits"),)

    def asked(self, config: RunConfig) -> bool:
        return config.section(PlanConfig).memory_margin is not None or bool(autos(config))

    def rules(self) -> Rules:
        from llmtrain.features.plan.rules import OF_FORMS

        return Rules(of_forms=OF_FORMS)

    def summary(self, run: Run) -> Iterable[str]:
        from llmtrain.features.plan.planned import summary

        return summary(run)

    def expected(self, run: Run, *, on_gpu: bool) -> Expected | None:
        from llmtrain.features.plan.planned import stored

        planned = stored(run, on_gpu=on_gpu)
        return None if planned is None else planned.expected()

    def check_model(self, config: RunConfig, model: PreTrainedModel, problems: Problems) -> None:
        from llmtrain.models.experts import expert_blocks

        if config.model.recompute.layers == "auto" and expert_blocks(model):
            rule = "auto counts memory before tokens are routed, and an expert's memory depends on its tokens"
            problems.add("model.recompute.layers", "auto", rule, "write all or a number of layers")

    def decided(self, run: Run, ranks: Ranks, *, trains: bool) -> Run:
        if not self.asked(run.config):
            return run
        from llmtrain.features.plan.auto import check_room, decided

        run = decided(run, ranks)
        if trains:
            check_room(run, ranks)
        return run

    def explain(self, error: Exception, run: Run, device: torch.device) -> str:
        from llmtrain.features.plan.out_of_memory import explain

        return explain(error, run, device)


FEATURE = PlanFeature()
