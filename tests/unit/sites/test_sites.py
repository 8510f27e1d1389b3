"""Sites that train one model: their outer step, their data, what they send each other, and their rounds.

The rounds run in threads, between engines that hold a few numbers; a coordinator of a few lines stands for torchft's.
tests/runs/test_sites.py has the real ones.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.sites import SitesConfig
from llmtrain.engine.api import StateTensor
from llmtrain.errors import TrainingStopped
from llmtrain.sites import exchange, newest
from llmtrain.sites import meeting as meeting_module
from llmtrain.sites import site as site_module
from llmtrain.sites.ledger import Ledger, Request, steps_of
from llmtrain.sites.meeting import agreed
from llmtrain.sites.members import Member, MembersError, SitesError
from llmtrain.sites.outer import outer_step
from llmtrain.sites.pace import Share
from llmtrain.sites.site import Site
from llmtrain.sites.wire import Peer, Server, WireError
from llmtrain.tensors.region import Region, shard


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
        anchor, momentum = outer_step(anchor, momentum, found, weights, lr=0.7, beta=0.9)
    assert np.abs(anchor - parameter.detach().numpy()).max() < 1e-6


def test_an_outer_step_of_one_site_alone_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    anchor = (rng.normal(size=4096) * 10.0 ** rng.integers(-30, 30, 4096)).astype(np.float32)
    values = (rng.normal(size=4096) * 10.0 ** rng.integers(-30, 30, 4096)).astype(np.float32)
    after, _ = outer_step(anchor, np.zeros_like(anchor), {"a": values}, {"a": 7.0}, lr=1.0, beta=0.0)
    assert after.tobytes() == values.tobytes()


def test_averaging_every_step_of_sgd_is_synchronous_sgd() -> None:
    """Each site a gradient step on its half of the batch: the mean is a step on the mean of the gradients."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 4), torch.randn(8)
    start = torch.randn(4)

    def stepped(rows: slice) -> np.ndarray:
        weights = start.clone().requires_grad_()
        ((inputs[rows] @ weights - targets[rows]) ** 2).mean().backward()
        return (weights.detach() - 0.1 * weights.grad).numpy()  # type: ignore[operator]

    found = {"a": stepped(slice(0, 4)), "b": stepped(slice(4, 8))}
    zero = np.zeros(4, np.float32)
    mean, _ = outer_step(start.numpy(), zero, found, {"a": 1, "b": 1}, lr=1, beta=0)
    assert np.abs(mean - stepped(slice(0, 8))).max() < 1e-6


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


PIECES = [(0, "w", Region(0, 60)), (60, "v", Region(10, 5))]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("127.0.0.1", run="run", member="a:1", pieces=PIECES, limit_s=5)
    server.publish(3, {"values": np.arange(65, dtype=np.float32)})
    yield server
    server.close()


def soon(seconds: float = 5) -> float:
    return time.monotonic() + seconds


def test_a_rank_gets_the_elements_that_it_owns_however_the_other_site_cuts_the_model(server: Server) -> None:
    columns, shape = shard((6, 10), 1, 1, 2)  # columns 5 to 9 of a [6, 10] matrix
    mine = [(0, "v", Region(12, 9)), (9, "w", columns)]
    into = np.full(9 + columns.numel, -1, np.float32)
    peer = Peer(server.address, run="run", member="a:1")
    count = peer.fetch("values", 3, peer.covers(mine, soon()), into, soon())
    assert count == 4 * (3 + 30) and shape == (6, 5)
    assert into[:3].tolist() == [62, 63, 64] and (into[3:9] == -1).all()
    assert (into[9:].reshape(6, 5) == np.arange(60).reshape(6, 10)[:, 5:]).all()


@pytest.mark.parametrize(
    ("run", "member", "kind", "round_", "said"),
    [
        ("other", "a:1", "values", 3, "it belongs to another run"),
        ("run", "a:2", "values", 3, "it is for a:2, and this is a:1"),
        ("run", "a:1", "values", 4, "values of round 4 is not here"),
        ("run", "a:1", "momentum", 3, "momentum of round 3 is not here"),
    ],
)
def test_what_is_not_meant_for_it_a_server_refuses(server, run, member, kind, round_, said) -> None:
    peer = Peer(server.address, run=run, member=member)
    with pytest.raises(WireError, match=said):
        peer.fetch(kind, round_, [((0, 0, 1, 5), (0, 0, 1, 5))], np.zeros(5, np.float32), soon())


