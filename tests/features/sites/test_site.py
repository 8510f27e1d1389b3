"""Rounds of sites that train one model, in threads; tests/features/sites/test_sites_runs.py has real ones."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.base.errors import CheckpointError, TrainingStopped
from llmtrain.engine.ranks.stop_requests import StopAsked
from llmtrain.features.sites import quorum
from llmtrain.features.sites import site as site_module
from llmtrain.features.sites.membership import Heard, Member, MembersError, PeerStatus, SitesError, peer_status
from llmtrain.features.sites.quorum import agreed, leader_of
from llmtrain.features.sites.shard import COMMON, MOMENTUM, RESIDUAL, standing
from llmtrain.features.sites.site import Site, telling
from llmtrain.features.sites.transport import Server, WireError
from llmtrain.tracking.metrics import metrics
from tests.features.sites.sites_in_threads import (
    SENSE,
    Lighthouse,
    Meeting,
    Numbers,
    at_once,
    begin_all,
    events_of,
    gives_up_after,
    saved,
    sends_nothing,
    trained,
    two_steps,
)


def take_two_steps(made: list, values: Sequence[float]) -> list:
    return at_once(*(two_steps(site, engine, value) for (site, engine, _), value in zip(made, values, strict=True)))


def test_three_sites_average_by_tokens_and_take_disjoint_samples(joined) -> None:
    meeting = Meeting("a", "b", "c")
    made = [joined(meeting, name, tokens=tokens) for name, tokens in (("a", 8), ("b", 8), ("c", 16))]
    sites = [site for site, _, _ in made]
    assert begin_all(*sites) == [(0, 0), (0, 4), (0, 8)]
    starts = take_two_steps(made, (1, 2, 4))
    assert starts == [[2, 16], [6, 20], [12, 24]]  # second step of the first round, first step of the second
    for _, engine, events in made:
        assert engine.values.tolist() == [(1 * 8 + 2 * 8 + 4 * 16) / 32] * 6 and engine.refreshed == 2
        assert events[-1][1]["used"] == ["a", "b", "c"] and events[-1][1]["received_bytes"] == 48


def test_a_site_that_never_comes_is_waited_for_no_longer_than_the_limit(begun) -> None:
    """It goes on alone, takes part again, and stops after so many steps without."""
    _, ((a, engine_a, events), (b, engine_b, _)) = begun("ab")
    gives_up_after(a, 0.3)
    assert two_steps(a, engine_a, 1)() == [2, 8]  # a step of its reserve
    assert events[-1][0] == "synchronise_failed"
    assert re.search(r"\bb\b", events[-1][1]["reason"])
    gives_up_after(a, 60)
    at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 4))
    assert engine_a.values.tolist() == engine_b.values.tolist()
    assert torch.allclose(engine_a.values, torch.tensor((2 * 4 + 4 * 2) / 6))  # weights: four steps, and two
    gives_up_after(a, 0.3)
    with pytest.raises(TrainingStopped, match=r"site a .*\b6 steps"):
        for _ in range(6):
            a.after_update(3, 0.001, complete=False)


def test_a_coordinator_that_comes_back_loses_no_site(joined, monkeypatch) -> None:
    """At first it has heard of nobody: the first site to come would be all there is, and the other's work be lost."""
    meeting, waits, there = Meeting("a", "b"), threading.Event(), threading.Event()
    (a, engine_a, events), (b, engine_b, _) = joined(meeting, "a"), joined(meeting, "b")
    begin_all(a, b)
    gives_up_after(a, 0.3)
    two_steps(a, engine_a, 1)()
    assert events[-1][0] == "synchronise_failed"
    meeting.expected = {"a"}
    gives_up_after(a, 60)

    def sleep(seconds: float) -> None:
        if seconds == quorum._HEARD_S:
            waits.set()
            assert there.wait(60)

    monkeypatch.setattr(quorum, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))

    def b_comes() -> None:
        assert waits.wait(60)
        meeting.expected = {"a", "b"}  # before b meets: what is heard of a site cannot come after it
        there.set()
        two_steps(b, engine_b, 4)()

    at_once(two_steps(a, engine_a, 1), b_comes)
    assert events[-1][1]["used"] == ["a", "b"] and engine_a.values.tolist() == engine_b.values.tolist()


