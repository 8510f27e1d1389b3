"""Numbers as messages show them."""

from __future__ import annotations

import pytest

from llmtrain.base import units


@pytest.mark.parametrize(
    ("numbers", "most", "shown"),
    [
        ([], 6, ""),
        ([3], 6, "3"),
        ([0, 1], 6, "0-1"),
        ([0, 1, 2, 3, 7], 6, "0-3, 7"),
        ([0, 2, 4, 5, 6], 2, "0, 2 and 3 more"),
    ],
)
def test_consecutive_numbers_are_one_span(numbers: list[int], most: int, shown: str) -> None:
    assert units.spans(numbers, most) == shown


def test_one_has_no_plural() -> None:
    assert [units.counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
