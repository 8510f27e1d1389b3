"""The reason with which a run ends early; the order of its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.engine.ranks.ranks import Ranks, Seat
from llmtrain.features import Feature, features
from llmtrain.training import run
from llmtrain.training.run import ORDER


@pytest.mark.parametrize(
    ("asks", "told"), [("", "a part of the run asked to stop, and gives no reason"), ("enough", "enough")]
)
def test_a_part_may_ask_to_stop_without_a_reason(asks: str, told: str) -> None:
    seats = tuple(Seat(rank=rank, host="node", local_rank=rank, device="", pid=1) for rank in (0, 1))
    setup = SimpleNamespace(ranks=Ranks(world_size=2, seats=seats))
    launch: Any = SimpleNamespace(
        setup=setup, parts=[SimpleNamespace(asks=asks)], requests=SimpleNamespace(stop_reason=None)
    )
    assert run._reason(launch) == (told, False)


def test_each_feature_with_a_part_has_a_place_in_their_order() -> None:
    with_part = {
        name
        for name, feature in features().items()
        if type(feature).part is not Feature.part or type(feature).part_of is not Feature.part_of
    }
    named = {entry for entry in ORDER if isinstance(entry, str)}
    assert with_part <= named