@pytest.mark.parametrize(
    "take", [[[0, 0, 1, 66]], [[-1, 0, 1, 2]], [[0, 1, 60, 5]], [[0, 0, 1, 65]] * 2, "x", [[0]], 7]
)
def test_a_request_reaches_nothing_but_the_served_elements(server: Server, take: Any) -> None:
    peer = Peer(server.address, run="run", member="a:1")
    with pytest.raises(WireError, match="refused"):
        peer._ask("values", 3, take, soon(), lambda *_: pytest.fail("it was served"))


def answering(reply: Callable[[socket.socket], None]) -> str:
    """The address of a server that does what it likes with one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            reply(connection)
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def header(**fields: Any) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<I", len(text)) + text


def dribble(connection: socket.socket) -> None:
    connection.sendall(header(bytes=20))
    for _ in range(100):
        connection.sendall(b"\0")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (lambda c: c.sendall(header(bytes=20) + b"\0" * 28), "checksum"),
        (lambda c: c.sendall(header(bytes=20) + b"\0" * 7), "closed the connection after 7 of 20 bytes"),
        (lambda c: c.sendall(header(bytes=24)), "announces 24 bytes instead of 20"),
        (lambda c: c.sendall(b"\xff" * 40), "header of 4294967295 bytes is too long"),
        (lambda c: c.sendall(struct.pack("<I", 4) + b"nope"), "Expecting value"),
        (lambda c: c.sendall(struct.pack("<I", 2) + b"[]"), "no object"),
        (lambda c: c.close(), "closed"),
        (dribble, "not sent all of it within 0.[3-9] s"),
        (lambda c: time.sleep(3), "not sent all of it within 0.[3-9] s"),
    ],
)
def test_a_bad_answer_is_named_and_holds_nobody_up(reply, said) -> None:
    peer = Peer(answering(reply), run="run", member="a:1")
    began_s = time.monotonic()
    with pytest.raises(WireError, match=said):
        peer.fetch("values", 3, [((0, 0, 1, 5), (0, 0, 1, 5))], np.zeros(5, np.float32), soon(0.5))
    assert time.monotonic() - began_s < 1.5


class Meeting:
    """A coordinator: everybody who is expected comes, or the time is up."""

    def __init__(self, *sites: str) -> None:
        self.expected = set(sites)
        self._here: dict[str, Member] = {}
        self._met: list[Member] = []
        self._changed = threading.Condition()

    def member(self, _coordinator: str, member_id: str, _connect_s: float) -> Any:
        return SimpleNamespace(
            id=member_id, meet=lambda said, limit_s: self.meet(member_id, said, limit_s), close=lambda: None
        )

    def meet(self, member_id: str, said: Mapping[str, Any], limit_s: float) -> list[Member]:
        with self._changed:
            self._here[member_id] = Member(id=member_id, said=json.loads(json.dumps(said)))
            mine = self._here[member_id]
            self.look()
            if not self._changed.wait_for(lambda: mine in self._met, timeout=max(limit_s, 0)):
                self._here.pop(member_id, None)
                raise MembersError("nobody came")
            return sorted(self._met, key=lambda member: member.id)

    def leave(self, site: str) -> None:
        with self._changed:
            self.expected.discard(site)
            self._here = {id_: member for id_, member in self._here.items() if id_.partition(":")[0] != site}
            self.look()

    def look(self) -> None:
        if self._here and self.expected <= {id_.partition(":")[0] for id_ in self._here}:
            self._met, self._here = list(self._here.values()), {}
            self._changed.notify_all()


@dataclass
class Numbers:
    """An engine that holds two tensors."""

    values: torch.Tensor = field(default_factory=lambda: torch.zeros(6))
    refreshed: int = 0

    def state(self) -> list[StateTensor]:
        return [
            StateTensor(
                name=name, kind="param", region=Region(0, 3), own=slice(0, 3), replica=(0, 1), dtype=torch.float32,
                device=torch.device("cpu"), open=lambda at=at: contextlib.nullcontext(self.values[at : at + 3]),
            )
            for at, name in ((0, "w"), (3, "v"))
        ]  # fmt: skip

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"w": (3,), "v": (3,)}

    def refresh(self) -> None:
        self.refreshed += 1


SETTINGS = SitesConfig(
    name="a",
    coordinator="127.0.0.1:1",
    method="local_sgd",
    sync_every=2,
    timeout_s=2.0,
    max_alone_steps=4,
    pace="equal",
)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Site, Numbers, list]]]:
    """Makes sites of one rank."""
    for module in (site_module, exchange, newest):
        monkeypatch.setattr(module, "from_all", lambda _ranks, value: [value])
    for module in (site_module, meeting_module, exchange):
        monkeypatch.setattr(module, "from_rank_0", lambda _ranks, make: make())
    monkeypatch.setattr(site_module, "another_group", lambda ranks, _limit_s: ranks)
    monkeypatch.setattr(site_module, "together", lambda _ranks: contextlib.nullcontext())
    with contextlib.ExitStack() as stack:

        def join(
            meeting: Meeting,
            name: str,
            *,
            tokens: int = 8,
            common: str = "x",
            last_step: int | None = None,
            **changes: Any,
        ) -> Any:
            engine, events = Numbers(), []
            site = Site(
                engine, SimpleNamespace(rank=0, world_size=1),  # type: ignore[arg-type]
                replace(SETTINGS, name=name, **changes), {"data": common},
                Share(batch=2, tokens=tokens), lambda kind, **fields: events.append((kind, fields)),
                members=meeting.member, last_step=last_step,
            )  # fmt: skip
            return stack.enter_context(site), engine, events

        yield join


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def begin_all(*sites: Site) -> list[tuple[int, int]]:
    return at_once(*(lambda site=site: site.begin(0, 0, 5.0) for site in sites))


def two_steps(site: Site, engine: Numbers, value: float) -> Callable[[], list[int]]:
    def run() -> list[int]:
        engine.values += value
        return [site.after_update(step, complete=False)[1] for step in (1, 2)]

    return run


def test_three_sites_average_by_tokens_and_take_disjoint_samples(joined) -> None:
    meeting = Meeting("a", "b", "c")
    made = [joined(meeting, name, tokens=tokens) for name, tokens in (("a", 8), ("b", 8), ("c", 16))]
    sites = [site for site, _, _ in made]
    assert begin_all(*sites) == [(0, 0), (0, 4), (0, 8)]
    starts = at_once(
        *(two_steps(site, engine, value) for (site, engine, _), value in zip(made, (1, 2, 4), strict=True))
    )
    assert starts == [[2, 12], [6, 16], [10, 20]]  # second step of the first round, first step of the second
    for _, engine, events in made:
        assert engine.values.tolist() == [(1 * 8 + 2 * 8 + 4 * 16) / 32] * 6 and engine.refreshed == 2
        assert events[-1][1]["used"] == ["a", "b", "c"] and events[-1][1]["received_bytes"] == 48


def test_a_site_that_never_comes_is_waited_for_no_longer_than_the_limit(joined) -> None:
    """It goes on alone, takes part again, and stops after so many steps without."""
    meeting = Meeting("a", "b")
    (a, engine_a, events), (b, engine_b, _) = joined(meeting, "a", timeout_s=0.3), joined(meeting, "b", timeout_s=0.3)
    begin_all(a, b)
    began_s = time.monotonic()
    assert two_steps(a, engine_a, 1)() == [2, 8]  # a step of its reserve
    assert time.monotonic() - began_s < 1 and events[-1][0] == "synchronise_failed"
    assert "last time b took part" in events[-1][1]["reason"]
    at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 4))
    assert engine_a.values.tolist() == engine_b.values.tolist()
    assert torch.allclose(engine_a.values, torch.tensor((2 * 4 + 4 * 2) / 6))  # weights: four steps, and two
    with pytest.raises(TrainingStopped, match="site a has trained 6 steps without the other sites"):
        for _ in range(6):
            a.after_update(3, complete=False)


def test_a_coordinator_that_comes_back_loses_no_site(joined, monkeypatch) -> None:
    """At first it has heard of nobody: the first site to come would be all there is, and the other's work be lost."""
    monkeypatch.setattr(meeting_module, "_HEARD_S", 1.5)  # longer than a busy machine needs for `b_comes`
    meeting = Meeting("a", "b")
    (a, engine_a, events), (b, engine_b, _) = joined(meeting, "a", timeout_s=0.5), joined(meeting, "b", timeout_s=5.0)
    begin_all(a, b)
    two_steps(a, engine_a, 1)()
    assert events[-1][0] == "synchronise_failed"
    meeting.expected = {"a"}
    monkeypatch.setattr(a, "_settings", replace(SETTINGS, name="a", timeout_s=5.0))

    def b_comes() -> None:
        time.sleep(0.1)
        meeting.expected = {"a", "b"}  # before b meets: what is heard of a site cannot come after it
        two_steps(b, engine_b, 4)()

    at_once(two_steps(a, engine_a, 1), b_comes)
    assert events[-1][1]["used"] == ["a", "b"] and engine_a.values.tolist() == engine_b.values.tolist()


