"""Several sites that train one model over a slow network, each with a launch of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from llmtrain.base.choice import Rules
from llmtrain.features import Feature
from llmtrain.features.sites.outer_methods import DiLoCo, SitesConfig

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig
    from llmtrain.tracking.metrics import MetricKey
    from llmtrain.training.parts import Launch, Part


class SitesFeature(Feature):
    section = SitesConfig
    default = DiLoCo
    idle = "without sites.name the run trains alone"
    commands = (("sites", "llmtrain.features.sites.command", "start or ask the coordinator of sites"),)

    def asked(self, config: RunConfig) -> bool:
        return config.section(SitesConfig).name is not None

    def rules(self) -> Rules:
        from llmtrain.features.sites.rules import RULES

        return Rules(of_values=RULES)

    def part(self, launch: Launch) -> Part:
        from llmtrain.features.sites.part import Sites

        return Sites(launch)

    def unrepeatable(self, config: RunConfig) -> str:
        return "the steps of a site depend on messages of other sites, which are not kept"

    def metrics(self) -> Mapping[str, MetricKey]:
        from llmtrain.features.sites.report import METRICS

        return METRICS

    def facts(self, events: Callable[[str], list[dict[str, Any]]]) -> Iterable[tuple[str, str]]:
        from llmtrain.features.sites.report import facts

        return facts(events("synchronise"), events("synchronise_failed"))


FEATURE = SitesFeature()
