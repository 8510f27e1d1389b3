"""The process that starts a job (DeepSpeed's launcher, or srun), in its own session, and its output line by line."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from llmtrain.base import log, untrusted
from llmtrain.base.rank import messages

TRAIN = ("llmtrain", "train")
"""Arguments of `python -m` for a rank, before --config, in a clone and an installed wheel."""
_REST_S = 12.0
"""Time after the end of the process: a host's agent may hold its output a little longer, and report a fault."""


def on_terminal() -> bool:
    return sys.stdout.isatty() and sys.stderr.isatty()


def say(text: str) -> None:
    print(untrusted.shown(text, lines=True), file=sys.stderr, flush=True)


class Job:
    """A started job that no Ctrl-C of the terminal reaches; its context kills the rest of the session."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # On a terminal nothing else may write into the live line.
            stderr=subprocess.STDOUT if on_terminal() else None,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="job-output", daemon=True)
        self._reader.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()

    @property
    def output(self) -> int:
        """Descriptor of its output pipe, for `Guardian`; this process reads it."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for raw in stream:
                message = messages.parse(raw.decode("utf-8", "replace"))
                if message is not None:
                    self._messages.put(message)
                    continue
                with contextlib.suppress(OSError, ValueError):  # the terminal is gone: the job is not
                    if on_terminal():
                        log.pass_on(raw.decode("utf-8", "replace"))
                    else:
                        sys.stdout.buffer.write(raw)
                        sys.stdout.buffer.flush()

    def take(self, wait_s: float) -> list[dict[str, Any]]:
        """Return the messages since the last call; wait for the first one at most `wait_s`."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._messages.get(timeout=wait_s))
            while True:
                found.append(self._messages.get_nowait())
        return found

    def code(self) -> int | None:
        """Return the exit code, once it has ended; negative: the signal. Only `__exit__` reaps, so `kill` hits no
        other."""
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def rest(self) -> list[dict[str, Any]]:
        """Return the messages still in transit at the end of the process."""
        self._reader.join(_REST_S)
        return self.take(0.0)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End the process with everything in its session: DeepSpeed's launcher, pdsh, their connections."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
