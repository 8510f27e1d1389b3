"""Requests from outside to stop or save: signals, or a launcher that has ended.

DeepSpeed's launcher signals its ranks one after another, up to 30 s apart, and kills each 30 s after its signal
(launcher/launch.py). So a rank never acts on a signal alone: it sets a flag, the flags of all ranks are joined at the
next step boundary, and then all ranks save and leave together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from types import FrameType
from typing import Any, TypeVar

from llmtrain.base import log
from llmtrain.base.rank import messages, watch
from llmtrain.base.rank.heartbeat import heart

T = TypeVar("T")


class StopRequests:
    """A context in which SIGTERM, SIGINT, SIGHUP, the end of the launcher or the file `preempt_file` ask to stop, and
    SIGUSR1 asks to save."""

    def __init__(self, preempt_file: str | None = None) -> None:
        self._preempt_file = preempt_file
        self.stop_reason: str | None = None
        self.save_now = False
        self._before: dict[int, Any] = {}
        self._done = threading.Event()

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under nohup: leave it
                self._before[number] = signal.signal(number, self._on_signal)
        self._thread = threading.Thread(target=self._watch, name="stop-requests", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(2.0)  # a limit, as its look for a file may hang on a dead file system
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_save(self) -> bool:
        """Return True if a save was asked for since the last call."""
        asked, self.save_now = self.save_now, False
        return asked

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save_now = True
            return
        what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.stop_reason is None and log.rank() == 0 and not messages.supervised():
            line = "\r\x1b[K" if os.isatty(2) else ""  # overwrites a live line
            # Not print(): a handler may have interrupted one.
            with contextlib.suppress(OSError):
                os.write(2, f"{line}{what}: the run finishes this step, saves and leaves\n".encode())
        self._stop(what)

    def _watch(self) -> None:
        """Look once a second for requests that come without a signal: the file, or the end of the launcher."""
        launchers = watch.launchers()  # `deepspeed` killed with SIGKILL leaves its ranks running
        # Only one rank of a host looks for the file: on a shared file system all would ask the same server.
        file = self._preempt_file if os.environ.get("LOCAL_RANK", "0") == "0" else None
        while (file or launchers) and self.stop_reason is None:
            for process in launchers:
                if not process.alive():
                    self._stop(f"launcher process {process.pid} is gone")
            if file and os.path.exists(file):
                self._stop(f"preempt file {file} is on {socket.gethostname()}")
            if self._done.wait(1.0):
                return

    def _stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        heart.stopping()


class StopAsked(Exception):
    """A rank was asked to stop before the first step; raised on all ranks."""