def test_a_site_that_dies_between_the_two_meetings_counts_if_all_others_have_its_parameters(begun) -> None:
    meeting, ((a, engine_a, events), (b, engine_b, _)) = begun("ab")

    fetched, commit = threading.Event(), a._meetings.commit

    def commits(*args: Any) -> Any:
        fetched.set()
        return commit(*args)

    def dies(*_: Any) -> None:
        assert fetched.wait(60)
        meeting.leave("b")
        raise KeyboardInterrupt

    a._meetings.commit, b._meetings.commit = commits, dies  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 3))
    assert engine_a.values.tolist() == [2.0] * 6
    assert events[-1][1]["used"] == ["a", "b"] and events[-1][1]["sites"] == ["a"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Server.close, "refused|Errno"),
        (sends_nothing, r"within [\d.]+ s"),
    ],
)
def test_a_site_whose_parameters_do_not_come_is_left_out(begun, wrong, said) -> None:
    """The others agree to go on without b within the limit, and with c, asked after it; b takes what they have."""
    _, made = begun("abc")
    wrong(made[1][0]._server)
    for site, _, _ in made:
        gives_up_after(site, 6 if wrong is sends_nothing else 60)
    take_two_steps(made, (1, 9, 2))
    assert [engine.values.tolist() for _, engine, _ in made] == [[1.5] * 6] * 3
    _, told = made[0][2][-1]
    (site, why), *others = told["failed"].items()
    assert told["used"] == ["a", "c"] and site.startswith("b:") and not others and re.search(said, why), told


def test_a_site_that_reaches_nobody_but_the_coordinator_holds_no_others_up(begun, monkeypatch) -> None:
    """It votes for its own parameters alone. The others take those and go on; when its line is mended it follows."""
    _, made = begun("abc")

    def train() -> None:
        take_two_steps(made, (1, 2, 6))

    def no_route(*_: Any) -> Any:
        raise WireError("no route to host")

    with monkeypatch.context() as cut:
        cut.setattr(made[2][0]._exchange, "_fetch_values", no_route)
        train()
    assert [engine.values.tolist() for _, engine, _ in made] == [[3.0] * 6, [3.0] * 6, [6.0] * 6]
    told, (kind, failed) = made[0][2][-1][1], made[2][2][-1]
    assert (told["sites"], told["used"], kind) == (["a", "b"], ["a", "b", "c"], "synchronise_failed")
    assert re.search("have gone on without this one: site a: no route.*site b: no route", failed["reason"])
    train()
    assert [engine.values.tolist() for _, engine, _ in made] == [[4.5] * 6] * 3 and made[2][2][-1][1]["healed"]
    # Four steps of 2 since it last agreed; it was not to know that the others had taken the first two.
    assert [events[-1][1]["given_up_samples"] for _, _, events in made] == [0, 0, 8]


@pytest.mark.parametrize(
    ("votes", "going", "used"),
    [
        ({"a": "ab", "b": "ab", "c": "abc"}, "abc", "ab"),  # c's have come to nobody
        ({"a": "abc", "b": "abc", "c": "c"}, "ab", "abc"),  # nobody's have come to c
        ({"a": "abc", "b": "abc", "c": ""}, "ab", "abc"),  # or it is hostile
        ({"a": "a", "b": "a", "c": ""}, "ab", "a"),  # b has trained nothing yet
        ({"a": "ab", "b": "ab", "c": "cd", "d": "cd"}, "abcd", ""),  # neither half makes a step alone
        ({"a": "ab", "b": "b"}, "ab", "b"),
        ({"a": "abce", "b": "abcd", "c": "abcde", "d": "abcde", "e": "e"}, "abcd", "abc"),
        ({"a": ""}, "a", ""),
        ({}, "", ""),
    ],
)
def test_most_sites_go_on(votes, going, used) -> None:
    assert agreed({site: set(have) for site, have in votes.items()}) == (list(going), list(used))


@pytest.mark.parametrize(
    ("names", "compress", "last", "claims", "says"),
    [
        ("abc", "none", float("nan"), None, "not finite"),
        ("abc", "none", 1e9, None, " 100"),
        ("ab", "int8", 1e9, None, " 100"),
        ("abc", "none", 1e9, 1 << 40, "2 sequences"),  # small for each of so many samples
    ],
)
def test_an_update_that_cannot_be_is_left_out_named_and_mended(begun, names, compress, last, claims, says) -> None:
    _, made = begun(names, compress=compress)
    if claims is not None:
        made[-1][0]._trained = claims
    take_two_steps(made, (*range(1, len(names)), last))
    want = 1.5 if names == "abc" else 1.0
    assert all(engine.values.tolist() == pytest.approx([want] * 6, rel=1e-2) for _, engine, _ in made)
    _, told = made[0][2][-1]
    assert told["used"] == list(names[:-1]) and says in str(told["failed"]), told