def test_a_site_that_dies_between_the_two_meetings_counts_if_all_others_have_its_parameters(joined) -> None:
    meeting = Meeting("a", "b")
    (a, engine_a, events), (b, engine_b, _) = joined(meeting, "a"), joined(meeting, "b")
    begin_all(a, b)

    def dies(*_: Any) -> None:
        time.sleep(0.3)  # the other site has fetched by then
        meeting.leave("b")
        raise KeyboardInterrupt

    b._meetings.commit = dies  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 3))
    assert engine_a.values.tolist() == [2.0] * 6
    assert events[-1][1]["used"] == ["a", "b"] and events[-1][1]["sites"] == ["a"]


def sends_nothing(server: Server) -> None:
    server._serve = lambda _connection: time.sleep(2)  # type: ignore[method-assign]


def has_less(server: Server) -> None:
    server._index = server._index[:1]


def is_a_round_behind(server: Server) -> None:
    publish = server.publish
    server.publish = lambda round_, arrays: publish(round_ - 1, arrays)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Server.close, "refused|Errno"),
        (sends_nothing, "not sent all of it within 0.[4-9] s"),
        (has_less, "it has 3 of 6 elements"),
        (is_a_round_behind, "values of round 1 is not here"),
    ],
)
def test_a_site_whose_parameters_do_not_come_is_left_out(joined, wrong, said) -> None:
    """The others agree to go on without them within the limit; that site takes what they have."""
    meeting = Meeting("a", "b", "c")
    made = [joined(meeting, name, timeout_s=1.0) for name in "abc"]
    begin_all(*(site for site, _, _ in made))
    wrong(made[2][0]._server)
    at_once(*(two_steps(site, engine, value) for (site, engine, _), value in zip(made, (1, 2, 9), strict=True)))
    assert [engine.values.tolist() for _, engine, _ in made] == [[1.5] * 6] * 3
    _, told = made[0][2][-1]
    (site, why), *others = told["failed"].items()
    assert told["used"] == ["a", "b"] and site.startswith("c:") and not others and re.search(said, why), told


