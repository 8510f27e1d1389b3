"""The reason with which a run ends early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.training import run


@pytest.mark.parametrize(
    ("asks", "told"), [("", "a part of the run asked to stop, and gives no reason"), ("enough", "enough")]
)
def test_a_part_may_ask_to_stop_without_a_reason(monkeypatch: pytest.MonkeyPatch, asks: str, told: str) -> None:
    seats = [SimpleNamespace(rank=rank, host="node") for rank in (0, 1)]
    setup = SimpleNamespace(ranks=SimpleNamespace(seats=seats))
    launch: Any = SimpleNamespace(
        setup=setup, parts=[SimpleNamespace(asks=asks)], requests=SimpleNamespace(stop_reason=None)
    )
    monkeypatch.setattr(run, "from_all", lambda _, mine: [mine] * 2)
    assert run._reason(launch) == (told, False)
