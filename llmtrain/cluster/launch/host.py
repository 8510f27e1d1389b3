"""The ranks of one host, started together and ended together: `python -m llmtrain.cluster.launch.host` on each host.

It replaces `deepspeed.launcher.launch`, with the same arguments and the same variables for the ranks: that one imports
torch and DeepSpeed before it starts ranks, and asks one rank after another to leave, 30 s apart. This file imports only
the standard library.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

_POLL_S = 0.1
_LOOKS_S = 1.0
"""Seconds from the end of a failed rank until the others are asked to leave: the watch examines them first."""
_LEAVES_S = 30.0
"""Seconds after that until the others are ended by force."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for them. Returns 0, or the exit code of the first rank that failed; negative: a
    signal."""
    arguments = _arguments(argv)
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    ranks = _start(arguments)
    answered, failed_at, code = 0, float("inf"), 0
    while alive := [rank for rank in ranks if rank.poll() is None]:
        if not code and (code := next((rank.returncode for rank in ranks if rank.returncode), 0)):
            failed_at = time.monotonic()
        since_s = time.monotonic() - failed_at
        if len(signals) > answered:  # all at once, since saving ranks wait for each other; a second signal kills
            _send(alive, signal.SIGKILL if answered else signal.SIGTERM)
            answered = len(signals)
        elif since_s > _LOOKS_S + _LEAVES_S:
            _send(alive, signal.SIGKILL)
        elif since_s > _LOOKS_S and not answered:
            signals.append(signal.SIGTERM)
        time.sleep(_POLL_S)
    return code or next((rank.returncode for rank in ranks if rank.returncode), 0)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llmtrain.cluster.launch.host", description=__doc__)
    parser.add_argument("--world_info", required=True, help="devices by host, in order: JSON in URL-safe base64")
    parser.add_argument("--node_rank", type=int, default=0, help="number of this host")
    parser.add_argument("--master_addr", required=True, help="address of rank 0's host")
    parser.add_argument("--master_port", required=True, help="port of the rendezvous there")
    parser.add_argument("--verbose", action="store_true", help="print the process id of each rank")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="arguments of `python -m` for each rank")
    return parser.parse_args(argv)


def _start(arguments: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    hosts = list(json.loads(base64.urlsafe_b64decode(arguments.world_info)).values())
    devices = hosts[arguments.node_rank]
    first = sum(map(len, hosts[: arguments.node_rank]))
    shared = {
        **os.environ,
        "MASTER_ADDR": arguments.master_addr,
        "MASTER_PORT": arguments.master_port,
        "WORLD_SIZE": str(sum(map(len, hosts))),
        "LOCAL_SIZE": str(len(devices)),
        "CROSS_RANK": str(arguments.node_rank),
        "CROSS_SIZE": str(len(hosts)),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
    }
    ranks = []
    for local_rank in range(len(devices)):
        rank = str(first + local_rank)
        env = {**shared, "RANK": rank, "LOCAL_RANK": str(local_rank)}
        ranks.append(subprocess.Popen((sys.executable, "-u", "-m", *arguments.words), env=env))
        if arguments.verbose:
            print(f"rank {rank}: process {ranks[-1].pid}", flush=True)
    return ranks


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
