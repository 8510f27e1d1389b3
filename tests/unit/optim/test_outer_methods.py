"""Outer methods: what must be equal on all sites, and what a plan knows of their waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.config.run import RunConfig
from llmtrain.optim.outer_methods import Async, DiLoCo, LocalSgd, SitesConfig, Streaming


@pytest.mark.parametrize("method", SitesConfig.CHOICES.values())
def test_all_of_a_methods_fields_are_equal_on_all_sites_but_those_of_a_site(method: type[SitesConfig]) -> None:
    common = method().common()
    assert common.pop("sites.method") == method.selected()
    alone = {key.removeprefix("sites.") for key in common} ^ method.own()
    assert alone == SitesConfig.local | ({"overlap_steps"} if method is Async else set())


def test_rounds_come_as_often_as_each_method_says() -> None:
    eight = (DiLoCo(sync_every=8), Streaming(sync_every=8, fragments=2), Async(sync_every=8, meet_every=3))
    assert [each.round_steps for each in (LocalSgd(), *eight)] == [100, 8, 4, 24]


@pytest.mark.parametrize("method", [Streaming(fragments=2, overlap_steps=3), Async(overlap_steps=3)])
def test_the_least_period_goes_with_the_overlap_and_a_shorter_one_does_not(method: SitesConfig) -> None:
    def broken(sync_every: int) -> list[str]:
        run = RunConfig(deepspeed="", sites=replace(method.synchronising(sync_every), name="a"))
        return [keys[0] for rule in method.rules for keys, _, _ in rule.breaks(run)]

    least = method.least_period
    assert broken(least) == []
    assert broken(least - method.parts) == ["sites.overlap_steps"]
