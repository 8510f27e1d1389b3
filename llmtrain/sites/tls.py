"""TLS between the sites of a run: its own certificates, secured connections, and listeners for them.

`llmtrain sites keys` makes an authority and a folder for each member, with openssl. A member proves its name by a
certificate, and refuses every peer that cannot (TLS 1.3, both sides).
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmtrain.base import log
from llmtrain.base.errors import UserError
from llmtrain.base.untrusted import shown

COORDINATOR = "coordinator"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_AUTHORITY, _CERTIFICATE, _KEY = "ca.pem", "cert.pem", "key.pem"
_LOOK_S = 5.0
_QUESTION = b"GET /status HTTP/1.0\r\n\r\n"
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE",
           "BAD_RECORD_TYPE")  # fmt: skip
_URI = "llmtrain://site/"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Keys:
    """A member's certificate, its key and the authority's certificate, from its folder."""

    def __init__(self, folder: Path, setting: str) -> None:
        """`setting`: the key that names the folder, for messages. Raises UserError: a file is missing or wrong."""
        try:
            self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._client.check_hostname = False  # a site has a name and no host of its own: `_name` compares that
            for context in (self._server, self._client):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(folder / _AUTHORITY)
                context.load_cert_chain(folder / _CERTIFICATE, folder / _KEY)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise UserError(
                f"{setting} {folder}: {error}. Copy one member's folder here as `llmtrain sites keys` has made it "
                f"({_AUTHORITY}, {_CERTIFICATE}, {_KEY})."
            ) from error

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """Secure the server's side of a connection. Raises OSError: the peer is no member."""
        return self._server.wrap_socket(connection, server_side=True)

    def connect(self, connection: socket.socket, member: str) -> ssl.SSLSocket:
        """Secure the client's side. Raises OSError: the peer is no member, or has another name."""
        secured = self._client.wrap_socket(connection)
        if (name := _name(secured)) != member:
            secured.close()
            raise ssl.SSLError(f"its certificate is of {name!r} and not of {member!r}")
        return secured


def words(error: BaseException) -> str:
    """Describe a failed handshake, in words that name TLS and keys."""
    reason = str(getattr(error, "reason", "") or "")
    if reason in _NO_TLS:
        return "the other side speaks no TLS: it has no keys, and this one has"
    if "CERTIFICATE_REQUIRED" in reason or "PEER_DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return "TLS: it has no certificate of this run's `llmtrain sites keys`"
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        return f"TLS: its keys are of another run, or no longer valid ({shown(error, 120)})"
    return shown(f"TLS: {error}" if isinstance(error, ssl.SSLError) else error, 200)


def differs(coordinator: str, keys: Keys | None) -> str:
    """Return why this side's keys do not fit those at HOST:PORT, and the remedy; "": they fit, or nobody answers."""
    host, _, port = coordinator.rpartition(":")

    def connection() -> socket.socket:
        return socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S)

    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    try:
        with contextlib.ExitStack() as stack:
            try:
                blind.wrap_socket(stack.enter_context(connection())).close()
            except OSError:  # the other side speaks no TLS, or is closing
                plain = stack.enter_context(connection())
                plain.sendall(_QUESTION)
                if keys is None or plain.recv(5) != b"HTTP/":
                    return ""
                return (
                    "it speaks no TLS: it was started without --keys, and this side has keys. Start it with "
                    "`llmtrain sites coordinator --keys FOLDER`, or leave the keys out here, too"
                )
        if keys is None:
            return (
                "it speaks TLS: it was started with --keys, and this side has no keys. Give this site's folder of "
                "`llmtrain sites keys` (sites.keys; `sites status --keys`)"
            )
        with contextlib.ExitStack() as stack:
            secured = stack.enter_context(keys.connect(stack.enter_context(connection()), COORDINATOR))
            secured.sendall(_QUESTION)
            secured.recv(1)  # a refusal arrives here: TLS 1.3 greets first
    except ssl.SSLError as error:
        return f"{words(error)}. Make both folders with one `llmtrain sites keys --out`"
    except (OSError, ValueError):
        return ""
    return ""


