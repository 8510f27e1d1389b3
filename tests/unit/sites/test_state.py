"""What a site keeps in checkpoints. tests/runs/test_sites.py resumes real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.base.errors import CheckpointError
from llmtrain.sites import site as site_module
from llmtrain.sites.shard import COMMON, MOMENTUM, RESIDUAL, standing
from tests.unit.sites.test_site import Meeting, at_once, begin_all, joined, two_steps  # noqa: F401


def saved(site: Any) -> tuple[dict[str, np.ndarray], Any]:
    """As checkpoint and trainer.json have it."""
    arrays: dict[str, np.ndarray] = {}
    for piece in site.state():
        with piece.open() as values:
            arrays[piece.kind] = np.append(arrays.get(piece.kind, np.zeros(0, np.float32)), values.numpy())
    return arrays, json.loads(json.dumps(site.to_json()))


def test_sites_go_on_in_the_middle_of_a_round_with_all_that_they_had(joined, monkeypatch) -> None:  # noqa: F811
    """Both stop after one of two steps: what they trained counts in the next round, and no sample is dealt twice.

    The same without a stop gives the same parameters, residuals included: int4 of 0.3 and 0.7 loses something.
    """
    ends = []
    for stops in (False, True):
        meeting = Meeting("a", "b")
        made = [joined(meeting, name, method="diloco", compress="int4") for name in "ab"]
        begin_all(*(site for site, _, _ in made))
        at_once(*(two_steps(site, engine, value) for (site, engine, _), value in zip(made, (0.3, 0.7), strict=True)))
        for (site, engine, _), slope in zip(made, (0.2, 0.5), strict=True):
            engine.values += slope * torch.arange(1.0, 7.0)
            site.after_update(3, complete=False)
        if stops:
            kept = [saved(site) for site, _, _ in made]
            assert all(set(arrays) == {COMMON, MOMENTUM, RESIDUAL} for arrays, _ in kept)
            engines = [engine for _, engine, _ in made]
            made = [joined(meeting, name, method="diloco", compress="int4") for name in "ab"]
            for (site, engine, _), (arrays, told), before in zip(made, kept, engines, strict=True):
                engine.values.copy_(before.values)
                monkeypatch.setattr(site_module, "read_back", lambda *_, arrays=arrays: arrays)
                site.restore(Path("step-3"), told)
            starts = [first for _, first in at_once(*(lambda s=site: s.begin(3, 99, 5.0) for site, _, _ in made))]
            assert starts == [10, 16]  # of 8 to 15, 8, 9 and 12, 13 are trained: a goes on with 10, 11, 14, 15
        else:
            at_once(*(lambda s=site: s._synchronise(site_module.time.monotonic() + 60) for site, _, _ in made))
        assert made[0][1].values.tolist() == made[1][1].values.tolist()
        residuals = [site._feedback.residual.tolist() for site, _, _ in made]
        ends.append((made[0][1].values.tolist(), made[0][0]._momentum.tolist(), residuals))
        assert any(residuals[0])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("wrong", [{}, {"round": -1}, {"ledger": None}, {"trained": "x"}, {"weights": []}, 5])
def test_nonsense_in_trainer_json_is_named(wrong) -> None:
    right = {"round": 1, "trained": 0, "weights": [0], "was": "a:0", "ledger": {"next": 0, "free": [], "dealt": {}}}
    assert standing(right, Path("step-1"))[2] == 1
    kept = {**right, **wrong} if isinstance(wrong, dict) and wrong else wrong
    with pytest.raises(CheckpointError, match=r"step-1: the sites' part of its trainer\.json makes no sense"):
        standing(kept, Path("step-1"))
