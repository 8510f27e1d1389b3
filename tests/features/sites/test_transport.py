"""Messages between ranks of two sites: the right elements, and what strangers and broken sites send in their place.

A seeded generator mutates a thousand messages: each brings a named error, or what is right. A hostile member may send
any parameters of its own: an answer is wrong here only if numbers come into an array that its checksum does not cover.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from llmtrain.base.errors import UserError
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.sites import command, transport
from llmtrain.features.sites.exchange import Exchange
from llmtrain.features.sites.membership import Member, PeerStatus, SitesError, peer_status
from llmtrain.features.sites.quorum import MeetAgain, Meetings, RoundFailed
from llmtrain.features.sites.rules import private
from llmtrain.features.sites.sample_ledger import Request
from llmtrain.features.sites.transport import _CONNECTIONS, Peer, Server, WireError
from llmtrain.storage.region import Region, shard
from tests.features.sites.sites_in_threads import (
    PIECES,
    SENSE,
    answering,
    soon,
)


def fetch_all(server: Server) -> None:
    """A rank gets the elements that it owns, however the other site cuts the model."""
    columns, shape = shard((6, 10), 1, 1, 2)  # columns 5 to 9 of a [6, 10] matrix
    mine = [(0, "v", Region(12, 9)), (9, "w", columns)]
    into = np.full(9 + columns.numel, -1, np.float32)
    peer = Peer(server.address, run="run", member="a:1")
    count = peer.fetch("values", 3, peer.covers(mine, soon()), into, soon())
    assert count == 4 * (3 + 30) and shape == (6, 5)
    assert into[:3].tolist() == [62, 63, 64] and (into[3:9] == -1).all()
    assert (into[9:].reshape(6, 5) == np.arange(60).reshape(6, 10)[:, 5:]).all()


def test_a_rank_gets_the_elements_that_it_owns_however_the_other_site_cuts_the_model(server: Server) -> None:
    fetch_all(server)


@pytest.mark.parametrize(
    ("run", "member", "kind", "round_", "said"),
    [
        ("other", "a:1", "values", 3, "another run"),
        ("run", "a:2", "values", 3, r"\ba:2\b.*\ba:1\b"),
        ("run", "a:1", "values", 4, "values of round 4"),
        ("run", "a:1", "momentum", 3, "momentum of round 3"),
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


def header(**fields: Any) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<I", len(text)) + text


def dribble(connection: socket.socket) -> None:
    connection.sendall(header(bytes=20))
    for _ in range(1200):
        connection.sendall(b"\0")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (lambda c: c.sendall(header(bytes=20) + b"\0" * 28), "checksum"),
        (lambda c: c.sendall(header(bytes=20) + b"\0" * 7), "7 of 20 bytes"),
        (lambda c: c.sendall(header(bytes=24)), r"\b24 bytes .*\b20"),
        (lambda c: c.sendall(b"\xff" * 40), "4294967295 bytes"),
        (lambda c: c.sendall(struct.pack("<I", 4) + b"nope"), "Expecting value"),
        (lambda c: c.sendall(struct.pack("<I", 2) + b"[]"), "JSON"),
        (lambda c: c.close(), "closed"),
        (dribble, r"within [\d.]+ s"),
        (lambda c: time.sleep(60), r"within [\d.]+ s"),
    ],
)
def test_a_bad_answer_is_named_and_holds_nobody_up(reply, said) -> None:
    peer = Peer(answering(reply), run="run", member="a:1")
    wait_s = 0.5 if "within" in said else 60
    pairs = [((0, 0, 1, 5), (0, 0, 1, 5))]
    with pytest.raises(WireError, match=said):
        peer.fetch("values", 3, pairs, np.zeros(5, np.float32), soon(wait_s))


@pytest.mark.parametrize(
    "sent",
    ['{"run": "run", "to": "a:1", "kind": "values", "round": 3, "take": [[1e999, 0, 1, 1]]}', "[" * 100_000],
    ids=["infinity", "depth"],
)
def test_nonsense_uses_up_no_connection(server: Server, sent: str) -> None:
    host, _, port = server.address.partition(":")
    for _ in range(_CONNECTIONS + 1):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(struct.pack("<I", len(sent)) + sent.encode())
            assert b"refused" in connection.recv(1 << 16)
    fetch_all(server)


PUBLIC = [
    "0.0.0.0", "::", "::ffff:0.0.0.0", "::ffff:8.8.8.8", "8.8.8.8", "100.64.0.1", "240.0.0.1", "255.255.255.255",
    "224.0.0.1", "::ffff:100.64.0.1", "2001:4860::8888", "64:ff9b::a00:1", "2002:a00:1::", "ff02::1", "::a00:1",
    "192.0.2.1",
]  # fmt: skip


@pytest.mark.parametrize("bind", [":0", "127.0.0.1", *(f"[{a}]:0" if ":" in a else f"{a}:0" for a in PUBLIC)])
def test_a_coordinator_listens_on_a_private_address_alone(bind: str) -> None:
    """Also in the forms of IPv6: [::ffff:0.0.0.0] listened on every address."""
    with pytest.raises(UserError, match=r"--bind .*(private|HOST:PORT)"):
        command.main(["coordinator", "--bind", bind])


def test_one_rule_says_which_addresses_are_private() -> None:
    assert not [each for each in [*PUBLIC, "", "localhost", "10.0.0.1:5"] if private(each)]
    there = ["10.0.0.1", "172.31.0.1", "192.168.1.1", "127.0.0.1", "::1", "fd00::1", "fe80::1%eth0", "::ffff:10.8.0.1"]
    assert [each for each in there if private(each)] == there


def told_by(server: Server):
    told = peer_status(Member(id="a:1", message={**SENSE, "run": "run", "addresses": [server.address]}))
    assert told is not None
    return told


def exchange_of_b() -> Exchange:
    shard = SimpleNamespace(size=65, regions=lambda _part: PIECES)
    return Exchange(SimpleNamespace(), shard, "b:1", "run", None, 100)  # type: ignore[arg-type]


def test_a_healer_that_sends_slowly_leaves_time_for_the_next(server: Server) -> None:
    arrays = {kind: np.arange(65, dtype=np.float32) * by for kind, by in (("anchor", 1), ("momentum", 2))}
    server.publish(3, arrays)
    told = told_by(server)
    slow = dataclasses.replace(told, id="0:1", addresses=(answering(lambda _: time.sleep(60)),))
    outer, received, failed = exchange_of_b()._fetch_common([slow, told], 3, time.monotonic() + 8)
    assert outer is not None and received == 2 * 260 and failed.keys() == {"0:1"}
    assert all((got == arrays[kind]).all() for got, kind in zip(outer, ("anchor", "momentum"), strict=True))


def test_elements_that_come_twice_do_not_stand_for_those_that_do_not_come(server: Server) -> None:
    """As many as this rank wants, with one span twice and another never."""
    server._index = [[0, "w", 0, 60, [], 0, 0], [0, "w", 0, 5, [], 0, 0]]
    with pytest.raises(WireError, match="finite"):
        exchange_of_b()._fetch_values(told_by(server), "values", 3, None, time.monotonic() + 60)


ODD: list[Any] = [
    None, True, -1, 0, 1, 3, 64, 65, 66, 2**31, 2**63, 10**30, -(10**30), 0.5, float("inf"), float("nan"), "",
    "w", "x" * 999, [], {}, [[]], [0, 0, 1, 1], [[0, 0, 1, 65]] * 3, {"a": {}}, "\0", "é",
]  # fmt: skip


REQUEST = {"run": "run", "to": "a:1", "round": 3, "kind": "values", "take": [[0, 5, 2, 3], [60, 0, 1, 5]]}


INDEX = [[0, "w", 0, 60, [], 0, 0], [60, "v", 10, 5, [], 0, 0], [65, "u", 0, 6, [[0, 2], [4, 1]], 8, 1]]


def changed(tree: Any, dice: random.Random) -> Any:
    """The same with one value, key or entry anywhere in it replaced, doubled or gone."""
    tree = json.loads(json.dumps(tree))
    if not isinstance(tree, (dict, list)) or not tree or dice.random() < 0.05:
        return dice.choice(ODD)
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    key = dice.choice(keys)
    what = dice.random()
    if what < 0.1:
        del tree[key]
    elif what < 0.2 and isinstance(tree, list):
        tree += [tree[key]] * dice.choice([1, 2, 50])
    elif what < 0.3 and isinstance(tree[key], int):
        tree[key] += dice.choice([-1, 1, 64, 2**40])
    else:
        tree[key] = changed(tree[key], dice)
    return tree


def sound(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text


def framed(header: Any, dice: random.Random, body: bytes = b"") -> bytes:
    """A header and what follows; now and then with another length, other bytes, or an end too early."""
    text = json.dumps(header).encode()
    lengths = [0, 1, len(text) - 1, len(text) + 1, 2**22 + 1, 2**32 - 1]
    length = dice.choice(lengths) if dice.random() < 0.2 else len(text)
    sent = bytearray(struct.pack("<I", length) + text + body)
    for _ in range(dice.choice([0, 0, 1, 3])):
        sent[dice.randrange(len(sent))] = dice.randrange(256)
    return bytes(sent[: dice.randrange(len(sent))] if dice.random() < 0.15 else sent)


@contextlib.contextmanager
def no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    failed: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        yield
    assert not failed, failed


def test_a_server_answers_400_mutated_requests_with_what_it_serves_or_not_at_all(server, monkeypatch) -> None:
    """No answer is longer than the array of 260 bytes, none takes memory by its numbers; then the right one comes."""
    dice = random.Random(0)
    host, _, port = server.address.partition(":")
    tracemalloc.start()
    try:
        with no_thread_fails(monkeypatch):
            served = 0
            for _ in range(400):
                connection = socket.create_connection((host, int(port)), timeout=60)
                with contextlib.suppress(OSError), connection:
                    connection.sendall(framed(changed(REQUEST, dice), dice))
                    connection.shutdown(socket.SHUT_WR)
                    got = b""
                    while data := connection.recv(1 << 16):
                        got += data
                    elements = got[4 + struct.unpack("<I", got[:4])[0] : -8] if got else b""
                    assert len(elements) <= 260 and set(np.frombuffer(elements, "<f4")) <= set(range(65)), got[:200]
                    served += b'"bytes": 44}' in got
            assert 0 < served < 200
        assert tracemalloc.get_traced_memory()[1] < 32 << 20  # a header of 4 MiB may be announced, and is waited for
    finally:
        tracemalloc.stop()
    fetch_all(server)


@contextlib.contextmanager
def answers(messages: Iterator[bytes]) -> Iterator[str]:
    """The address of a server that gives each connection the next of them, whatever it asks."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for message in messages:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                connection.recv(1 << 16)
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def test_150_mutated_answers_bring_the_right_numbers_or_a_named_error() -> None:
    """Header, elements and checksum are mutated: what the checksum does not vouch for is never taken for a success."""
    dice = random.Random(1)
    right = np.arange(11, dtype=np.float32)
    body = right.tobytes() + struct.pack("<Q", xxhash.xxh3_64_intdigest(right.tobytes()))
    count = 150
    messages = (
        framed(changed({"bytes": 44}, dice) if dice.random() < 0.3 else {"bytes": 44}, dice, body) for _ in range(count)
    )
    pairs = [((0, 5, 2, 3), (0, 3, 2, 3)), ((60, 0, 1, 5), (6, 0, 1, 5))]
    good = 0
    with answers(messages) as address:
        for _ in range(count):
            into = np.full(11, -1, np.float32)
            try:
                Peer(address, run="run", member="a:1").fetch("values", 3, pairs, into, time.monotonic() + 60)
            except WireError:
                continue
            good += 1
            assert into.tobytes() == right.tobytes()
    assert 10 < good < count - 50


