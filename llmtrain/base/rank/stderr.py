"""Keeps the end of a rank's standard error for the watch.

NCCL's watchdog ends a rank from a thread without Python, and prints its reason only to standard error. A separate
process passes everything on as it comes: a thread would die with the rank and lose the end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_KEPT_BYTES = 64 << 10
_STARTS_S = 5.0

_own: int | None = None
"""Descriptor of the original standard error."""


def keep_end(path: Path, start: Callable[[list[str], int], None]) -> None:
    """Pass standard error through a process that keeps its last 64 KiB in `path`. `start`: starts a process that is not
    a child of this one, from its words and a descriptor for its standard input. Raises OSError, and then changes
    nothing."""
    global _own
    reading, writing = os.pipe()
    try:
        start([sys.executable, "-m", __name__, str(path)], reading)
        deadline = time.monotonic() + _STARTS_S
        while not path.exists():  # until then nobody reads the pipe
            if time.monotonic() > deadline:
                raise TimeoutError(110, "the process that keeps the end of standard error does not start", str(path))
            time.sleep(0.01)
        sys.stderr.flush()
        _own = os.dup(2)
        os.dup2(writing, 2)
    finally:
        os.close(reading)
        os.close(writing)


def mend() -> None:
    """Print directly again if that process has ended: output without a reader would end the rank."""
    global _own
    if _own is None:
        return
    poll = select.poll()
    poll.register(2, 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        os.dup2(_own, 2)
        os.close(_own)
        _own = None


def main(path: Path) -> int:
    """Copy standard input to standard error until all writers have closed it."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end, is_open = bytearray(), True
    path.touch(mode=0o600)
    while data := os.read(0, 1 << 16):
        end += data
        del end[:-_KEPT_BYTES]
        with contextlib.suppress(OSError):  # before printing: this is for a rank that may be about to die
            path.write_bytes(end)
        while data and is_open:
            try:
                data = data[os.write(2, data) :]
            except OSError:  # nobody reads it, but the run goes on
                is_open = False
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
