"""The outer step, and updates that are too large to count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmtrain.features.sites.exchange import LARGEST, outer_step, outsized, squared_distance
from llmtrain.features.sites.outer_methods import DiLoCo, LocalSgd


def test_diloco_is_nesterovs_sgd_on_the_difference() -> None:
    """torch.optim.SGD on (common - mean of the sites) for five rounds, fp64 against fp32: 1e-6 of values about 1."""
    rng = np.random.default_rng(0)
    anchor = rng.normal(size=1000).astype(np.float32)
    momentum = np.zeros_like(anchor)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.astype(np.float64)))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        found = {name: (anchor + rng.normal(size=1000) * 0.01).astype(np.float32) for name in "abc"}
        weights = {"a": 100.0, "b": 300.0, "c": 600.0}
        mean = sum(weights[name] / 1000 * found[name].astype(np.float64) for name in found)
        parameter.grad = parameter.detach() - torch.from_numpy(mean)
        sgd.step()
        anchor, momentum = outer_step(DiLoCo(), anchor, momentum, found, weights)
    assert np.abs(anchor - parameter.detach().numpy()).max() < 1e-6


def test_an_outer_step_of_one_site_alone_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    anchor = (rng.normal(size=4096) * 10.0 ** rng.integers(-30, 30, 4096)).astype(np.float32)
    values = (rng.normal(size=4096) * 10.0 ** rng.integers(-30, 30, 4096)).astype(np.float32)
    for method in (LocalSgd(), DiLoCo(outer_lr=1.0, outer_momentum=0.0)):
        after, _ = outer_step(method, anchor, np.zeros_like(anchor), {"a": values}, {"a": 7.0})
        assert after.tobytes() == values.tobytes()


def test_of_two_sites_each_trusts_itself() -> None:
    squares, steps = {"a": 1.0, "b": 1e18}, {"a": 4.0, "b": 4.0}
    assert list(outsized(squares, steps, "a")) == ["b"]
    assert outsized(squares, steps, "b") == {}
    assert " 1e+09 times" in outsized(squares, steps, "a")["b"]


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
