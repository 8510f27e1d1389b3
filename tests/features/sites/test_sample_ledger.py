"""Shares of the work: the samples and the number of steps of each site, and that all sites end together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.features.sites.sample_ledger import SLOWEST, Ledger, Request, steps_each, steps_of
from llmtrain.training.step import is_due
from tests.features.sites.sites_in_threads import Meeting, at_once


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_sample_is_trained_twice_or_lost(data: st.DataObject) -> None:
    """Sites of unequal batches come, go, are lost and cut off: what the model has and what is open are all samples."""
    ledger, done = Ledger(next=0), set()
    for _ in range(data.draw(st.integers(1, 8))):
        trained = {}
        for site, spans in ledger.dealt.items():
            if data.draw(st.booleans()):  # else it is lost
                batch = {"a": 4, "b": 4, "c": 6}[site]
                starts = list(steps_of(spans, batch))[: data.draw(st.integers(0, 5))]
                samples = {index for first in starts for index in range(first, first + batch)}
                assert not samples & done and len(samples) == batch * len(starts)
                done |= samples
                trained[site] = len(samples)
        present = sorted(data.draw(st.sets(st.sampled_from("abc"), min_size=1)))
        requests = [Request(site=s, batch={"a": 4, "b": 4, "c": 6}[s], steps=3, reserve=2) for s in present]
        ledger = Ledger.from_json(json.loads(json.dumps(ledger.settled(trained, requests).to_json())))
        open_ = [index for spans in (ledger.free, *ledger.dealt.values()) for span in spans for index in range(*span)]
        assert len(open_) == len(set(open_)) and sorted([*open_, *done]) == list(range(ledger.next))
        for request in requests:
            assert len(list(steps_of(ledger.dealt[request.site], request.batch))) == 5


def test_while_all_stay_samples_are_used_in_order_and_a_lost_sites_first() -> None:
    requests = [Request(site=site, batch=2, steps=3, reserve=4) for site in ("a", "b")]
    first = Ledger(next=10).settled({}, requests)
    second = first.settled({"a": 6, "b": 6}, requests)
    assert [first.dealt[s][0] for s in "ab"] == [(10, 16), (16, 22)]
    assert [next(iter(steps_of(second.dealt[s], 2))) for s in "ab"] == [22, 28]
    alone = second.settled({"b": 6}, requests[1:])  # a is lost: its samples are trained next
    assert list(steps_of(alone.dealt["b"], 2))[:3] == [22, 24, 26]


def test_pairs_of_steps_are_apart() -> None:
    spans = ((0, 8), (20, 24))
    assert list(steps_of(spans, 4)) == [0, 4, 20] and all(b - a >= 4 for a, b in pairwise(steps_of(spans, 4)))


def test_steps_follow_the_speeds_and_no_word_of_one_site_stops_the_others() -> None:
    assert steps_each({"a": 1.0, "b": 2.0, "c": 1.04, "d": 0.0}, 100, 1) == {"a": 100, "b": 50, "c": 100, "d": 100}
    assert steps_each({"a": 1.0, "b": 3.0}, 2, 1) == {"a": 2, "b": 1}
    assert steps_each({"a": 1.0, "b": 10.0}, 100, 21) == {"a": 100, "b": 21}
    assert steps_each({"a": 1e-9, "b": 1.0}, 160, 1) == {"a": 160, "b": 160 * SLOWEST}
    assert steps_each({"a": 0.0}, 7, 1) == {"a": 7}


def test_what_is_due_is_not_lost_among_skipped_steps() -> None:
    assert [is_due(50, range(first, end)) for first, end in ((50, 51), (51, 52), (98, 101), (101, 150))] == [
        True,
        False,
        True,
        False,
    ]
    assert not is_due(0, range(1, 9)) and not is_due(None, range(1, 9))


def run_of(site: Any, engine: Any, step_s: float, last: int, trained: list[int]) -> Callable[[], list[int]]:
    """Trains to step `last` as the loop does, each step so long; the steps after which it stood. `trained`: samples."""

    def run() -> list[int]:
        step, first = site.begin(0, 0, 60.0)
        seen = []
        while step < last:
            trained.extend((first, first + 1))
            engine.values += 1
            step, first = site.after_update(step + 1, step_s, complete=step + 1 >= last)
            seen.append(step)
        return seen

    return run


@pytest.mark.parametrize(
    ("method", "last"),
    [
        ({"method": "local_sgd", "sync_every": 8, "pace": "measured"}, 32),
        ({"method": "diloco", "sync_every": 8, "pace": "measured"}, 29),  # the last round is a shorter one
        ({"method": "streaming", "sync_every": 16, "fragments": 2, "overlap_steps": 0, "pace": "measured"}, 32),
        ({"method": "streaming", "sync_every": 16, "fragments": 2, "overlap_steps": 2, "pace": "measured"}, 29),
    ],
)
def test_sites_of_three_speeds_end_at_one_step_with_one_model_and_every_sample_once(joined, method, last) -> None:
    meeting = Meeting("a", "b", "c")
    speeds = {"a": 1.0, "b": 2.0, "c": 4.0}
    made = {name: joined(meeting, name, last_step=last, max_alone_steps=20, **method) for name in speeds}
    samples: dict[str, list[int]] = {name: [] for name in speeds}
    seen = at_once(*(run_of(*made[name][:2], each, last, samples[name]) for name, each in speeds.items()))
    assert [each[-1] for each in seen] == [last] * 3
    values = [engine.values.tolist() for _, engine, _ in made.values()]
    assert values[0] == values[1] == values[2]
    told = [[fields["step"] for kind, fields in events if kind == "synchronise"] for *_, events in made.values()]
    assert len(told[0]) == len(told[1]) == len(told[2]), told
    assert not any(kind == "synchronise_failed" for *_, events in made.values() for kind, _ in events)
    first = min(8, last)  # after the first round, which begins before anybody has been measured
    steps = [sum(step > first for step in each[:-1]) for each in seen]
    assert steps[0] > steps[1] > steps[2] and math.isclose(steps[1], steps[0] / 2, abs_tol=4), steps
    every = sorted(each for mine in samples.values() for each in mine)
    assert len(set(every)) == len(every)
    ledger: Ledger = made["a"][0]._ledger
    open_ = [n for spans in (ledger.free, *ledger.dealt.values()) for span in spans for n in range(*span)]
    assert sorted([*every, *open_]) == list(range(ledger.next))


def test_a_site_that_tells_a_step_far_ahead_does_not_end_the_others_runs(joined) -> None:
    """No site can be further than it trains alone: sync_every and max_alone_steps."""
    meeting = Meeting("a", "b")
    (a, _, _), (b, _, _) = (joined(meeting, name, last_step=10**9) for name in "ab")
    at_once(lambda: a.begin(0, 0, 60.0), lambda: b.begin(0, 0, 60.0))

    def run(site: Any, first: int) -> int:
        for step in (first + 1, first + 2):
            at, _ = site.after_update(step, 0.001, complete=False)
        return at

    assert at_once(lambda: run(a, 0), lambda: run(b, 10**6)) == [2 + 2 + 4, 10**6 + 2]
