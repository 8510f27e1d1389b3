"""Traffic between hosts of the lab: `python -S traffic.py MODE ...`, standard library only; prints one JSON object.

serve PORT             answers what comes first: E echoes bytes, S takes all and says how many bytes came
rtt HOST PORT          {"median_ms": ...} of 10 round trips of one byte
send HOST PORT SECONDS {"mbit": what the other side got a second, "bytes", "seconds", "began": one clock for all hosts}
udp HOST PORT COUNT    COUNT numbered datagrams, {"sent": COUNT}
count PORT SECONDS     {"received": datagrams until none comes for SECONDS}
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_RECEIVE_BYTES_FORCED = 33
"""SO_RCVBUFFORCE, which Python has no name for."""


def serve(port: str) -> None:
    with socket.create_server(("", int(port)), backlog=64) as server:
        print("ready", flush=True)
        while True:
            client, _ = server.accept()
            threading.Thread(target=answer, args=(client,), daemon=True).start()


def answer(client: socket.socket) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with client:
        if client.recv(1) == b"E":
            while data := client.recv(1):
                client.sendall(data)
            return
        got = 0
        buffer = bytearray(1 << 20)
        while taken := client.recv_into(buffer):
            got += taken
        client.sendall(str(got).encode())


def rtt(host: str, port: str) -> dict[str, float]:
    times = []
    with socket.create_connection((host, int(port)), timeout=20) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.sendall(b"E")
        for _ in range(11):
            began = time.perf_counter()
            server.sendall(b"x")
            server.recv(1)
            times.append((time.perf_counter() - began) * 1e3)
    return {"median_ms": statistics.median(times[1:])}


def send(host: str, port: str, seconds: str) -> dict[str, float]:
    block = bytes(1 << 20)
    began = time.perf_counter()
    with socket.create_connection((host, int(port)), timeout=60) as server:
        server.sendall(b"S")
        while time.perf_counter() - began < float(seconds):
            server.sendall(block)
        server.shutdown(socket.SHUT_WR)
        got = int(server.recv(64))
        elapsed = time.perf_counter() - began
    return {"mbit": got * 8 / elapsed / 1e6, "bytes": got, "seconds": elapsed, "began": began}


def udp(host: str, port: str, count: str) -> dict[str, int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for number in range(int(count)):
            out.sendto(str(number).encode(), (host, int(port)))
            if number % 50 == 49:
                time.sleep(0.02)  # queues and buffers are not what is tested
    return {"sent": int(count)}


def count(port: str, seconds: str) -> dict[str, int]:
    received = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as at:
        at.setsockopt(socket.SOL_SOCKET, _RECEIVE_BYTES_FORCED, 8 << 20)  # all of them: this process may have to wait
        at.bind(("", int(port)))
        print("ready", flush=True)
        try:
            while True:
                at.recv(100)
                received += 1
                at.settimeout(float(seconds))
        except TimeoutError:
            return {"received": received}


if __name__ == "__main__":
    modes: dict[str, Callable[..., Any]] = {"serve": serve, "rtt": rtt, "send": send, "udp": udp, "count": count}
    print(json.dumps(modes[sys.argv[1]](*sys.argv[2:])), flush=True)