def test_a_site_that_reaches_nobody_but_the_coordinator_holds_no_others_up(joined, monkeypatch) -> None:
    """It votes for its own parameters alone. The others take those and go on; when its line is mended it follows."""
    meeting = Meeting("a", "b", "c")
    made = [joined(meeting, name, timeout_s=1.0) for name in "abc"]
    begin_all(*(site for site, _, _ in made))

    def train() -> None:
        at_once(*(two_steps(site, engine, value) for (site, engine, _), value in zip(made, (1, 2, 6), strict=True)))

    def no_route(*_: Any) -> Any:
        raise WireError("no route to host")

    with monkeypatch.context() as cut:
        cut.setattr(made[2][0]._exchange, "_values", no_route)
        train()
    assert [engine.values.tolist() for _, engine, _ in made] == [[3.0] * 6, [3.0] * 6, [6.0] * 6]
    told, (kind, failed) = made[0][2][-1][1], made[2][2][-1]
    assert (told["sites"], told["used"], kind) == (["a", "b"], ["a", "b", "c"], "synchronise_failed")
    assert re.search("have gone on without this one: site a: no route.*site b: no route", failed["reason"])
    train()
    assert [engine.values.tolist() for _, engine, _ in made] == [[4.5] * 6] * 3 and made[2][2][-1][1]["healed"]


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


def test_parameters_that_are_not_finite_are_left_out_and_mended(joined) -> None:
    meeting = Meeting("a", "b", "c")
    made = [joined(meeting, name) for name in "abc"]
    begin_all(*(site for site, _, _ in made))
    values = (1, 2, float("nan"))
    at_once(*(two_steps(site, engine, value) for (site, engine, _), value in zip(made, values, strict=True)))
    assert [engine.values.tolist() for _, engine, _ in made] == [[1.5] * 6] * 3
    assert "not finite" in str(made[0][2][-1][1]["failed"])


@pytest.mark.parametrize("compress", ["none", "int8"])
def test_an_update_that_is_too_large_is_left_out_named_and_mended(joined, compress) -> None:
    for names, values in (("abc", (1, 2, 1e9)), ("ab", (1, 1e9))):
        meeting = Meeting(*names)
        made = [joined(meeting, name, compress=compress) for name in names]
        begin_all(*(site for site, _, _ in made))
        at_once(*(two_steps(site, engine, value) for (site, engine, _), value in zip(made, values, strict=True)))
        want = 1.5 if len(names) == 3 else 1.0
        assert all(engine.values.tolist() == pytest.approx([want] * 6, rel=1e-2) for _, engine, _ in made)
        _, told = made[0][2][-1]
        assert told["used"] == list(names[:-1]) and "the limit is 100" in str(told["failed"]), told


