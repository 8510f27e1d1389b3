"""The reason with which a run ends early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.engine.ranks.ranks import Ranks, Seat
from llmtrain.training import run


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