def test_a_late_site_takes_parameters_momentum_and_step_from_the_others(joined, begun) -> None:
    meeting, ((a, engine_a, _), (b, engine_b, _)) = begun("ab", method="diloco")
    at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 2))
    meeting.expected.add("c")
    c, engine_c, events = joined(meeting, "c", method="diloco")
    engine_c.values += 100
    *_, (step, first) = at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 2), lambda: c.begin(0, 0, 60.0))
    assert engine_a.values.tolist() == engine_c.values.tolist() and (c._momentum == a._momentum).all()
    assert step == 2 and first == 24 and events[-1][1]["healed"] and c._momentum.any()


def test_a_site_that_trains_something_else_does_not_get_in(joined) -> None:
    meeting = Meeting("a")
    a, engine_a, events = joined(meeting, "a")
    a.begin(0, 0, 60.0)
    two_steps(a, engine_a, 1)()
    meeting.expected.add("b")
    b, _, _ = joined(meeting, "b", common="y")

    def newcomer() -> str:
        with pytest.raises(SitesError, match=r"site a .*\bdata\b") as refused:
            b.begin(0, 0, 5.0)
        meeting.leave("b")
        return str(refused.value)

    at_once(two_steps(a, engine_a, 1), newcomer)
    assert events[-1][1]["sites"] == ["a"] and engine_a.values.tolist() == [2.0] * 6


@pytest.mark.parametrize(
    "wrong",
    [
        {"round": -1},
        {"round": "1e9"},
        {"weight": 1 << 80},
        {"step_s": float("nan")},
        {"batch": 0},
        {"batch": 1 << 60},
        {"addresses": 5},
        {"common": 1},
        {"ledger": {}},
        {"ledger": {"next": 0, "free": [1], "dealt": {}}},
    ],
    ids=str,
)
def test_nonsense_is_no_status(wrong) -> None:
    assert peer_status(Member(id="b:0", message={**SENSE, "run": "run"})) is not None
    assert peer_status(Member(id="b:0", message={**SENSE, "run": "run", **wrong})) is None


def test_a_weight_that_no_steps_have_is_refused_and_named(joined) -> None:
    """2^60 tokens in its parameters, and the others' counted for nothing."""
    meeting = Meeting("a", "b")
    (a, engine_a, events), (b, engine_b, _) = joined(meeting, "a"), joined(meeting, "b", timeout_s=1.0)
    begin_all(a, b)
    b._weights = [1 << 60]
    at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 40))
    assert engine_a.values.tolist() == [1.0] * 6, "its own alone"
    [why] = events_of(events, "synchronise")[-1]["failed"].values()
    assert re.search(rf"\b4 sequences .*\b{(1 << 60) + 16} tokens.*\b6 steps of 2 sequences", why)


def test_a_second_site_of_a_name_is_refused(joined, monkeypatch) -> None:
    monkeypatch.setattr(quorum, "SILENT_S", 0.2)
    meeting = Lighthouse()
    a, engine_a, events = joined(meeting, "a")
    a.begin(0, 0, 60.0)
    twin, _, _ = joined(meeting, "a")
    ended = threading.Event()

    def newcomer() -> None:
        with pytest.raises(SitesError, match=r"sites.name"):
            twin.begin(0, 0, 60.0)
        meeting.leave(twin.id)
        ended.set()

    def first() -> None:
        while not ended.is_set():
            two_steps(a, engine_a, 1)()

    at_once(first, newcomer)
    assert events_of(events, "synchronise")[-1]["sites"] == ["a"]


def test_starting_alone_where_more_are_asked_for_ends_in_time(joined) -> None:
    a, _, _ = joined(Meeting("a"), "a", start_sites=2)
    with pytest.raises(SitesError, match=r"sites.start_sites"):
        a.begin(0, 0, 0.6)


METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_every": 4},
    "streaming": {"sync_every": 8, "fragments": 2, "overlap_steps": 1},
}


def late_join(joined, method: str, seed: int, lighthouse: Any) -> tuple[int, list[int], list[int]]:
    """Two sites train, a third comes at a random moment: (rounds of a that c missed since it first asked, participants
    of c's, and of a's rounds after c's first)."""
    rng = random.Random(f"{method} {seed}")
    settings = {"method": method, "max_alone_steps": 40, **METHODS[method]}
    a, b, c = (joined(lighthouse, name, **settings) for name in "abc")
    step_s, ended = rng.uniform(0.001, 0.004), threading.Event()
    came: list[int] = []
    meet = c[0]._members.meet

    def asks(said: Mapping[str, Any], limit_s: float) -> Any:
        came.append(sum(kind == "synchronise" for kind, _ in a[2]))
        return meet(said, limit_s)

    c[0]._members.meet = asks

    def trained(made: Any, after_s: float = 0.0) -> None:
        site, engine, events = made
        while after_s and min(len(each) for _, _, each in (a, b)) < 3:
            time.sleep(0.001)
        time.sleep(after_s)
        step, _ = site.begin(0, 0, 20.0)
        rounds = 0
        while not ended.is_set():
            time.sleep(step_s)
            engine.values += 1
            step, _ = site.after_update(step + 1, 0.001, complete=False)
            rounds = sum(kind == "synchronise" for kind, _ in events)
            if made is c and rounds >= 4:
                ended.set()
        lighthouse.leave(site.id)

    at_once(lambda: trained(c, rng.uniform(0.001, 0.03)), lambda: trained(a), lambda: trained(b))
    of_a = [fields["sites"] for kind, fields in a[2] if kind == "synchronise"][came[0] :]
    missed = next((number for number, sites in enumerate(of_a) if "c" in sites), len(of_a))
    of_c = [fields["participants"] for kind, fields in c[2] if kind == "synchronise"]
    return missed, of_c, [len(sites) for sites in of_a[missed:]]


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_site_that_joins_late_at_any_moment_meets_the_others_within_two_rounds(joined, method, monkeypatch) -> None:
    """4 of 10 came between the two meetings of the others' round, and trained alone beside them from then on."""
    monkeypatch.setattr(quorum, "AGAIN_S", 0.005)
    monkeypatch.setattr(site_module, "AGAIN_S", 0.005)
    for seed in range(10):
        missed, of_c, of_a = late_join(joined, method, seed, Lighthouse())
        assert missed <= 2 and min(of_c) >= 2, (seed, missed, of_c, of_a)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_sites_whose_rounds_fall_at_different_times_meet_again(joined, monkeypatch, seed) -> None:
    """A round takes ten times as long as one waits for the other: each would find nobody there, for ever."""
    for module in (quorum, site_module):
        monkeypatch.setattr(module, "AGAIN_S", 0.002)
    monkeypatch.setattr(quorum, "_HEARD_S", 0.01)
    lighthouse, ended = Lighthouse(), threading.Event()
    made = {
        name: joined(lighthouse, name, timeout_s=0.03, sync_every=20, max_alone_steps=400, start_sites=2)
        for name in "ab"
    }
    a, meet = made["a"][0], made["a"][0]._members.meet
    apart: list[int] = []

    def trained(name: str) -> None:
        site, _, events = made[name]
        step, _ = site.begin(0, 0, 20.0)
        for count in range(1, 400):
            if name == "a" and count == 45 + 5 * seed:  # its network is away for about a round
                lighthouse.leave(a.id)
                a._members.meet = no_network
            if name == "a" and count == 75 + 5 * seed:
                a._members.meet = meet
                apart.append(len(made["b"][2]))
            time.sleep(0.005)
            step, _ = site.after_update(step + 1, 0.001, complete=False)
            again = [each for kind, each in events[apart[0] if apart else 999 :] if kind == "synchronise"]
            if (name == "b" and any(each["participants"] == 2 for each in again)) or ended.is_set():
                ended.set()
                return

    def no_network(*_: Any) -> Any:
        raise MembersError("no route to host")

    at_once(lambda: trained("a"), lambda: trained("b"))
    rounds = [(kind, each.get("participants"), each.get("reason")) for kind, each in made["b"][2][apart[0] :]]
    assert ended.is_set() and len(rounds) <= 6, rounds


