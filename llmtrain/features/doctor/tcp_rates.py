"""Round trip and rate between hosts over plain TCP. Piped into each host's Python over ssh, like probe.py.

Standard library only, and Python 3.8 on. Every host takes its pairs in the order of the plan, so that no host is in two
measurements at a time; the first of a pair measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from typing import Any

MARK = "llmtrain-wire "
CHUNK = 1 << 18
CONNECT_S = 3.0
Facts = dict  # Python 3.8 knows no dict[str, ...] at run time


class Host:
    def __init__(self, ask: Facts) -> None:
        self.ask = ask
        self.me = ask["host"]
        self.until = time.monotonic() + ask["limit_s"]
        self.turn = threading.Condition()
        self.turn_of = ""  # the peer whose measurement may continue
        self.done: set = set()
        self.listener = self.listen()
        threading.Thread(target=self.serve, daemon=True).start()

    def left_s(self) -> float:
        return max(0.05, self.until - time.monotonic())

    def listen(self) -> socket.socket:
        """Listen on the first free one of the agreed ports. Raises OSError."""
        last = OSError("no port")
        for port in self.ask["ports"]:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
                listener.listen(64)
                return listener
            except OSError as error:
                listener.close()
                last = error
        raise last

    def serve(self) -> None:
        while True:
            link, _ = self.listener.accept()
            threading.Thread(target=self.answer, args=(link,), daemon=True).start()

    def answer(self, link: socket.socket) -> None:
        """Serve one connection of a peer. Its first line gives its purpose; without the token it is closed."""
        with contextlib.suppress(OSError, ValueError, KeyError), link:
            link.settimeout(5.0)
            head = json.loads(read_line(link))
            if head["token"] != self.ask["token"]:
                return
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if head["kind"] == "pair":
                self.hold(link, head["from"])
            elif head["kind"] == "ping":
                while link.recv(1):
                    link.sendall(b"x")
            elif head["kind"] == "up":
                link.sendall(b"go\n")
                rate = receive(link, head["window_s"])
                link.sendall(json.dumps(rate).encode() + b"\n")
                while link.recv(CHUNK):  # until the peer has read that and closes
                    pass
            elif head["kind"] == "down":
                link.recv(1)  # the peer's signal to begin
                send(link, head["window_s"])

    def hold(self, link: socket.socket, peer: str) -> None:
        """Wait for the peer's turn, then let the peer measure for as long as this connection is open."""
        link.settimeout(1.0)
        with self.turn:
            self.turn.wait_for(lambda: self.turn_of == peer, self.left_s())
        link.sendall(b"go\n")
        with contextlib.suppress(OSError):
            link.settimeout(self.ask["pair_limit_s"])
            link.recv(1)
        with self.turn:
            self.done.add(peer)
            self.turn.notify_all()

    def wait_for(self, peer: str) -> None:
        with self.turn:
            self.turn_of = peer
            self.turn.notify_all()
            self.turn.wait_for(lambda: peer in self.done, min(self.left_s(), self.ask["pair_limit_s"]))
            self.turn_of = ""

    def connect(self, peer: str, patience_s: float, kind: str, **words: Any) -> socket.socket:
        """Connect to the peer's program. Raises OSError if that fails within the time."""
        until = time.monotonic() + patience_s
        head = {"token": self.ask["token"], "kind": kind, "from": self.me, **words}
        while True:
            for port in self.ask["ports"]:
                try:
                    link = socket.create_connection((self.ask["addresses"][peer], port), CONNECT_S)
                except ConnectionRefusedError as error:
                    last: OSError = error
                    continue
                except OSError as error:
                    if time.monotonic() >= until:
                        raise
                    last = error
                    break
                link.settimeout(5.0)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.sendall(json.dumps(head).encode() + b"\n")
                return link
            if time.monotonic() >= until:
                raise last
            time.sleep(0.1)

    def measure(self, peer: str) -> Facts:
        """Return a peer's round trip in seconds and its `rates`. Raises OSError, ValueError."""
        with self.connect(peer, self.ask["patience_s"], "pair") as turn:
            turn.settimeout(self.ask["pair_limit_s"])
            if read_line(turn) != "go":
                raise OSError("the other host was not ready to measure this pair in time")
            trip: Facts = {"trip_s": self.ping(peer)}
            window_s = min(1.5, max(self.ask["window_s"], 12 * trip["trip_s"]))
            return {**trip, **self.rates(peer, window_s)}

    def rates(self, peer: str, window_s: float) -> Facts:
        """Return bit/s up (to the peer) and down, each alone, then both at once. Raises OSError, ValueError."""
        with self.rising(peer, window_s) as up:
            rate: Facts = {"up": sent(up, window_s)}
        with self.connect(peer, 1.0, "down", window_s=window_s) as down:
            rate["down"] = fetched(down, window_s)
        return {**rate, **self.both(peer, window_s)}

    def both(self, peer: str, window_s: float) -> Facts:
        """Measure both directions at once, with both connections open before the first byte."""
        rates: Facts = {"both_up": 0.0}
        with self.rising(peer, window_s) as up, self.connect(peer, 1.0, "down", window_s=window_s) as down:

            def upwards() -> None:
                with contextlib.suppress(OSError, ValueError):
                    rates["both_up"] = sent(up, window_s)

            other = threading.Thread(target=upwards, daemon=True)
            before = processor_times()
            other.start()
            rates["both_down"] = fetched(down, window_s)
            other.join(5.0 + window_s)
            after = processor_times()
        rates["idle"] = (after[0] - before[0]) / max(1, after[1] - before[1])
        return rates

    def rising(self, peer: str, window_s: float) -> socket.socket:
        """Return a connection on which the peer is ready to receive. Raises OSError."""
        link = self.connect(peer, 1.0, "up", window_s=window_s)
        if read_line(link) != "go":
            link.close()
            raise OSError("the connection broke")
        return link

    def ping(self, peer: str) -> float:
        """Return the shortest round trip: longer ones show busy processors."""
        trips: list = []
        with self.connect(peer, 1.0, "ping") as link:
            until = time.monotonic() + 0.5
            while len(trips) < 5 or (len(trips) < 50 and time.monotonic() < until):
                began = time.perf_counter()
                link.sendall(b"x")
                if not link.recv(1):
                    raise OSError("the connection broke")
                trips.append(time.perf_counter() - began)
        return min(trips)


