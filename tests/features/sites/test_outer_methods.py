"""Outer methods: what must be equal on all sites, and how often rounds come."""

from __future__ import annotations

import pytest

from llmtrain.config.run import RunConfig
from llmtrain.features.sites.outer_methods import DiLoCo, LocalSgd, SitesConfig, Streaming
from llmtrain.features.sites.rules import RULES


@pytest.mark.parametrize("method", SitesConfig.CHOICES.values())
def test_all_of_a_methods_fields_are_equal_on_all_sites_but_those_of_a_site(method: type[SitesConfig]) -> None:
    common = method().common()
    assert common.pop("sites.method") == method.selected()
    alone = {key.removeprefix("sites.") for key in common} ^ method.own()
    assert alone == SitesConfig.local


def test_rounds_come_as_often_as_each_method_says() -> None:
    eight = (DiLoCo(sync_every=8), Streaming(sync_every=8, fragments=2))
    assert [each.round_steps for each in (LocalSgd(), *eight)] == [100, 8, 4]


def test_each_round_has_more_steps_than_its_parameters_travel() -> None:
    def broken(sync_every: int) -> list[str]:
        sites = Streaming(name="a", coordinator="h:1", fragments=2, overlap_steps=3, sync_every=sync_every)
        config = RunConfig(deepspeed="", sites=sites)
        return [keys[0] for rule in RULES for keys, _, _ in rule.breaks(config)]

    assert broken(8) == []
    assert broken(6) == ["sites.overlap_steps"]
