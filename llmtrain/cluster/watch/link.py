"""JSON lines over TCP between the agents of a job's hosts. A line that is no JSON or too long ends the connection."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
from collections.abc import Sequence
from typing import Any

_LONGEST = 4 << 20
_HELLO_S = 5.0


class Line:
    """One connection. No method waits for the peer or raises; `closed` is True once it has ended."""

    def __init__(self, connected: socket.socket) -> None:
        """Raises OSError when the other side has gone already."""
        self._socket = connected
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = str(self._socket.getpeername()[0]).removeprefix("::ffff:")
        self._in = bytearray()
        self._out = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, and hand over what the kernel takes now."""
        if self.closed:
            return
        self._out += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(self._out) > _LONGEST:
            self.close()
        self.flush()

    def flush(self) -> None:
        while self._out and not self.closed:
            try:
                del self._out[: self._socket.send(self._out)]
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.close()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call."""
        self.flush()
        while not self.closed:
            try:
                data = self._socket.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.close()
                break
            if not data:
                self.close()
            self._in += data
            if len(self._in) > _LONGEST:
                self.close()
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        messages: list[dict[str, Any]] = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                self.close()
                return messages
            if isinstance(message, dict):
                messages.append(message)
        return messages

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()


class Server:
    """Listens for agents of other hosts; drops connections without the token."""

    def __init__(self) -> None:
        """Raises OSError."""
        try:
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except (OSError, ValueError):  # no IPv6 here
            self._socket = socket.create_server(("", 0), backlog=1024)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_hex(16)
        self._strangers: list[tuple[Line, float]] = []
        self.lines: dict[str, Line] = {}
        """Connections by host name."""
        self.peers: dict[str, tuple[str, str, int]] = {}
        """Host name, address and port of each agent that has connected."""

    def accept(self, now: float) -> None:
        """Accept connections. The first message must be {"token", "host"}."""
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                break
            with contextlib.suppress(OSError):
                self._strangers.append((Line(connected), now))
        waiting = []
        for line, since in self._strangers:
            hello = next(iter(line.receive()), None)
            if hello is None:
                if now - since > _HELLO_S:
                    line.close()
                if not line.closed:
                    waiting.append((line, since))
            elif hmac.compare_digest(str(hello.get("token")), self.token):
                name = host = str(hello.get("host"))
                if host in self.lines and not self.lines[host].closed:  # containers may share a host name
                    name = f"{host} ({line.address})"
                self.lines[name] = line
                self.peers[name] = (host, line.address, int(hello.get("port") or 0))
            else:
                line.close()
        self._strangers = waiting

    def close(self) -> None:
        for line in [*self.lines.values(), *(line for line, _ in self._strangers)]:
            line.close()
        self._socket.close()


def call(address: str, port: int, hello: dict[str, Any], timeout_s: float) -> Line:
    """Connect and send the first message. Raises OSError."""
    line = Line(socket.create_connection((address, port), timeout=timeout_s))
    line.send(hello)
    return line


def answers(address: str, port: int, timeout_s: float = 1.0) -> bool:
    """True if an agent listens there."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def wait(lines: Sequence[Line], seconds: float, others: Sequence[int] = ()) -> None:
    """Wait until a line, or a file descriptor of `others`, has something to read, or the time is over."""
    poll = select.poll()
    for handle in (*(line.fileno() for line in lines if not line.closed), *others):
        poll.register(handle, select.POLLIN)
    poll.poll(seconds * 1000)
