"""Methods of sites beside local SGD and DiLoCo: streaming in fragments, and async."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.base.threads import in_thread
from llmtrain.sites import site as site_module
from llmtrain.sites.membership import join
from llmtrain.sites.quorum import RoundFailed
from llmtrain.sites.shard import LINE
from llmtrain.sites.transport import Server
from tests.helpers.sites_in_threads import (
    Meeting,
    at_once,
    begin_all,
    gives_up_after,
    saved,
    sends_nothing,
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
    calls = [steps(site, engine, lambda _, size=size: size * torch.ones(6), 5, mine)
             for (site, engine, _), size, mine in zip(made, (1, 3), seen, strict=True)]  # fmt: skip
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
    at_once(*(advance(site, engine, 1, 3) for name, (site, engine, _) in made.items() if name != "b"),
            advance(*made["b"][:2], 1, 2))  # fmt: skip
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


ASYNC: dict[str, Any] = {
    "method": "async", "sync_every": 2, "meet_every": 3, "overlap_steps": 0, "max_alone_steps": 20,
}  # fmt: skip


def train(site: Any, engine: Any, grow: float, steps: int) -> None:
    """So many steps, each of which adds `grow`."""
    for _ in range(steps):
        engine.values += grow
        site.after_update(site._step + 1, 0.001, complete=False)


def exchanges(events: list) -> list[dict]:
    return [fields for kind, fields in events if kind == "exchange"]


@pytest.mark.parametrize("overlap", [0, 1])
def test_one_site_alone_trains_as_without_sites_to_the_last_bit(joined, overlap) -> None:
    """Nothing is written into its parameters, over meetings and exchanges."""
    site, engine, events = joined(Meeting("a"), "a", last_step=13, **{**ASYNC, "overlap_steps": overlap})
    rng, step, plain = np.random.default_rng(0), 0, torch.zeros(6)
    site.begin(0, 0, 60.0)
    while step < 13:
        change = torch.from_numpy((rng.normal(size=6) * 10.0 ** rng.integers(-20, 3, 6)).astype(np.float32))
        engine.values += change
        plain += change
        step, _ = site.after_update(step + 1, 0.001, complete=step + 1 == 13)
        assert engine.values.numpy().tobytes() == plain.numpy().tobytes()
    assert [each["step"] for each in exchanges(events)] == [2, 4, 8, 10]
    assert [fields["step"] for kind, fields in events if kind == "synchronise"] == [0, 6, 12, 13]


def test_two_sites_take_the_newest_of_each_other_and_meet(begun) -> None:
    """a grows by 1 a step and b by 3, of as many tokens a step; b begins when a has done two.

    a sends 2 and has nothing of b. b sends 6, takes a's 2: each has 2 steps behind it, (6 + 2) / 2 = 4. a goes on from
    2 to 4, and takes b's 6, of half as many steps: (4 x 4 + 2 x 6) / 6. b goes on from 4 to 10: its own line is 12, and
    a's is 4: 8. Then both do two steps and meet: the lines are 6 and 18, the mean 12.
    """
    _, ((a, engine_a, events), (b, engine_b, _)) = begun("ab", **ASYNC)
    train(a, engine_a, 1, 2)
    assert engine_a.values.tolist() == [2.0] * 6
    train(b, engine_b, 3, 2)
    assert engine_b.values.tolist() == [4.0] * 6
    train(a, engine_a, 1, 2)
    assert engine_a.values.tolist() == pytest.approx([28 / 6] * 6)
    train(b, engine_b, 3, 2)
    assert engine_b.values.tolist() == [8.0] * 6
    at_once(lambda: train(a, engine_a, 1, 2), lambda: train(b, engine_b, 3, 2))
    assert engine_a.values.tolist() == engine_b.values.tolist() == [12.0] * 6
    assert [(each["known"], each["late_updates"]) for each in exchanges(events)] == [({}, 0), ({"b": 1}, 0)]
    assert exchanges(events)[1]["received_bytes"] == 24 and events[-1][1]["used"] == ["a", "b"]
    train(a, engine_a, 1, 2)  # the exchange after the meeting is of nothing before it
    assert engine_a.values.tolist() == [14.0] * 6 and exchanges(events)[-1]["known"] == {}


def test_what_was_learned_on_stale_ground_weighs_less(begun) -> None:
    """While a trains twice, b sends five times, three times more than usual: a's change of 2 counts half."""
    _, ((a, engine_a, events), (b, engine_b, _)) = begun("ab", **{**ASYNC, "meet_every": 9})
    train(b, engine_b, 0, 10)
    train(a, engine_a, 1, 2)
    assert exchanges(events)[-1]["late_updates"] == 3 and exchanges(events)[-1]["known"] == {"b": 5}
    assert np.allclose(a._newest._line, 1.0)
    assert engine_a.values.tolist() == pytest.approx([1.0 * 2 / 12] * 6)  # two steps of a, ten of b


