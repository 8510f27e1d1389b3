"""Sites that synchronise after each optimizer step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.sites.test_site import joined  # noqa: F401
from tests.unit.sites.test_streaming import trained


@pytest.mark.parametrize("lr", [1.0, 1.4])
def test_signs_with_error_feedback_after_each_step_are_those_of_the_definition(joined, lr: float) -> None:  # noqa: F811
    """d = change + what was lost; sent = sign(d) mean |d| of the block (256, the missing ones 0); lr times the mean of
    what was sent is added to the common parameters. In fp64; the sites' fp32 is off by 1e-6 of values up to 10."""
    grow, last = {"a": 1.0, "b": -0.4}, 5
    setting = {"method": "every_step", "compress": "sign", "sync_every": 4}
    _, starts, seen = trained(joined, grow, last, **setting, **({} if lr == 1 else {"outer_lr": lr}))
    slope = np.array([1.0, 2.0, 3.0, 0.1, 0.2, 0.3])
    change = np.zeros(6)
    lost = {name: np.zeros(6) for name in grow}
    wanted = []
    for step in range(1, last + 1):
        sent = []
        for name, size in grow.items():
            difference = size * step**0.5 * slope + lost[name]
            scale = np.abs(difference).sum() / 256
            sent.append(np.where(difference < 0, -scale, scale))
            lost[name] = difference - sent[-1]
        change = change + lr * (sent[0] + sent[1]) / 2
        wanted.append(change)
    for after in zip(*seen, strict=True):
        assert after[0].numpy().tobytes() == after[1].numpy().tobytes()
    for k in range(1, last):
        got = (seen[0][k] - seen[0][0]).numpy()
        assert np.abs(got - (wanted[k] - wanted[0])).max() < 1e-5
    assert len({*starts[0], *starts[1]}) == 2 * last
