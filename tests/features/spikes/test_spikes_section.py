"""What the section `spikes` is refused for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"fault": {"pinned": 3}}, ("fault.pinned = 3", "spikes.pinned")),
        ({"optim": {"skip_outliers": 6.0}}, ("optim.skip_outliers = 6.0", "spikes.skip_outliers")),
        ({"spikes": {"skip_outliers": 0.0}}, ("spikes.skip_outliers = 0.0",)),
        (
            {"spikes": {"skip_outliers": 6.0}, "optim": {"name": "muon"}},
            ("spikes.skip_outliers = 6.0",),
        ),
    ],
)
def test_check_names_key_value_and_remedy(
    refused: Callable[[dict[str, Any]], str], run: dict[str, Any], says: tuple[str, ...]
) -> None:
    told = refused(run)
    assert all(words in told for words in says), told