def test_a_site_alone_beside_one_that_is_there_waits_says_so_and_makes_no_outer_step(joined, monkeypatch, capsys):
    monkeypatch.setattr(quorum, "_SAID_S", 0.0)
    monkeypatch.setattr(quorum, "AGAIN_S", 0.05)
    meeting = Meeting("a")
    a, engine, events = joined(meeting, "a")
    a.begin(0, 0, 60.0)
    gives_up_after(a, 0.3)
    asked = []
    others = [Heard(id="b:1", silent_s=0.5, met=True), Heard(id="c:1", silent_s=60.0, met=True)]
    a._members.heard = lambda: asked.append(1) or others
    two_steps(a, engine, 1)()
    assert len(asked) > 1, "it did not wait for b"
    assert events[-1][0] == "synchronise_failed"
    assert re.search(r"\bb\b", events[-1][1]["reason"])
    assert re.search(r"site a .*\bb\b", capsys.readouterr().err)
    a._members.heard = list
    gives_up_after(a, 60)
    two_steps(a, engine, 1)()
    assert events[-1][0] == "synchronise"


class Stranger:
    """Says what it likes at every meeting, and serves what it likes."""

    def __init__(self, meeting: Meeting, like: Site, name: str, **said: Any) -> None:
        self._meeting, self._like, self._said, self.id = meeting, like, said, f"{name}:0"
        self.server = Server(
            "127.0.0.1", run=like._meetings._run, member=self.id, limit_s=5.0, pieces=like._shard.regions()
        )
        self._ended = threading.Event()
        self._talks = threading.Thread(target=self._talk, daemon=True)

    def __enter__(self) -> Stranger:
        self._talks.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._talks.join()
        self.server.close()

    def _talk(self) -> None:
        evil = np.full(6, 9.0, np.float32)
        while not self._ended.is_set():
            with contextlib.suppress(MembersError):
                said = {
                    **SENSE,
                    "run": self._like._meetings._run,
                    "addresses": [self.server.address],
                    "joined": True,
                    "was": self.id,
                    **self._said,
                }
                self.server.publish(said["round"], dict.fromkeys(("values", "anchor", "momentum"), evil))
                self._meeting.meet(self.id, said, 0.2)
                votes = {"phase": "commit", "run": said["run"], "round": said["round"], "have": [self.id]}
                self._meeting.meet(self.id, votes, 0.2)


@pytest.mark.parametrize(
    ("names", "said", "why"),
    [
        ("ab", {"round": 1 << 50, "step": 1 << 50}, "1125899906842624"),
        ("ab", {"round": 3, "step": 6}, "more than half"),
        ("a", {"round": 1 << 50, "step": 4}, "round 1, step 0"),
        ("a", {"round": 2, "step": 4}, "more than half"),
    ],
)
def test_a_state_ahead_of_all_that_one_peer_claims_is_refused_and_named(begun, names, said, why, capsys) -> None:
    """One message of round 2^50 with a constant model was taken by both sites."""
    meeting, made = begun(names)
    with Stranger(meeting, made[0][0], "mallory", **said):
        meeting.expected.add("mallory")
        at_once(*(two_steps(site, engine, 1) for site, engine, _ in made))
    for _, engine, events in made:
        assert engine.values.tolist() == [1.0] * 6 and events[-1][1]["used"] == list(names)
        assert why in events[-1][1]["failed"]["mallory:0"], events[-1]
    assert "site mallory " in capsys.readouterr().err


def told_at(site: str, round_: int, *, joined: bool = True, checksum: str = "0") -> PeerStatus:
    told = peer_status(
        Member(id=f"{site}:1", message={**SENSE, "run": "run", "round": round_, "joined": joined, "checksum": checksum})
    )
    assert told is not None
    return told


