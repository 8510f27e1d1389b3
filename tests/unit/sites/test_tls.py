"""Members of a run prove who they are, and others get nowhere: with real certificates, over the loopback."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmtrain.base.errors import UserError
from llmtrain.commands import sites as command
from llmtrain.optim.outer_methods import DiLoCo
from llmtrain.sites import membership, transport
from llmtrain.sites.membership import SitesError, TorchftMembers
from llmtrain.sites.site import connect
from llmtrain.sites.tls import Forwarder, Keys, as_it_is, make_keys, to_coordinator
from llmtrain.sites.transport import Peer, Server, WireError
from llmtrain.storage.region import Region
from tests.helpers.launching import free_port

VALUES = np.arange(12, dtype=np.float32)
PIECES = [(0, "w", Region(0, 12))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a run's members, and of another run's."""
    folder = tmp_path_factory.mktemp("keys")
    for run in ("run", "other"):
        assert command.main(["keys", "--out", str(folder / run), "--sites", "north", "south"]) == 0
    return folder


def keys_of(made: Path, member: str, run: str = "run") -> Keys:
    return Keys(made / run / member, "sites.keys")


@pytest.fixture
def north(made: Path) -> Iterator[Server]:
    server = Server("127.0.0.1", run="r", member="north:1", pieces=PIECES, limit_s=60.0, keys=keys_of(made, "north"))
    server.publish(3, {"values": VALUES})
    yield server
    server.close()


def fetched(address: str, keys: Keys | None, member: str = "north:1") -> np.ndarray:
    peer = Peer(address, run="r", member=member, keys=keys)
    into = np.zeros(12, np.float32)
    deadline_s = time.monotonic() + 60
    peer.fetch("values", 3, peer.covers(PIECES, deadline_s), into, deadline_s)
    return into


