"""A check after the first step of an adapter: a gradient has reached it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.features import Feature

if TYPE_CHECKING:
    from llmtrain.config.run import RunConfig
    from llmtrain.training.parts import Launch, Part


class AdapterCheckFeature(Feature):
    def asked(self, config: RunConfig) -> bool:
        return config.adapter.r is not None

    def part(self, launch: Launch) -> Part:
        from llmtrain.features.adapter_check.part import AdapterCheck

        return AdapterCheck(launch)


FEATURE = AdapterCheckFeature()