def sent(link: socket.socket, window_s: float) -> float:
    """Return bit/s by the peer's report."""
    return float(json.loads(send(link, window_s) or read_line(link)))


def fetched(link: socket.socket, window_s: float) -> float:
    """Return bit/s after the signal to begin."""
    link.sendall(b"x")
    return receive(link, window_s)


def processor_times() -> list:
    """Return [idle, all] clock ticks of this machine's processors."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:]]
    return [ticks[3] + ticks[4], sum(ticks[:8])]


def read_line(link: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte or len(line) > 4096:
            break
        line += byte
    return line.decode().strip()


def send(link: socket.socket, window_s: float) -> str:
    """Send until the peer has measured enough: it answers, or closes. Returns its answer."""
    chunk = memoryview(bytes(CHUNK))
    link.setblocking(False)
    ready = select.poll()  # not select.select, which knows 1,024 files
    ready.register(link, select.POLLIN | select.POLLOUT)
    until = time.monotonic() + 3 * window_s + 3.0
    try:
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                link.send(chunk)
            try:
                received = link.recv(4096)
            except BlockingIOError:
                ready.poll(200)
                continue
            return received.decode().strip()
    except OSError:
        return ""
    finally:
        link.settimeout(5.0)
        drop(link)
    return ""


def receive(link: socket.socket, window_s: float) -> float:
    """Return bit/s in the last two thirds of a window that the first byte opens."""
    buffer = bytearray(CHUNK)
    link.settimeout(window_s + 3.0)
    if not link.recv_into(buffer):
        raise OSError("the connection broke")
    opened = time.perf_counter()
    started, last, count = 0.0, 0.0, 0
    while True:
        got = link.recv_into(buffer)
        now = time.perf_counter()
        if not got:
            break
        if started:
            count, last = count + got, now
        elif now - opened > window_s / 3:
            started = last = now
        if now - opened > window_s:
            break
    drop(link)
    return 8 * count / max(1e-6, last - started) if started else 0.0


def drop(link: socket.socket) -> None:
    """Discard unsent data at the close, so that it does not disturb the next measurement."""
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def main(ask: Facts) -> None:
    """Measure all pairs, then print one line: this host's measurements, by peer."""
    out: Facts = {}
    try:
        host = Host(ask)
        for first, second in ask["pairs"]:
            if time.monotonic() > host.until:
                break
            if first == ask["host"]:
                try:
                    out[second] = host.measure(second)
                except (OSError, ValueError) as error:
                    out[second] = {"error": str(error)}
            elif second == ask["host"]:
                host.wait_for(first)
    except OSError as error:
        out[""] = {"error": f"no port of {ask['ports']} is free: {error}"}
    sys.stdout.write("\n" + MARK + json.dumps(out) + "\n")
    sys.stdout.flush()
    os._exit(0)