def test_a_site_is_not_believed_more_steps_than_it_can_have_trained(joined) -> None:
    """Else an update of any size would be small for each of them."""
    meeting = Meeting("a", "b", "c")
    made = [joined(meeting, name) for name in "abc"]
    begin_all(*(site for site, _, _ in made))
    made[2][0]._trained = 1 << 40
    at_once(*(two_steps(site, engine, value) for (site, engine, _), value in zip(made, (1, 2, 1e9), strict=True)))
    assert [engine.values.tolist() for _, engine, _ in made] == [[1.5] * 6] * 3


def test_a_robust_mean_is_what_three_sites_agree_on(joined) -> None:
    meeting = Meeting("a", "b", "c")
    made = [joined(meeting, name, mean="median") for name in "abc"]
    begin_all(*(site for site, _, _ in made))
    at_once(*(two_steps(site, engine, value) for (site, engine, _), value in zip(made, (1, 2, 50), strict=True)))
    assert [engine.values.tolist() for _, engine, _ in made] == [[2.0] * 6] * 3


def test_a_late_site_takes_parameters_momentum_and_step_from_the_others(joined) -> None:
    meeting = Meeting("a", "b")
    (a, engine_a, _), (b, engine_b, _) = joined(meeting, "a", method="diloco"), joined(meeting, "b", method="diloco")
    begin_all(a, b)
    at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 2))
    meeting.expected.add("c")
    c, engine_c, events = joined(meeting, "c", method="diloco")
    engine_c.values += 100
    *_, (step, first) = at_once(two_steps(a, engine_a, 1), two_steps(b, engine_b, 2), lambda: c.begin(0, 0, 5.0))
    assert engine_a.values.tolist() == engine_c.values.tolist() and (c._momentum == a._momentum).all()
    assert step == 2 and first == 24 and events[-1][1]["healed"] and c._momentum.any()


def test_a_site_that_trains_something_else_does_not_get_in(joined) -> None:
    meeting = Meeting("a")
    a, engine_a, events = joined(meeting, "a")
    a.begin(0, 0, 5.0)
    two_steps(a, engine_a, 1)()
    meeting.expected.add("b")
    b, _, _ = joined(meeting, "b", common="y")

    def newcomer() -> str:
        with pytest.raises(SitesError, match="site a trains something else: its data differ") as refused:
            b.begin(0, 0, 5.0)
        meeting.leave("b")
        return str(refused.value)

    at_once(two_steps(a, engine_a, 1), newcomer)
    assert events[-1][1]["sites"] == ["a"] and engine_a.values.tolist() == [2.0] * 6


SENSE = {
    "phase": "meet", "common": {}, "round": 9, "checksum": "0", "step": 0, "step_s": 1.0, "batch": 2,
    "trained": 4, "weight": 16, "was": "b:0", "addresses": ["127.0.0.1:9"],
    "ledger": {"next": 0, "free": [], "dealt": {}},
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [{"phase": "commit", "have": "x"}, {"phase": 3}, {"round": -1}, {"round": "1e9"}, {"weight": 1 << 80},
     {"step_s": float("nan")}, {"batch": 0}, {"addresses": 5}, {"common": 1}, {"ledger": {}},
     {"ledger": {"next": 0, "free": [1], "dealt": {}}}],
    ids=str,
)  # fmt: skip
def test_nonsense_at_a_meeting_is_nobody(joined, wrong) -> None:
    meeting = Meeting("a", "b")
    a, engine_a, events = joined(meeting, "a")
    ended = threading.Event()

    def noise() -> None:
        while not ended.is_set():
            with contextlib.suppress(MembersError):
                meeting.meet("b:0", {**SENSE, "run": a._meetings._run, **wrong}, 0.2)

    def work() -> None:
        a.begin(0, 0, 5.0)
        two_steps(a, engine_a, 1)()
        ended.set()

    at_once(work, noise)
    assert events[-1][1]["used"] == ["a"]


def test_starting_alone_where_more_are_asked_for_ends_in_time(joined) -> None:
    a, _, _ = joined(Meeting("a"), "a", start_sites=2)
    with pytest.raises(SitesError, match=r"1 site of 2 are there \(a\).*lower sites.start_sites"):
        a.begin(0, 0, 0.6)


def test_pairs_of_steps_are_apart() -> None:
    spans = ((0, 8), (20, 24))
    assert list(steps_of(spans, 4)) == [0, 4, 20] and all(b - a >= 4 for a, b in pairwise(steps_of(spans, 4)))