def test_a_folder_for_each_member_whose_keys_are_its_owners_alone(made: Path) -> None:
    assert sorted(path.name for path in (made / "run").iterdir()) == ["authority", "coordinator", "north", "south"]
    for member in ("coordinator", "north", "south"):
        assert sorted(path.name for path in (made / "run" / member).iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
    keys = [*(made / "run").rglob("key.pem")]
    assert len(keys) == 4 and all(path.stat().st_mode & 0o077 == 0 for path in keys)


def test_more_sites_come_later_and_nothing_is_overwritten(made: Path, north: Server) -> None:
    before = (made / "run/north/key.pem").read_bytes()
    for sites in (["north"], ["west", "north"], ["a/b"], ["coordinator"], ["east", "east"]):
        with pytest.raises(UserError, match=r"--out .* is there already|--sites .* names must"):
            make_keys(made / "run", sites, 30)
    assert (made / "run/north/key.pem").read_bytes() == before and not (made / "run/west").exists()
    assert make_keys(made / "run", ["east"], 30) == [made / "run/east"]
    assert (fetched(north.address, keys_of(made, "east")) == VALUES).all()


def test_a_member_gets_what_it_asks_for_and_nobody_reads_it(made: Path, north: Server) -> None:
    assert (fetched(north.address, keys_of(made, "south")) == VALUES).all()
    host, _, port = north.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        context = ssl.create_default_context(cafile=made / "run/north/ca.pem")
        context.check_hostname = False
        context.load_cert_chain(made / "run/south/cert.pem", made / "run/south/key.pem")
        with context.wrap_socket(connection) as secured:
            assert secured.version() == "TLSv1.3"


@pytest.mark.parametrize(
    ("member", "run", "asked", "said"),
    [
        ("south", "other", "north:1", "certificate verify failed|unknown ca"),  # another run's authority
        (None, "run", "north:1", "closed the connection|too long|reset|header"),  # no certificate, no TLS
        ("south", "run", "west:1", "its certificate is of 'north' and not of 'west'"),  # not whom it was told to meet
    ],
    ids=["authority", "plain", "name"],
)
def test_who_is_no_member_or_another_one_is_refused(made: Path, north: Server, member, run, asked, said, capfd) -> None:
    keys = keys_of(made, member, run) if member else None
    with pytest.raises(WireError, match=said):
        fetched(north.address, keys, asked)
    assert (fetched(north.address, keys_of(made, "south")) == VALUES).all()


def test_a_member_refuses_a_server_without_keys(made: Path) -> None:
    server = Server("127.0.0.1", run="r", member="north:1", pieces=PIECES, limit_s=1.0)
    with pytest.raises(WireError, match=r"127\.0\.0\.1:\d+: "):
        fetched(server.address, keys_of(made, "south"))
    server.close()


def test_who_dawdles_in_the_handshake_holds_nobody_up(made: Path, north: Server) -> None:
    host, _, port = north.address.partition(":")
    idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(transport._CONNECTIONS // 2)]
    assert (fetched(north.address, keys_of(made, "south")) == VALUES).all()
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("missing", ["ca.pem", "cert.pem", "key.pem", "other"])
def test_a_folder_that_lacks_something_is_refused_by_name(made: Path, tmp_path: Path, missing: str) -> None:
    for file in (made / "run/north").iterdir():
        if file.name != missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if missing == "other":
        (tmp_path / "key.pem").write_bytes((made / "run/south/key.pem").read_bytes())
    with pytest.raises(UserError, match=rf"sites\.keys {tmp_path}: .*llmtrain sites keys"):
        Keys(tmp_path, "sites.keys")


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that knows no TLS and gives back what it gets, as the lighthouse stands behind its forwarder."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[:2]
    listener.close()


def said_back(address: str, data: bytes) -> bytes:
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while len(found) < len(data) and (part := connection.recv(1 << 16)):
                found += part
        sender.join()
    return found


def test_the_coordinators_line_passes_both_directions_and_members_alone(made: Path, echo: tuple[str, int]) -> None:
    door = Forwarder(("127.0.0.1", 0), echo, accept=keys_of(made, "coordinator").accept, connect=as_it_is)
    line = to_coordinator(door.address, keys_of(made, "south"))
    data = np.random.default_rng(0).bytes(3 << 20)
    assert said_back(line.address, data) == data
    stranger = to_coordinator(door.address, keys_of(made, "south", "other"))
    assert said_back(stranger.address, b"hello") == b""
    assert said_back(door.address, b"hello") == b""
    impostor = Forwarder(("127.0.0.1", 0), echo, accept=keys_of(made, "north").accept, connect=as_it_is)
    assert said_back(to_coordinator(impostor.address, keys_of(made, "south")).address, b"hello") == b""
    assert said_back(line.address, b"again") == b"again"
    for each in (door, line, stranger, impostor):
        each.close()


@pytest.fixture(scope="module")
def coordinators(made: Path) -> Iterator[dict[str, str]]:
    """HOST:PORT of two as the command starts them, one of them with keys."""
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("keys", "plain")}
    servers = [membership.start_coordinator(addresses["keys"], 1.0, keys_of(made, "coordinator")),
               membership.start_coordinator(addresses["plain"], 1.0, None)]  # fmt: skip
    yield addresses
    for each in servers:
        each.shutdown()


def test_strangers_that_say_nothing_keep_no_member_from_the_coordinator(made, coordinators, capsys) -> None:
    """300 idle connections: 5 of 6 `sites status` were refused."""
    host, _, port = coordinators["keys"].partition(":")
    idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(300)]
    for _ in range(6):
        words = ["status", "--coordinator", coordinators["keys"], "--keys", str(made / "run/north")]
        assert command.main(words) == 0 and "no site is there" in capsys.readouterr().out
    for connection in idle:
        connection.close()


MISMATCHES = [
    ("plain", "run/north", r"it speaks no TLS: it was started without --keys, and this side has keys"),
    ("keys", None, r"it speaks TLS: it was started with --keys, and this side has no keys"),
    ("keys", "other/north", r"TLS: its keys are of another run"),
]


@pytest.mark.parametrize(("which", "folder", "said"), MISMATCHES, ids=["here", "there", "others"])
def test_keys_on_one_side_alone_are_named_with_the_coordinators_own_address(made, coordinators, which, folder, said):
    """`no coordinator answers`, with the port of an inner forwarder, is what was said of them."""
    address = coordinators[which]
    keys = str(made / folder) if folder else None
    with pytest.raises(UserError, match=rf"--coordinator {address}: {said}"):
        command.main(["status", "--coordinator", address, *(["--keys", keys] if keys else [])])
    settings = DiLoCo(name="north", coordinator=address, keys=keys, timeout_s=60.0)
    with pytest.raises(SitesError, match=rf"sites.coordinator {address}: {said}"):
        connect(settings, 0, "run", "north:0123abcd", PIECES, TorchftMembers)