@pytest.mark.parametrize(
    ("told", "joins", "known", "trusted", "leads", "refused"),
    [
        ({"a": 7, "b": 9}, False, "ab", "", "b", ""),  # a was cut off
        ({"a": 7, "b": 9}, False, "a", "", "a", "b"),  # nobody knows b
        ({"a": 7, "b": 9}, False, "a", "b", "b", ""),
        ({"a": 7, "b": 7, "c": 9}, False, "abc", "", "a", "c"),
        ({"a": 7, "b": 9, "c": 9}, False, "abc", "", "b", ""),
        ({"a": 7, "b": 9, "c": 8}, False, "abc", "", "a", "bc"),
        ({"a": 0, "b": 9}, True, "", "", "b", ""),
        ({"a": 0, "b": 9, "c": 8}, True, "", "", None, ""),
        ({"a": 0, "b": 9, "c": 8}, True, "", "c", "c", "b"),
        ({"a": 0, "b": 8, "c": 8, "d": 9}, True, "", "", "b", "d"),
    ],
)
def test_whose_state_counts(told, joins, known, trusted, leads, refused) -> None:
    sites = [told_at(name, round_, joined=not (joins and name == "a")) for name, round_ in told.items()]
    leader, why = leader_of(sites, "a:1", joins=joins, known=known, trusted=trusted, impossible=lambda _: "")
    assert (leader and leader.site) == leads and {each[0] for each in why} == set(refused)


@pytest.mark.parametrize("parted", ["a", "c"])
def test_a_site_that_made_a_round_alone_takes_the_state_of_the_others(joined, parted) -> None:
    """As many rounds as theirs, so that none is ahead: it went on alone beside them to the end of the run."""
    meeting = Meeting("a", "b", "c")
    made = {name: joined(meeting, name) for name in "abc"}
    begin_all(*(site for site, _, _ in made.values()))
    rest = set(made) - {parted}
    for there, value in (({parted}, 5), (rest, 1), (set(made), 0)):
        meeting.expected = set(there)
        at_once(*(two_steps(*made[name][:2], value) for name in sorted(there)))
    assert [engine.values.tolist() for _, engine, _ in made.values()] == [[1.0] * 6] * 3
    assert [made[name][2][-1][1]["healed"] for name in "abc"] == [name == parted for name in "abc"]


def test_sites_that_all_only_start_take_the_furthest_checkpoint() -> None:
    sites = [told_at(name, round_, joined=False) for name, round_ in (("a", 7), ("b", 9), ("c", 8))]
    leader, refused = leader_of(sites, "a:1", joins=True, known=(), trusted=(), impossible=lambda _: "")
    assert leader is not None and leader.site == "b" and not refused


def test_a_state_that_is_not_the_one_that_was_told_of_is_not_taken(joined) -> None:
    """b sends others than it tells of: c stays out, names it, and takes the state from a at the next meeting."""
    meeting = Meeting("a", "b")
    made = {name: joined(meeting, name) for name in "ab"}
    begin_all(*(site for site, _, _ in made.values()))
    publish = made["a"][0]._server.publish
    made["a"][0]._server.publish = lambda round_, arrays: publish(
        round_, {**arrays, "anchor": np.full(6, 9.0, np.float32)} if "anchor" in arrays else arrays
    )
    c, _, events = joined(meeting, "c")
    meeting.expected.add("c")

    def twice(site: Site, of_site: Numbers) -> None:
        for _ in range(2):
            two_steps(site, of_site, 1)()

    at_once(lambda: c.begin(0, 0, 60.0), *(lambda each=each: twice(*each[:2]) for each in made.values()))
    assert events[-1][1]["healed"] and (c._anchor == made["b"][0]._anchor).all(), events


def test_a_site_that_starts_after_the_others_have_ended_says_so(joined, capsys) -> None:
    """It trained from scratch, alone, with exit status 0 and no word."""
    meeting = Meeting("a")
    a, _, events = joined(meeting, "a", last_step=480)
    gone = Heard(id="b:1", silent_s=312.0, met=True, step=480, run=a._meetings._run, together=2)
    other = Heard(id="c:1", silent_s=312.0, met=True, step=960, run="other", together=1)
    a._members.heard = lambda: [gone, other]
    a.begin(0, 0, 60.0)
    assert re.search(r"site a .*\bb\b.* step 480 .*312 s.* step 0", capsys.readouterr().err)
    assert events[-1] == ("alone", {"step": 0, "others": ["b"], "at": 480})


def test_samples_that_were_dealt_to_a_lost_site_are_counted_when_the_run_ends(begun, capsys) -> None:
    """a is lost before the last round: its block comes back when nobody trains any more."""
    meeting, made = begun("ab", last_step=4)
    at_once(*(two_steps(site, engine, 1) for site, engine, _ in made))
    meeting.leave("a")
    b, engine, events = made[1]
    engine.values += 1
    b.after_update(3, 0.001, complete=False)
    b.after_update(4, 0.001, complete=True)
    assert events[-1] == ("left_out", {"step": 4, "samples": 4})  # 8 to 12 are a's, 12 to 16 b's
    assert "4 sequences" in capsys.readouterr().err


