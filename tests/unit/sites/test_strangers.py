"""What people that are no site do at the ports, and where those may be."""

from __future__ import annotations

import socket
import struct

import pytest

from llmtrain.errors import UserError
from llmtrain.sites import command
from llmtrain.sites.wire import _CONNECTIONS, Server
from tests.unit.sites.test_sites import (
    server,  # noqa: F401 - a fixture
)
from tests.unit.sites.test_sites import (
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
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(struct.pack("<I", len(sent)) + sent.encode())
            assert b"refused" in connection.recv(1 << 16)
    fetch_all(server)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", ":0", "8.8.8.8:0", "127.0.0.1"])
def test_a_coordinator_listens_on_a_private_address_alone(bind: str) -> None:
    with pytest.raises(UserError, match=r"--bind .*(private|HOST:PORT)"):
        command.main(["coordinator", "--bind", bind])