def test_200_mutated_indexes_end_soon_in_places_inside_this_ranks_array_or_a_named_error() -> None:
    dice = random.Random(2)
    mine = [(0, "w", Region(0, 60)), (60, "v", Region(10, 5)), (65, "u", Region(0, 24, ((0, 3), (4, 2)), 7))]
    count = 200
    messages = (sound(changed({"bytes": 0, "index": INDEX}, dice)) for _ in range(count))
    good, began_s = 0, time.process_time()
    with answers(messages) as address:
        for _ in range(count):
            try:
                pairs = Peer(address, run="run", member="a:1").covers(mine, time.monotonic() + 60)
            except WireError:
                continue
            good += 1
            assert sum(rows * length for _, (_, _, rows, length) in pairs) <= 89
            for _, (at, step, rows, length) in pairs:
                assert at >= 0 and rows > 0 and length > 0 and at + (rows - 1) * step + length <= 89
    assert good > 20 and time.process_time() - began_s < 20


COMMON = {"data": "x", "seed": 1}


def test_250_mutated_sayings_at_a_meeting_are_read_or_passed_over() -> None:
    """Whoever is understood is of samples and addresses that exist; the site that meets them goes on."""
    dice = random.Random(3)
    said = {
        **SENSE,
        "phase": "meet",
        "run": "run",
        "common": COMMON,
        "addresses": ["127.0.0.1:9", "10.0.0.1:80"],
        "ledger": {"next": 40, "free": [[0, 4]], "dealt": {"b:0": [[8, 24], [30, 40]]}},
    }
    own = Member(id="a:1", message=said)
    understood = others = 0
    for _ in range(250):
        told = (
            changed(said, dice)
            if dice.random() < 0.8
            else changed({"phase": "commit", "run": "run", "round": 1, "have": ["a:1"]}, dice)
        )
        stranger = Member(id="b:1", message=told if isinstance(told, dict) else {})
        members = SimpleNamespace(meet=lambda _said, _limit_s, met=(own, stranger): list(met), heard=list)
        meetings = Meetings(Ranks(), members, "a:1", "run", COMMON)
        try:
            there = meetings.meet({"round": dice.choice([0, 1])}, time.monotonic() + 0.02, 1)
            assert {each.id for each in there} <= {"a:1", "b:1"}
        except SitesError:
            others += 1
        except RoundFailed as error:  # it says that it is in the middle of a round
            assert re.search(r"\bb\b", str(error))
        with contextlib.suppress(MeetAgain, RoundFailed):
            meetings.commit(1, {"a:1", "b:1"}, None, time.monotonic() + 60)
        if (each := peer_status(stranger)) is not None:
            understood += 1
            check(each)
    assert understood > 50 and others > 0