def _name(connection: ssl.SSLSocket) -> str | None:
    told: Any = (connection.getpeercert() or {}).get("subjectAltName", ())
    uris = [value for kind, value in told if kind == "URI" and value.startswith(_URI)]
    return uris[0].removeprefix(_URI) if len(uris) == 1 else None


def make_keys(out: Path, sites: Sequence[str], days: int) -> list[Path]:
    """Write a folder for the coordinator and for each site, or for more sites of an authority. Returns the new folders.
    Raises UserError: openssl fails, a name is none, a folder exists."""
    if shutil.which("openssl") is None:
        raise UserError("llmtrain sites keys runs openssl, which is not there. Install it (apt-get install openssl).")
    wrong = [name for name in sites if not _NAME.fullmatch(name) or name in (COORDINATOR, "authority")]
    if wrong or len(set(sites)) != len(sites):
        raise UserError(
            f"--sites {' '.join(sites)}: names must differ, have 1 to 40 letters, digits, `_`, `.` or `-`, and "
            f"none may be {COORDINATOR} or authority. Give others."
        )
    authority = out / "authority"
    members = [*([] if authority.exists() else [COORDINATOR]), *sites]
    if there := [name for name in members if (out / name).exists()]:
        raise UserError(f"--out {out}: {there[0]} is there already. Remove it, or leave that site out of --sites.")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as made:
        if not authority.exists():
            _authority(Path(made) / "authority", days)
            (Path(made) / "authority").rename(authority)
        for name in members:
            _member(Path(made) / name, authority, name, days)
        for name in members:
            (Path(made) / name).rename(out / name)
    return [out / name for name in members]


