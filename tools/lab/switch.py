"""python -m tools.lab.switch FOLDER PIDFD: the switch between the hosts' TAP devices; FOLDER/control takes orders.

Frames keep their virtio-net header, so a 64 KiB segment goes through as one read and one write. An order is one JSON
object in one datagram, {"op": ...}; the answer is {} or {"error": text}. It ends, and removes FOLDER, as soon as the
process behind PIDFD has ended.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import heapq
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from itertools import count
from typing import Any

from tools.lab.link import Link, Pipe, wire_size

TUNSETOFFLOAD = 0x400454D0
OFFLOAD_ALL = 1 | 2 | 4 | 8  # checksum, TSO4, TSO6, TSO with ECN
LARGEST = 10 + 14 + 65536
BURST = 64


class Port:
    """One host's place at the switch. The link and the counters outlive the device: a host may be powered off."""

    def __init__(self, name: str, mac: bytes) -> None:
        self.name = name
        self.mac = mac
        self.fd = -1
        self.link: Link | None = None
        self.cut = False
        self.open: list[int] | None = None  # ports to which others may connect; None: all
        self.sent = 0
        self.received = 0


def begins_elsewhere(frame: bytes, ports: list[int]) -> bool:
    """Whether a frame begins a TCP connection over IPv4 to none of these ports: a SYN without an ACK."""
    if frame[22:24] != b"\x08\x00" or frame[33] != socket.IPPROTO_TCP:
        return False
    tcp = 24 + 4 * (frame[24] & 15)
    return frame[tcp + 13] & 0x12 == 0x02 and int.from_bytes(frame[tcp + 2 : tcp + 4]) not in ports


