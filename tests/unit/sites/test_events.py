"""What is seen of a round: numbers of it in the metrics."""

from __future__ import annotations

import numpy as np
import torch

from llmtrain.sites.site import telling
from llmtrain.tracking.metrics import METRICS
from tests.unit.sites.test_site import Meeting, at_once, begin_all, gives_up_after, joined, two_steps  # noqa: F401
from tests.unit.sites.test_streaming import trained


def told(events: list, kind: str) -> list[dict]:
    return [fields for each, fields in events if each == kind]


def test_each_round_is_an_event_and_a_row_of_documented_metrics(joined) -> None:  # noqa: F811
    """diloco by hand: w of 6 numbers, from 0; the mean of 1 and 2 is 1.5; the first step is 1.9 x 0.5 x 1.5."""
    setting = {"method": "diloco", "outer_lr": 0.5, "outer_momentum": 0.9}
    meeting = Meeting("a", "b")
    (a, engine_a, _), (b, engine_b, _) = (joined(meeting, name, **setting) for name in "ab")
    written: list[tuple[str, dict]] = []
    rows: list[dict] = []
    a._tell = telling(
        lambda kind, **fields: written.append((kind, fields)), lambda row, *, more: rows.append({**row, "more": more})
    )
    begin_all(a, b)
    at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 2))
    first, second = told(written, "synchronise")
    assert first["outer_step_norm"] == 0 and rows[0]["step"] == 0
    assert np.isclose(second["outer_step_norm"], np.sqrt(6) * 1.9 * 0.5 * 1.5, rtol=1e-6)
    assert rows[1] == {
        "step": 2, "sites/received_bytes": 24, "sites/sent_bytes": 24,
        "sites/stood_s": second["stood_s"], "sites/participants": 2,
        "sites/staleness_steps": 0, "sites/outer_step_norm": second["outer_step_norm"],
        "sites/given_up_samples": 0, "sites/left_out_samples": 0, "more": True,
    }  # fmt: skip
    assert rows[1].keys() - {"more"} <= METRICS.keys() and 0 <= second["stood_s"] <= second["seconds"] < 60
    assert torch.isfinite(engine_a.values).all()


def test_a_round_that_fails_tells_only_how_long_it_stood(joined) -> None:  # noqa: F811
    meeting = Meeting("a", "b")
    (a, engine, _), (b, _, _) = joined(meeting, "a"), joined(meeting, "b")
    rows: list[dict] = []
    begin_all(a, b)
    gives_up_after(a, 0.3)
    a._tell = telling(lambda kind, **fields: None, lambda row, *, more: rows.append(row))
    two_steps(a, engine, 1)()
    (row,) = rows
    assert row.keys() == {"step", "sites/stood_s"} and 0.2 < row["sites/stood_s"] < 20


def test_steps_that_are_trained_meanwhile_are_staleness_and_no_standing(joined, monkeypatch) -> None:  # noqa: F811
    """Each step takes 0.1 s, and a round is under way during two: what is trained is not waited."""
    import time

    from llmtrain.sites.site import Site

    plain = Site.after_update

    def slow(self, step, *, complete):
        time.sleep(0.1)
        return plain(self, step, complete=complete)

    monkeypatch.setattr(Site, "after_update", slow)
    setting = {"method": "streaming", "sync_every": 6, "fragments": 2, "overlap_steps": 2}
    made, _, _ = trained(joined, {"a": 1.0, "b": 2.0}, 8, last_step=8, **setting)
    under_way = [each for each in told(made[0][2], "synchronise") if each["overlapped_steps"] == 2]
    assert under_way
    for each in under_way:
        assert each["seconds"] >= 0.2 and each["stood_s"] <= each["seconds"] - 0.19