@pytest.mark.parametrize("compress", ["bf16", "int8", "int4"])
def test_compressed_changes_come_and_the_meeting_makes_up_for_them(begun, compress) -> None:
    _, ((a, engine_a, _), (b, engine_b, _)) = begun("ab", compress=compress, **ASYNC)
    slope = torch.tensor([1.0, 0.9, 0.7, 0.5, 0.3, 0.1])
    train(a, engine_a, slope, 2)
    train(b, engine_b, 3 * slope, 2)
    assert (engine_b.values - 4 * slope).abs().max() < 0.2
    train(b, engine_b, 3 * slope, 3)
    at_once(lambda: train(a, engine_a, slope, 4), lambda: train(b, engine_b, 3 * slope, 1))
    assert engine_a.values.tolist() == engine_b.values.tolist()
    assert (engine_a.values - 12 * slope).abs().max() < 0.9
    owed = [site._feedback.residual for site in (a, b)]
    assert np.abs(engine_a.values.numpy() + (owed[0] + owed[1]) / 2 - 12 * slope.numpy()).max() < 1e-4


def sends(kinds: str, instead: Callable[[np.ndarray], np.ndarray]) -> Callable[[Server], None]:
    """Makes a server publish something else instead of the arrays whose kind begins so."""

    def changed(server: Server) -> None:
        publish = server.publish
        server.publish = lambda round_, arrays: publish(  # type: ignore[method-assign]
            round_, {kind: instead(each) if kind.startswith(kinds) else each for kind, each in arrays.items()}
        )

    return changed


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Server.close, "refused|Errno"),
        (sends_nothing, "not sent all of it"),
        (sends("clock", lambda _: np.array([-1, 2, 3])), "clock makes no sense"),
        (sends("newest", lambda each: each * np.float32(1e9)), "the limit is 100"),
        (sends("newest", lambda each: each * np.float32("nan")), "not finite"),
    ],
)
def test_a_site_that_sends_nothing_or_nonsense_holds_nobody_up(joined, wrong, said, capsys) -> None:
    meeting = Meeting("a", "b")
    (a, engine_a, events), (b, engine_b, _) = (
        joined(meeting, name, **ASYNC, timeout_s=6.0 if wrong is sends_nothing else 60.0) for name in "ab"
    )
    begin_all(a, b)
    wrong(b._server)
    train(b, engine_b, 3, 2)
    train(a, engine_a, 1, 2)
    assert engine_a.values.tolist() == [2.0] * 6 and exchanges(events)[-1]["known"] == {}
    assert exchanges(events)[-1]["stood_s"] < 30
    told = capsys.readouterr()
    assert re.search(f"nothing new from site b.*{said}", told.out + told.err), told


def test_while_the_others_changes_are_on_their_way_training_goes_on(begun, monkeypatch) -> None:
    """Asked a step before the exchange, not there when it comes: a goes on with what it has, and takes them later."""
    setting = {**ASYNC, "overlap_steps": 1, "meet_every": 9}
    _, ((a, engine_a, events), (b, engine_b, _)) = begun("ab", **setting)
    train(b, engine_b, 3, 2)
    ready = Future.done
    monkeypatch.setattr(Future, "done", lambda self: False)
    train(a, engine_a, 1, 2)
    assert engine_a.values.tolist() == [2.0] * 6 and exchanges(events)[-1]["known"] == {}
    a._newest._asked.result()
    monkeypatch.setattr(Future, "done", ready)
    train(a, engine_a, 1, 2)
    assert exchanges(events)[-1]["known"] == {"b": 1}
    assert engine_a.values.tolist() == pytest.approx([(4 * 4 + 6 * 2) / 6] * 6)


def test_a_site_goes_on_from_a_checkpoint_with_its_own_line(joined, begun, monkeypatch) -> None:
    """What it took from the others is theirs to bring: with the next meeting it counts once."""
    meeting, ((a, engine_a, _), (b, engine_b, _)) = begun("ab", **ASYNC)
    train(a, engine_a, 1, 2)
    train(b, engine_b, 3, 3)  # line 9, of which 6 are sent; parameters (6 + 2) / 2 + 3
    arrays, told = saved(b)
    assert arrays[LINE].tolist() == [9.0] * 6 and engine_b.values.tolist() == [7.0] * 6
    again, engine, _ = joined(meeting, "b", **ASYNC)
    engine.values.copy_(engine_b.values)
    monkeypatch.setattr(site_module, "read_back", lambda *_: arrays)
    again.restore(Path("step-3"), told)
    at_once(lambda: again.begin(3, 99, 60.0), lambda: train(a, engine_a, 1, 4))
    # a has come to its sixth step: lines 6 of six steps and 9 of three
    assert engine.values.tolist() == engine_a.values.tolist() == [(6 * 6 + 9 * 3) / 9] * 6


def test_rounds_of_unequal_sites_use_every_sample_once(joined) -> None:
    meeting = Meeting("a", "b")
    setting = {**ASYNC, "pace": "measured", "last_step": 20}
    made = {name: joined(meeting, name, **setting) for name in "ab"}
    samples: list[int] = []

    def run(name: str, step_s: float) -> int:
        site, engine, _ = made[name]
        step, first = site.begin(0, 0, 60.0)
        while step < 20:
            samples.extend((first, first + 1))
            engine.values += step_s
            step, first = site.after_update(step + 1, step_s, complete=step + 1 >= 20)
        return step

    assert at_once(lambda: run("a", 1.0), lambda: run("b", 3.0)) == [20, 20]
    assert len(set(samples)) == len(samples)
    assert made["a"][1].values.tolist() == made["b"][1].values.tolist()