def test_a_site_that_waits_for_the_others_hears_that_it_is_to_stop(joined) -> None:
    """It waited for as long as another was alive, whatever the launcher said."""
    meeting, asked = Meeting("a", "b"), threading.Event()
    a, _, events = joined(meeting, "a", start_sites=2, timeout_s=1.0)
    threading.Timer(0.3, asked.set).start()
    with pytest.raises(StopAsked):
        a.begin(0, 0, 60.0, asked.is_set)
    assert not events


def test_what_a_cut_off_site_has_trained_alone_is_told_at_its_end(begun, capsys) -> None:
    _, made = begun("ab", last_step=2)
    a, engine, _ = made[0]
    gives_up_after(a, 0.2)
    engine.values += 1
    a.after_update(1, 0.001, complete=False)
    a.after_update(2, 0.001, complete=True)
    assert "4 sequences" in capsys.readouterr().err


def test_each_round_is_an_event_and_a_row_of_documented_metrics(joined) -> None:
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
    first, second = events_of(written, "synchronise")
    assert first["outer_step_norm"] == 0 and rows[0]["step"] == 0
    assert np.isclose(second["outer_step_norm"], np.sqrt(6) * 1.9 * 0.5 * 1.5, rtol=1e-6)
    assert rows[1] == {
        "step": 2,
        "sites/received_bytes": 24,
        "sites/sent_bytes": 24,
        "sites/stood_s": second["stood_s"],
        "sites/participants": 2,
        "sites/staleness_steps": 0,
        "sites/outer_step_norm": second["outer_step_norm"],
        "sites/given_up_samples": 0,
        "sites/left_out_samples": 0,
        "more": True,
    }
    assert rows[1].keys() - {"more"} <= metrics().keys() and 0 <= second["stood_s"] <= second["seconds"] < 60
    assert torch.isfinite(engine_a.values).all()


def test_a_round_that_fails_tells_only_how_long_it_stood(joined) -> None:
    meeting = Meeting("a", "b")
    (a, engine, _), (b, _, _) = joined(meeting, "a"), joined(meeting, "b")
    rows: list[dict] = []
    begin_all(a, b)
    gives_up_after(a, 0.3)
    a._tell = telling(lambda kind, **fields: None, lambda row, *, more: rows.append(row))
    two_steps(a, engine, 1)()
    (row,) = rows
    assert row.keys() == {"step", "sites/stood_s"} and 0.2 < row["sites/stood_s"] < 20


def test_steps_that_are_trained_meanwhile_are_staleness_and_no_standing(joined, monkeypatch) -> None:
    """Each step takes 0.1 s, and a round is under way during two: what is trained is not waited."""
    plain = Site.after_update

    def slow(self, step, step_s, *, complete):
        time.sleep(0.1)
        return plain(self, step, step_s, complete=complete)

    monkeypatch.setattr(Site, "after_update", slow)
    setting = {"method": "streaming", "sync_every": 6, "fragments": 2, "overlap_steps": 2}
    made, _, _ = trained(joined, {"a": 1.0, "b": 2.0}, 8, last_step=8, **setting)
    under_way = [each for each in events_of(made[0][2], "synchronise") if each["overlapped_steps"] == 2]
    assert under_way
    for each in under_way:
        assert each["seconds"] >= 0.2 and each["stood_s"] <= each["seconds"] - 0.19


def test_sites_go_on_in_the_middle_of_a_round_with_all_that_they_had(joined, begun, monkeypatch) -> None:
    """Both stop after one of two steps: what they trained counts in the next round, and no sample is dealt twice.

    The same without a stop gives the same parameters, residuals included: int4 of 0.3 and 0.7 loses something.
    """
    ends = []
    for stops in (False, True):
        meeting, made = begun("ab", method="diloco", compress="int4")
        take_two_steps(made, (0.3, 0.7))
        for (site, engine, _), slope in zip(made, (0.2, 0.5), strict=True):
            engine.values += slope * torch.arange(1.0, 7.0)
            site.after_update(3, 0.001, complete=False)
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
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        standing(kept, Path("step-1"))
