"""The method streaming, in fragments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.base.threads import in_thread
from llmtrain.features.sites import site as site_module
from llmtrain.features.sites.membership import join
from llmtrain.features.sites.quorum import RoundFailed
from tests.features.sites.sites_in_threads import (
    Meeting,
    at_once,
    begin_all,
    gives_up_after,
    saved,
    steps,
    trained,
)


def test_what_a_call_in_the_background_raises_its_caller_meets() -> None:
    def fails() -> None:
        raise RoundFailed("nobody came")

    assert join(in_thread(lambda: 5, "answers")) == 5
    with pytest.raises(RoundFailed, match="nobody came"):
        join(in_thread(fails, "fails"))


@pytest.mark.parametrize("compress", ["none", "int8"])
def test_one_fragment_without_overlap_is_diloco_to_the_last_bit(joined, compress) -> None:
    ends = []
    for changes in ({"method": "diloco"}, {"method": "streaming", "fragments": 1, "overlap_steps": 0}):
        made, starts, seen = trained(joined, {"a": 1.0, "b": 2.0}, 9, compress=compress, **changes)
        ends.append(([each.tolist() for values in seen for each in values], starts, made[0][0]._momentum.tolist()))
    assert ends[0] == ends[1] and any(ends[0][2])


def test_two_fragments_on_their_way_during_a_step_by_hand(joined) -> None:
    """Outer SGD(lr=1) takes the mean. Round 1 is about w, round 2 about v (`fragment_of`: v, w are equally large).

    a grows by 1 a step and b by 3. After step 2 they send w = 2 and 6: the mean 4 arrives after step 3, when they
    have trained 1 and 3 more: 5 and 7. v follows two steps later: 4 and 12, 8; 9 and 11 after step 5.
    """
    meeting = Meeting("a", "b")
    setting = {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1}
    made = [joined(meeting, name, outer_lr=1.0, outer_momentum=0.0, **setting) for name in "ab"]
    seen: list[list] = [[], []]
    calls = [
        steps(site, engine, lambda _, size=size: size * torch.ones(6), 5, mine)
        for (site, engine, _), size, mine in zip(made, (1, 3), seen, strict=True)
    ]
    at_once(*calls)
    w, v = ([[float(values[at]) for values in mine] for mine in seen] for at in (0, 3))
    assert w[0][:4] == [1, 2, 5, 6] and w[1][:4] == [3, 6, 7, 10]
    assert v[0][:4] == [1, 2, 3, 4] and v[1][:4] == [3, 6, 9, 12]
    # Step 5 is the last: v arrives, then each fragment is synchronised once more, w (7 and 13) first.
    assert w[0][4] == w[1][4] == v[0][4] == v[1][4] == 10.0
    told = [fields for kind, fields in made[0][2] if kind == "synchronise"]
    assert [(each["step"], each["overlapped_steps"]) for each in told] == [(0, 0), (3, 1), (5, 1), (5, 0), (5, 0)]
    assert all(each["received_bytes"] == 12 for each in told[1:])  # three numbers of one other site


def test_a_site_that_is_not_used_gives_up_what_it_has_in_all_fragments(joined) -> None:
    """Its samples are dealt out again, so no part of what they taught may stay."""
    meeting = Meeting("a", "b")
    setting = {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 0}
    made = [joined(meeting, name, outer_lr=1.0, outer_momentum=0.0, **setting) for name in "ab"]
    begin_all(*(site for site, _, _ in made))
    made[1][0]._server.close()

    def two(site: Any, engine: Any, value: float) -> Callable[[], None]:
        def run() -> None:
            engine.values += value
            site.after_update(1, 0.001, complete=False)
            site.after_update(2, 0.001, complete=False)

        return run

    at_once(*(two(site, engine, value) for (site, engine, _), value in zip(made, (1.0, 5.0), strict=True)))
    assert made[0][2][-1][1]["used"] == ["a"]
    assert made[0][1].values.tolist() == [1.0] * 6  # w is in common now; v is still a's own
    assert made[1][1].values.tolist() == [1.0] * 3 + [0.0] * 3


STREAMS = {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1}


def advance(site: Any, engine: Any, first: int, count: int) -> Callable[[], None]:
    def run() -> None:
        for step in range(first, first + count):
            engine.values += 1
            site.after_update(step, 0.001, complete=False)

    return run


def test_a_site_that_is_lost_while_a_round_is_on_its_way_holds_nobody_up(joined) -> None:
    """b sets off and is gone: the others' training goes on meanwhile, and the round arrives without it."""
    meeting = Meeting("a", "b", "c")
    made = {name: joined(meeting, name, **STREAMS) for name in "abc"}
    begin_all(*(site for site, _, _ in made.values()))

    def dies(*_: Any, **__: Any) -> None:
        meeting.leave("b")
        raise RoundFailed("it is dead")

    made["b"][0]._meetings.meet = dies
    at_once(
        *(advance(site, engine, 1, 3) for name, (site, engine, _) in made.items() if name != "b"),
        advance(*made["b"][:2], 1, 2),
    )
    for name in "ac":
        _, engine, events = made[name]
        told = events[-1][1]
        assert (told["step"], told["used"], told["overlapped_steps"]) == (3, ["a", "c"], 1), events[-1]
        assert engine.values.tolist()[3:] == [3.0] * 3


def test_a_run_that_stops_while_a_round_is_on_its_way_goes_on_before_it(joined, monkeypatch) -> None:
    """Nothing of that round is in the checkpoint: the site has all its samples and weights to send again."""
    made = [joined(Meeting("a"), "a", **STREAMS) for _ in range(2)]
    (first, engine, _), (second, other, _) = made
    first.begin(0, 0, 60.0)
    advance(first, engine, 1, 2)()
    assert first._flight is not None
    arrays, kept = saved(first)
    assert kept["trained"] == 4 and kept["weights"] == [16, 16] and kept["round"] == 1
    advance(first, engine, 3, 1)()  # it arrives, and is in no checkpoint
    size = second._shard.size
    padded = {kind: np.zeros(size, np.float32) for kind in arrays}  # what lies between fragments is not kept
    for kind, values in padded.items():
        for (at, _, region), low in zip(second._shard.regions(), (0, 3), strict=True):
            values[at : at + region.numel] = arrays[kind][low : low + region.numel]
    monkeypatch.setattr(site_module, "read_back", lambda *_: padded)
    other.values += 2
    second.restore(Path("step-2"), kept)
    assert second.begin(2, 99, 60.0) == (2, 4)  # the first sample that was not trained
    assert second._weights == [16, 0] and second._trained == 0
    assert other.values.tolist() != [2.0] * 6 and other.values.tolist()[3:] == [2.0] * 3  # w has made its outer step


def test_the_last_step_waits_for_a_lost_site_once(begun) -> None:
    """Not for each fragment."""
    _, ((a, engine, events), _) = begun("ab", **STREAMS)
    gives_up_after(a, 0.5)
    engine.values += 1
    a.after_update(1, 0.001, complete=True)
    assert [kind for kind, _ in events] == ["synchronise", "synchronise_failed"]
