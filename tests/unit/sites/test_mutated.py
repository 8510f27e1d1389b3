"""A thousand messages of sites and strangers, mutated by a seeded hand: named errors, or what is right; nothing else.

What a hostile member says of its own parameters is its to say (test_judge.py bounds it): an answer counts as wrong here
only if numbers come into an array that its checksum does not vouch for.
"""

from __future__ import annotations

import contextlib
import json
import random
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

from llmtrain.sites import quorum, transport
from llmtrain.sites.membership import Member, PeerStatus, SitesError, peer_status
from llmtrain.sites.quorum import MeetAgain, Meetings, RoundFailed
from llmtrain.sites.sample_ledger import Request
from llmtrain.sites.transport import Peer, WireError
from llmtrain.storage.region import Region
from tests.unit.sites.test_site import (
    SENSE,
    server,  # noqa: F401 - a fixture
)
from tests.unit.sites.test_site import (
    test_a_rank_gets_the_elements_that_it_owns_however_the_other_site_cuts_the_model as fetch_all,
)

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


def test_a_server_answers_400_mutated_requests_with_what_it_serves_or_not_at_all(server, monkeypatch) -> None:  # noqa: F811
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
    messages = (framed(changed({"bytes": 44}, dice) if dice.random() < 0.3 else {"bytes": 44}, dice, body)
                for _ in range(count))  # fmt: skip
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
    good, slowest_s = 0, 0.0
    with answers(messages) as address:
        for _ in range(count):
            began_s = time.monotonic()
            try:
                pairs = Peer(address, run="run", member="a:1").covers(mine, time.monotonic() + 60)
            except WireError:
                continue
            finally:
                slowest_s = max(slowest_s, time.monotonic() - began_s)
            good += 1
            assert sum(rows * length for _, (_, _, rows, length) in pairs) <= 89
            for _, (at, step, rows, length) in pairs:
                assert at >= 0 and rows > 0 and length > 0 and at + (rows - 1) * step + length <= 89
    assert good > 20 and slowest_s < 20


COMMON = {"data": "x", "seed": 1}


def test_250_mutated_sayings_at_a_meeting_are_read_or_passed_over(monkeypatch) -> None:
    """Whoever is understood is of samples and addresses that exist; the site that meets them goes on."""
    monkeypatch.setattr(quorum, "from_rank_0", lambda _ranks, make: make())
    dice = random.Random(3)
    said = {**SENSE, "phase": "meet", "run": "run", "common": COMMON, "addresses": ["127.0.0.1:9", "10.0.0.1:80"],
            "ledger": {"next": 40, "free": [[0, 4]], "dealt": {"b:0": [[8, 24], [30, 40]]}}}  # fmt: skip
    own = Member(id="a:1", said=said)
    understood = others = 0
    for _ in range(250):
        told = changed(said, dice) if dice.random() < 0.8 else changed({"phase": "commit", "run": "run", "round": 1,
                                                                        "have": ["a:1"]}, dice)  # fmt: skip
        stranger = Member(id="b:1", said=told if isinstance(told, dict) else {})
        members = SimpleNamespace(meet=lambda _said, _limit_s, met=(own, stranger): list(met), heard=list)
        meetings = Meetings(SimpleNamespace(rank=0), members, "a:1", "run", COMMON)  # type: ignore[arg-type]
        try:
            there = meetings.meet({"round": dice.choice([0, 1])}, time.monotonic() + 0.02, 1)
            assert {each.id for each in there} <= {"a:1", "b:1"}
        except SitesError:
            others += 1
        except RoundFailed as error:  # it says that it is in the middle of a round
            assert "b is there and is not at this meeting" in str(error)
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


def test_strangers_that_say_nothing_hold_no_place(server) -> None:  # noqa: F811
    """Slow-loris: 100 connections that stay open, with half a header or none."""
    host, _, port = server.address.partition(":")
    with contextlib.ExitStack() as stack:
        for number in range(100):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall(b"\x50\0" if number % 2 else struct.pack("<I", 80) + b'{"run": ')
        began_s = time.monotonic()
        fetch_all(server)
        assert time.monotonic() - began_s < 20


def test_a_request_of_many_pieces_is_counted_before_it_is_cut(server, monkeypatch) -> None:  # noqa: F811
    """Within a header's limit one may name an element 100,000 times: each view of it would take 50 times its bytes."""
    monkeypatch.setattr(transport, "_cut", lambda *_: pytest.fail("it was cut"))
    peer = Peer(server.address, run="run", member="a:1")
    take = [(0, 0, 1, 1)] * 100_000
    with pytest.raises(WireError, match="asks for 100000 of 65 elements"):
        peer._ask("values", 3, take, time.monotonic() + 60, lambda *_: pytest.fail("it was served"))
