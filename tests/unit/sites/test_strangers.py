"""What people that are no site do at the ports, and where those may be."""

from __future__ import annotations

import dataclasses
import socket
import struct
import time
from types import SimpleNamespace

import numpy as np
import pytest

from llmtrain.base.errors import UserError
from llmtrain.commands import sites as command
from llmtrain.config.sites_rules import private
from llmtrain.sites.exchange import Exchange
from llmtrain.sites.membership import Member, peer_status
from llmtrain.sites.transport import _CONNECTIONS, Server, WireError
from tests.unit.sites.test_site import (
    PIECES,
    SENSE,
    Meeting,
    answering,
    at_once,
    begin_all,
    joined,  # noqa: F401 - a fixture
    sends_nothing,
    server,  # noqa: F401 - a fixture
    two_steps,
)
from tests.unit.sites.test_site import (
    test_a_rank_gets_the_elements_that_it_owns_however_the_other_site_cuts_the_model as fetch_all,
)


@pytest.mark.parametrize(
    "sent",
    ['{"run": "run", "to": "a:1", "kind": "values", "round": 3, "take": [[1e999, 0, 1, 1]]}', "[" * 100_000],
    ids=["infinity", "depth"],
)
def test_nonsense_uses_up_no_connection(server: Server, sent: str) -> None:  # noqa: F811
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
    """Also in the forms of IPv6: [::ffff:0.0.0.0] listened on every address without keys."""
    with pytest.raises(UserError, match=r"--bind .*(private|HOST:PORT)"):
        command.main(["coordinator", "--bind", bind])


def test_one_rule_says_which_addresses_are_private() -> None:
    assert not [each for each in [*PUBLIC, "", "localhost", "10.0.0.1:5"] if private(each)]
    there = ["10.0.0.1", "172.31.0.1", "192.168.1.1", "127.0.0.1", "::1", "fd00::1", "fe80::1%eth0", "::ffff:10.8.0.1"]
    assert [each for each in there if private(each)] == there


def test_a_site_that_sends_slowly_takes_no_time_from_those_after_it(joined) -> None:  # noqa: F811
    """Of a, b and c, b is the slow one: a and c have each other's parameters."""
    meeting = Meeting("a", "b", "c")
    made = {name: joined(meeting, name, timeout_s=6.0) for name in "abc"}
    begin_all(*(site for site, _, _ in made.values()))
    sends_nothing(made["b"][0]._server)
    at_once(*(two_steps(site, engine, value) for value, (site, engine, _) in enumerate(made.values())))
    _, engine, events = made["a"]
    assert events[-1][1]["used"] == ["a", "c"] and events[-1][1]["failed"].keys() == {made["b"][0].id}
    assert engine.values.tolist() == [1.0] * 6  # of 0 and 2


def told_by(server: Server):  # noqa: F811
    told = peer_status(Member(id="a:1", said={**SENSE, "run": "run", "addresses": [server.address]}))
    assert told is not None
    return told


def exchange() -> Exchange:
    shard = SimpleNamespace(size=65, regions=lambda _part: PIECES)
    return Exchange(SimpleNamespace(), shard, "b:1", "run", None, None, 100)  # type: ignore[arg-type]


def test_a_healer_that_sends_slowly_leaves_time_for_the_next(server: Server) -> None:  # noqa: F811
    arrays = {kind: np.arange(65, dtype=np.float32) * by for kind, by in (("anchor", 1), ("momentum", 2))}
    server.publish(3, arrays)
    told = told_by(server)
    slow = dataclasses.replace(told, id="0:1", addresses=(answering(lambda _: time.sleep(60)),))
    outer, received, failed = exchange()._healed([slow, told], 3, time.monotonic() + 8)
    assert outer is not None and received == 2 * 260 and failed.keys() == {"0:1"}
    assert all((got == arrays[kind]).all() for got, kind in zip(outer, ("anchor", "momentum"), strict=True))


def test_elements_that_come_twice_do_not_stand_for_those_that_do_not_come(server: Server) -> None:  # noqa: F811
    """As many as this rank wants, with one span twice and another never."""
    server._index = [[0, "w", 0, 60, [], 0, 0], [0, "w", 0, 5, [], 0, 0]]
    with pytest.raises(WireError, match="its values are not finite"):
        exchange()._values(told_by(server), "values", 3, None, time.monotonic() + 60)
