"""Updates that are too large, and means that a wrong site does not move."""

from __future__ import annotations

import numpy as np
import pytest

from llmtrain.sites.outer import LARGEST, outsized, squared_distance


def test_of_two_sites_each_trusts_itself() -> None:
    squares, steps = {"a": 1.0, "b": 1e18}, {"a": 4.0, "b": 4.0}
    assert list(outsized(squares, steps, "a")) == ["b"]
    assert outsized(squares, steps, "b") == {}
    assert "its update is 1e+09 times what the others change in a step" in outsized(squares, steps, "a")["b"]


def test_of_three_one_cannot_make_the_others_look_large() -> None:
    """Not by a tiny update of its own, nor by claiming many steps."""
    for own in ("a", "b"):
        assert outsized({"a": 1.0, "b": 1.21, "c": 1e-30}, dict.fromkeys("abc", 4.0), own) == {}
        assert outsized({"a": 1.0, "b": 1.21, "c": 1.0}, {"a": 4.0, "b": 4.0, "c": 1e15}, own) == {}
        assert list(outsized({"a": 1.0, "b": 1.21, "c": (3 * LARGEST) ** 2}, dict.fromkeys("abc", 4.0), own)) == ["c"]


def test_unequal_steps_are_no_fault() -> None:
    """One step beside 500, all in one direction or in none."""
    for exponent in (1.0, 0.5):
        squares = {"a": 1.0, "b": (500**exponent) ** 2}
        assert outsized(squares, {"a": 1.0, "b": 500.0}, "a") == outsized(squares, {"a": 1.0, "b": 500.0}, "b") == {}


def test_nothing_that_has_changed_is_too_large_where_nothing_else_has() -> None:
    assert outsized({}, {}, "a") == outsized({"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}, "a") == {}


def test_squared_distances_are_fp64s() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=700_001).astype(np.float32) for _ in range(2))
    want = ((a.astype(np.float64) - b) ** 2).sum()
    assert squared_distance(a, b) == pytest.approx(want, rel=1e-12)
    assert squared_distance(None, b) == pytest.approx((b.astype(np.float64) ** 2).sum(), rel=1e-12)
