"""The guardian: if `llmtrain launch` is killed, this process beside it asks the ranks to save and leave.

Without it rank 0 would die as soon as it prints into a pipe that nobody reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from llmtrain.cluster import messages
from llmtrain.cluster.hosts.environment import remove
from llmtrain.cluster.launch import remote

AGENTS_LEAVE_S = 12.0
"""Time for the agents to end after the ranks: after a fault they report to W&B."""
_SAVES_S = 1800.0
"""Time for the ranks to save and leave; nobody is left to end a rank that hangs."""


class Guardian:
    """Guards one attempt. A context manager around all of it."""

    def __init__(self, hosts: Sequence[str], mark: str, folder: str, secret: str | None, output: int) -> None:
        """`folder`: launch's own files; `secret`: path from `deliver`; `output`: descriptor of the job's output."""
        self._process = subprocess.Popen(
            (sys.executable, "-m", "llmtrain.cluster.launch.guardian", str(output)),
            stdin=subprocess.PIPE,
            pass_fds=(output,),
            start_new_session=True,  # a signal to launch's process group does not reach it
        )
        self._send(hosts=list(hosts), mark=mark, folder=folder, secret=secret)

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(ended=True)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def met(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Pass on the ranks of the message `place`."""
        self._send(ranks=[{"pid": each["pid"], "rank": each["rank"]} for each in ranks])

    def _send(self, **facts: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guardian was killed
            self._process.stdin.write(json.dumps(facts).encode() + b"\n")
            self._process.stdin.flush()


def take_over(known: dict[str, Any], output: int) -> None:
    """Act for a killed launch: a first Ctrl-C's request to the ranks, then launch's own clean-up."""
    hosts, mark = known["hosts"], known["mark"]
    ranks = known.get("ranks", [])
    if ranks:
        reached = remote.signal_ranks(hosts, mark, ranks, signal.SIGTERM)
        _say(f"launch was killed: {reached} of {len(ranks)} ranks were asked to save and leave")
        printing = threading.Thread(target=_hand_on, args=(output,), daemon=True)
        printing.start()
        printing.join(_SAVES_S)
    for line in remote.end_all(hosts, mark, AGENTS_LEAVE_S if ranks else 0.0):
        _say(f"warning: {line}")
    if known["secret"] is not None:
        remove(hosts, known["secret"])
    shutil.rmtree(known["folder"], ignore_errors=True)


def _hand_on(output: int) -> None:
    """Print the job's output until no process is left that could write any."""
    with open(output, "rb") as stream:
        for raw in stream:
            if messages.parse(raw.decode("utf-8", "replace")) is None:
                with contextlib.suppress(OSError):
                    os.write(1, raw)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def main(output: int) -> int:
    """Entry point of the process: reads JSON lines from standard input, which ends when launch has ended."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with launch, and not before
    known: dict[str, Any] = {}
    for line in sys.stdin:
        with contextlib.suppress(ValueError):  # killed while it wrote
            known.update(json.loads(line))
    if "mark" in known and not known.get("ended"):
        take_over(known, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