def check(told: PeerStatus) -> None:
    """What the round does with it."""
    for text in told.addresses:
        host, _, port = text.rpartition(":")
        socket.getaddrinfo(host, int(port), flags=socket.AI_NUMERICHOST)
    request = Request(site="a:1", batch=told.batch, steps=3, reserve=2)
    ledger = told.ledger.settled({told.was: told.trained}, [request])
    assert all(0 <= begin < end for begin, end in ledger.dealt["a:1"])
    assert isinstance(told.difference(COMMON), str) and told.state


def test_strangers_that_say_nothing_hold_no_place(server) -> None:
    """Slow-loris: 100 connections that stay open, with half a header or none."""
    host, _, port = server.address.partition(":")
    with contextlib.ExitStack() as stack:
        for number in range(100):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall(b"\x50\0" if number % 2 else struct.pack("<I", 80) + b'{"run": ')
        fetch_all(server)


def test_a_request_of_many_pieces_is_counted_before_it_is_cut(server, monkeypatch) -> None:
    """Within a header's limit one may name an element 100,000 times: each view of it would take 50 times its bytes."""
    monkeypatch.setattr(transport, "_cut", lambda *_: pytest.fail("it was cut"))
    peer = Peer(server.address, run="run", member="a:1")
    take = [(0, 0, 1, 1)] * 100_000
    with pytest.raises(WireError, match=r"\b100000 .*\b65 elements"):
        peer._ask("values", 3, take, time.monotonic() + 60, lambda *_: pytest.fail("it was served"))
