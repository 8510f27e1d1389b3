"""A line between a loopback port and the other end of a secured one: for torchft, whose sockets know no TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable

from llmtrain.base import log
from llmtrain.sites.keys import COORDINATOR, Keys, words

_CONNECTIONS = 256
_HANDSHAKE_S = 10.0
_SEND_S = 60.0
_AT_ONCE = 1 << 16

Connect = Callable[[socket.socket], socket.socket]
"""Secures a new connection."""


class Forwarder:
    """Listens, and passes what comes on each connection to one that it opens. Threads do it, until `close`."""

    def __init__(self, listen: tuple[str, int], to: tuple[str, int], *, accept: Connect, connect: Connect) -> None:
        """`accept`, `connect`: secure a connection that has come, and one to `to`. Raises OSError: no such address."""
        self._to, self._accept, self._connect = to, accept, connect
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        self._silent: dict[int, tuple[socket.socket, str]] = {}
        """Connections that nobody has proved a key on, the oldest first, and whence; by the ids of their sockets."""
        self._counting = threading.Lock()
        self._listener = socket.create_server(listen)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        threading.Thread(target=self._run, name="sites-forward", daemon=True).start()

    def close(self) -> None:
        """Stop listening; connections that are there end with their ends."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # too many open files: those of others, it may be
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
            with self._counting:
                self._silent[id(connection)] = twin, host
            threading.Thread(target=self._pass, args=(connection, host), name="sites-line", daemon=True).start()

    def _freed(self) -> bool:
        """Close a connection without a key, the oldest of the host that has most of them; return True if it made room.

        Strangers held all places with connections that said nothing, and members were turned away.
        """
        with self._counting:
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
        with self._counting:
            twin, _ = self._silent.pop(connection, (None, ""))
            if twin is not None:
                twin.close()

    def _pass(self, came: socket.socket, host: str) -> None:
        this = id(came)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(came)
                came.settimeout(_HANDSHAKE_S)  # in a thread of its own: who dawdles holds nobody up
                try:
                    here = stack.enter_context(self._accept(came))
                    self._has_spoken(this)
                    there = stack.enter_context(socket.create_connection(self._to, timeout=_HANDSHAKE_S))
                    there = stack.enter_context(self._connect(there))
                except OSError as error:
                    log.warn_once(f"sites: a connection from {host} is refused: {words(error)}")
                    return
                _relay(here, there)
        finally:
            self._has_spoken(this)
            self._slots.release()


def _relay(one: socket.socket, other: socket.socket) -> None:
    """Until one of them ends. One thread does both directions: a TLS connection is not to be used by two."""
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
    """Not secured: on the loopback."""
    return connection


def to_coordinator(coordinator: str, keys: Keys) -> Forwarder:
    """A loopback port that is the coordinator's, HOST:PORT, for this process. Raises OSError."""
    host, _, port = coordinator.rpartition(":")
    return Forwarder(
        ("127.0.0.1", 0), (host, int(port)), accept=as_it_is, connect=lambda each: keys.connect(each, COORDINATOR)
    )