def _authority(folder: Path, days: int) -> None:
    folder.mkdir(mode=0o700)
    _openssl(folder, "req", "-x509", *_CURVE, "-keyout", _KEY, "-out", _AUTHORITY, "-days", str(days),
             "-subj", "/CN=llmtrain sites", "-addext", "basicConstraints=critical,CA:TRUE",
             "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip


def _member(folder: Path, authority: Path, name: str, days: int) -> None:
    folder.mkdir(mode=0o700)
    shutil.copyfile(authority / _AUTHORITY, folder / _AUTHORITY)
    _openssl(folder, "req", *_CURVE, "-keyout", _KEY, "-out", "request", "-subj", f"/CN={name}")
    (folder / "extensions").write_text(f"basicConstraints=CA:FALSE\nsubjectAltName=URI:{_URI}{name}\n")
    _openssl(folder, "x509", "-req", "-in", "request", "-CA", _AUTHORITY, "-CAkey", str((authority / _KEY).resolve()),
             "-days", str(days), "-extfile", "extensions", "-out", _CERTIFICATE)  # fmt: skip
    for left in ("request", "extensions"):
        (folder / left).unlink()


def _openssl(folder: Path, *words: str) -> None:
    """Run openssl in a folder; only the owner can read its files. Raises UserError."""
    before = os.umask(0o077)
    try:
        done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    finally:
        os.umask(before)
    if done.returncode:
        raise UserError(
            f"openssl {words[0]} has failed: {done.stderr.strip()[-300:]}. Look at `openssl version`: 3 works."
        )


_CONNECTIONS = 256
_HANDSHAKE_S = 10.0
_SEND_S = 60.0
_AT_ONCE = 1 << 16

Connect = Callable[[socket.socket], socket.socket]
"""Secures a new connection. Raises OSError."""


class Listener:
    """Accepts connections, each in a thread of its own, and closes silent ones to make room for new ones."""

    def __init__(
        self,
        address: tuple[str, int],
        places: int,
        secure: Connect,
        handle: Callable[[socket.socket, str, Callable[[], None]], None],
        handshake_s: float = _HANDSHAKE_S,
    ) -> None:
        """`address`: host and port; port 0: any free one. `places`: connections at a time. `secure`: secures a new
        connection, in `handshake_s`. `handle`: takes the connection, the peer's host, and a function to call once the
        peer has proved itself: until then its place may go to others. Raises OSError."""
        self._secure, self._handle, self._handshake_s = secure, handle, handshake_s
        self._slots = threading.BoundedSemaphore(places)
        self._silent: dict[int, tuple[socket.socket, str]] = {}
        """Connections that have proved nothing yet and their hosts, the oldest first, by the ids of their sockets."""
        self._lock = threading.Lock()
        self._listener = socket.create_server(address)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        threading.Thread(target=self._accept, name="sites-listen", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # too many open files: others may hold them
                continue
            try:
                twin = connection.dup()  # TLS takes the socket itself over
            except OSError:
                connection.close()
                continue
            if not self._slots.acquire(blocking=False) and not self._freed():
                connection.close()
                twin.close()
                continue
            with self._lock:
                self._silent[id(connection)] = twin, host
            threading.Thread(target=self._serve, args=(connection, host), name="sites-serve", daemon=True).start()

    def _freed(self) -> bool:
        """Close the oldest silent connection of the host with most of them, as strangers could hold all places; True if
        one was closed."""
        with self._lock:
            count = Counter(host for _, host in self._silent.values())
            most = max(count, key=lambda host: count[host], default=None)
            oldest = next((id_ for id_, (_, host) in self._silent.items() if host == most), None)
            if oldest is None:
                return False
            twin, _ = self._silent.pop(oldest)
            with contextlib.suppress(OSError):
                twin.shutdown(socket.SHUT_RDWR)
            twin.close()
        return self._slots.acquire(timeout=1.0)

    def _has_spoken(self, connection: int) -> None:
        with self._lock:
            twin, _ = self._silent.pop(connection, (None, ""))
            if twin is not None:
                twin.close()

    def _serve(self, connection: socket.socket, host: str) -> None:
        spoken = partial(self._has_spoken, id(connection))
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(connection)
                connection.settimeout(self._handshake_s)  # in this thread: a slow peer delays no other
                try:
                    secured = stack.enter_context(self._secure(connection))
                except OSError as error:
                    log.warn_once(f"sites: a connection from {host} is refused: {words(error)}")
                    return
                self._handle(secured, host, spoken)
        finally:
            spoken()
            self._slots.release()


class Forwarder(Listener):
    """Relays connections between TLS and plain sockets, because torchft does not support TLS."""

    def __init__(self, listen: tuple[str, int], to: tuple[str, int], *, accept: Connect, connect: Connect) -> None:
        """`accept`, `connect`: secure an accepted connection, and one to `to`. Raises OSError: no such address."""
        self._to, self._connect = to, connect
        super().__init__(listen, _CONNECTIONS, accept, self._pass)

    def _pass(self, here: socket.socket, host: str, spoken: Callable[[], None]) -> None:
        spoken()
        with contextlib.ExitStack() as stack:
            try:
                there = stack.enter_context(socket.create_connection(self._to, timeout=_HANDSHAKE_S))
                there = stack.enter_context(self._connect(there))
            except OSError as error:
                log.warn_once(f"sites: a connection from {host} is refused: {words(error)}")
                return
            _relay(here, there)


def _relay(one: socket.socket, other: socket.socket) -> None:
    """Copy data in both directions until one side ends; in one thread, as two cannot use a TLS connection."""
    ends = {each.fileno(): each for each in (one, other)}
    came = select.poll()  # not select.select, which knows 1,024 files
    for each in ends.values():
        each.setblocking(False)
        came.register(each, select.POLLIN)
    with contextlib.suppress(OSError):
        while True:
            ready = [fd for fd, each in ends.items() if isinstance(each, ssl.SSLSocket) and each.pending()]
            for source in (ends[fd] for fd in ready or [fd for fd, _ in came.poll()]):
                try:
                    data = source.recv(_AT_ONCE)
                except (ssl.SSLWantReadError, BlockingIOError):  # a part of a record
                    continue
                if not data:
                    return
                sink = other if source is one else one
                sink.settimeout(_SEND_S)
                sink.sendall(data)
                sink.setblocking(False)


def as_it_is(connection: socket.socket) -> socket.socket:
    return connection


def to_coordinator(coordinator: str, keys: Keys) -> Forwarder:
    """Open a loopback port that leads to the coordinator, HOST:PORT, through TLS. Raises OSError."""
    host, _, port = coordinator.rpartition(":")
    return Forwarder(
        ("127.0.0.1", 0), (host, int(port)), accept=as_it_is, connect=lambda each: keys.connect(each, COORDINATOR)
    )