class Switch:
    """Reads, delays and writes frames in one thread."""

    def __init__(self) -> None:
        self.ports: dict[str, Port] = {}
        self.by_mac: dict[bytes, Port] = {}
        self.by_fd: dict[int, Port] = {}
        self.pairs: dict[tuple[str, str], Link] = {}
        self.waiting: list[tuple[float, int, bytes, Port, tuple[Pipe, ...]]] = []
        self.number = count()

    # Frames

    def read(self, port: Port) -> None:
        """What the host has sent, up to BURST frames, so that no port starves another."""
        for _ in range(BURST):
            try:
                frame = os.read(port.fd, LARGEST)
            except BlockingIOError:
                return
            except OSError:  # the device went with its host
                self.unplug(port.name)
                return
            if port.cut:
                continue
            size = wire_size(frame)
            port.sent += size
            target = self.by_mac.get(frame[10:16])
            if target is not None:
                self.pass_on(frame, size, target, self.way(port, target), time.monotonic())
            elif frame[10] & 1:  # broadcast or multicast
                now = time.monotonic()
                for other in self.ports.values():
                    if other is not port:
                        self.pass_on(frame, size, other, self.way(port, other), now)

    def way(self, source: Port, target: Port) -> tuple[Pipe, ...]:
        """The shaped pipes between two hosts, in order."""
        pipes = []
        if source.link is not None:
            pipes.append(source.link.there)
        if self.pairs:
            if (pair := self.pairs.get((source.name, target.name))) is not None:
                pipes.append(pair.there)
            if (pair := self.pairs.get((target.name, source.name))) is not None:
                pipes.append(pair.back)
        if target.link is not None:
            pipes.append(target.link.back)
        return tuple(pipes)

    def pass_on(self, frame: bytes, size: int, target: Port, pipes: tuple[Pipe, ...], now: float) -> None:
        """Through as many pipes as take no time; then it waits, or it is at the host."""
        for index, pipe in enumerate(pipes):
            there = pipe.admit(now, size)
            if there is None:
                return
            if there > now:
                heapq.heappush(self.waiting, (there, next(self.number), frame, target, pipes[index + 1 :]))
                return
        if target.cut or target.fd < 0 or (target.open is not None and begins_elsewhere(frame, target.open)):
            return
        with contextlib.suppress(OSError):  # a full queue or a device that is down: lost, as on a wire
            os.write(target.fd, frame)
            target.received += size

    def due(self) -> float | None:
        """Pass on all whose time has come; seconds until the next, None if none waits."""
        while self.waiting:
            now = time.monotonic()
            if self.waiting[0][0] > now:
                return self.waiting[0][0] - now
            there, _, frame, target, pipes = heapq.heappop(self.waiting)
            self.pass_on(frame, wire_size(frame), target, pipes, there)
        return None

    # Orders

    def plug(self, host: str, mac: str, fd: int) -> None:
        """A host's device, new or after a power cut."""
        self.unplug(host)
        os.set_blocking(fd, False)
        port = self.ports.setdefault(host, Port(host, bytes.fromhex(mac.replace(":", ""))))
        port.fd = fd
        self.by_mac[port.mac] = port
        self.by_fd[fd] = port
        self.set_offload()

    def unplug(self, host: str) -> None:
        """Close the device, which removes it from its host."""
        port = self.ports.get(host)
        if port is not None and port.fd >= 0:
            del self.by_fd[port.fd]
            os.close(port.fd)
            port.fd = -1

    def cut(self, host: str, value: bool) -> None:
        self.ports[host].cut = value

    def shape(self, host: str, toward: str | None, **how: Any) -> None:
        """A new link in place of the old; nothing in `how` means an ideal one."""
        link = Link(**how) if how else None
        if toward is None:
            self.ports[host].link = link
        elif link is None:
            self.pairs.pop((host, toward), None)
        else:
            self.ports[toward]  # a KeyError now rather than a shape that never applies
            self.pairs[host, toward] = link
        self.set_offload()

    def set_offload(self) -> None:
        """Frames of one segment while any link loses some: one lost must not be forty lost."""
        links = [*self.pairs.values(), *(port.link for port in self.ports.values() if port.link is not None)]
        flags = 0 if any(link.lossy for link in links) else OFFLOAD_ALL
        for fd in self.by_fd:
            with contextlib.suppress(OSError):
                fcntl.ioctl(fd, TUNSETOFFLOAD, flags)

    def obey(self, order: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """One order's answer."""
        match order.pop("op"):
            case "plug":
                self.plug(fd=fds[0], **order)
            case "unplug":
                self.unplug(**order)
            case "cut":
                self.cut(**order)
            case "firewall":
                self.ports[order["host"]].open = order["ports"]
            case "shape":
                self.shape(**order)
            case "reset":
                self.pairs.clear()
                for port in self.ports.values():
                    port.link, port.cut, port.open = None, False, None
                self.set_offload()
            case "bytes":
                return {name: [port.sent, port.received] for name, port in self.ports.items()}
            case other:
                return {"error": f"no such order: {other}"}
        return {}

    # The loop

    def answer(self, client: socket.socket) -> bool:
        """One order of a client; False when it has gone."""
        try:
            data, ancillary, _, _ = client.recvmsg(65536, socket.CMSG_SPACE(4))
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[:4])
        try:
            reply = self.obey(json.loads(data), list(fds))
        except (KeyError, ValueError, TypeError, IndexError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):
            client.send(json.dumps(reply).encode())
        return True

    def serve(self, door: socket.socket, owner: int) -> None:
        """Until the owner's pidfd says that it has ended. select(), not epoll: its timeout is in microseconds."""
        clients: dict[int, socket.socket] = {}
        while True:
            timeout_s = self.due()
            readable, _, _ = select.select([owner, door.fileno(), *clients, *self.by_fd], [], [], timeout_s)
            for fd in readable:
                if fd == owner:
                    return
                if (port := self.by_fd.get(fd)) is not None:
                    self.read(port)
                elif fd == door.fileno():
                    client, _ = door.accept()
                    client.setblocking(False)
                    clients[client.fileno()] = client
                elif fd in clients and not self.answer(clients[fd]):
                    clients.pop(fd).close()


def main() -> None:
    folder, owner = sys.argv[1], int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal's; the owner ends the switch
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # starved of its core, it would be the slow link that nobody ordered
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.chdir(folder)  # a socket's path has at most 107 bytes
    door.bind("control")
    os.chmod("control", 0o600)
    door.listen(64)
    print("ready", flush=True)
    Switch().serve(door, owner)
    for _ in range(50):  # the hosts die at the same moment, and may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.1)


if __name__ == "__main__":
    main()
