"""Stop and save requests from outside (signals, a vanished launcher), and messages to all ranks.

DeepSpeed's launcher signals its ranks one after another, up to 30 s apart, and kills each 30 s after its signal
(launcher/launch.py). So a rank never acts on a signal alone: it raises a flag, the flags of all ranks are joined at the
next step boundary, and then all save and leave together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from llmtrain.base import log
from llmtrain.base.errors import UserError
from llmtrain.base.rank import messages, watch
from llmtrain.base.rank.heartbeat import OTHERS, heart
from llmtrain.base.threads import in_thread
from llmtrain.engine.dist.ranks import Ranks

T = TypeVar("T")


class StopRequests:
    """A context in which SIGTERM, SIGINT, SIGHUP, a vanished launcher or the file `preempt_file` ask to stop, and
    SIGUSR1 asks to save."""

    def __init__(self, preempt_file: str | None = None) -> None:
        self._preempt_file = preempt_file
        self.stop_reason: str | None = None
        self.save_now = False
        self._before: dict[int, Any] = {}
        self._done = threading.Event()

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: it stays ignored
                self._before[number] = signal.signal(number, self._on_signal)
        self._thread = threading.Thread(target=self._watch, name="stop-requests", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(2.0)  # a dead file system, where it looks for a file, holds nothing up
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_save(self) -> bool:
        """True if a save was asked for since the last call."""
        asked, self.save_now = self.save_now, False
        return asked

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save_now = True
            return
        what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.stop_reason is None and log.rank() == 0 and not messages.supervised():
            line = "\r\x1b[K" if os.isatty(2) else ""  # takes the place of a live line
            # Not print(): a handler may have interrupted one.
            with contextlib.suppress(OSError):
                os.write(2, f"{line}{what}: the run finishes this step, saves and leaves\n".encode())
        self._stop(what)

    def _watch(self) -> None:
        """Look once a second for requests without a signal."""
        launchers = watch.launchers()  # `deepspeed` killed with SIGKILL leaves its ranks running
        # One rank of a host looks: on a shared file system all of them would ask the same server.
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


def from_rank_0(ranks: Ranks, make: Callable[[], T]) -> T:
    """Return the value made by rank 0, on all ranks."""
    if ranks.rehearsed:
        return make()
    box: list[Any] = [make() if ranks.rank == 0 else None]
    dist.broadcast_object_list(box, group=ranks.control, group_src=0)
    made: T = box[0]
    return made


def from_all(ranks: Ranks, value: T) -> list[T]:
    """Return every rank's value, in order of rank, on all ranks. All ranks must call it."""
    if ranks.rehearsed:
        return [value] * ranks.world_size
    values: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(values, value, group=ranks.control)
    return values


_IN_TOUCH_S = 1.0


def at_length(ranks: Ranks, call: Callable[[], T]) -> T:
    """Return the result of a long call on this rank. All ranks must call it, and exchange messages until all calls have
    ended, so that none waits in a collective for too long. For the watch the call's work is progress, and no message
    is. Raises the call's error at the end."""
    future = in_thread(call, "at length")
    heart.awaits(os.getpid())
    while not all(from_all(ranks, bool(wait([future], _IN_TOUCH_S).done))):
        heart.awaits(OTHERS if future.done() else os.getpid())
    heart.awaits(0)
    return future.result()


def to_rank_0(ranks: Ranks, value: T) -> list[T]:
    """Return every rank's value, in order of rank, on rank 0; an empty list elsewhere. All ranks must call it."""
    if ranks.rehearsed:
        return [value] * ranks.world_size if ranks.rank == 0 else []
    values: list[Any] = [None] * ranks.world_size if ranks.rank == 0 else []
    dist.gather_object(value, values or None, group=ranks.control, group_dst=0)
    return values


class AgreedError(UserError):
    """A user's mistake on one rank, raised on all ranks: only rank 0 needs to print the message."""

    everywhere = True

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """End all ranks with a UserError that one of them raises inside; alone it would leave the others in a collective.

    Raises:
        AgreedError: on every rank.
    """
    mine: tuple[str, int] | None = None
    try:
        yield
    except UserError as error:
        mine = (str(error), error.exit_code)
    for rank, met in enumerate(from_all(ranks, mine)):
        if met is not None:
            where = f"rank {rank}: " if rank > 0 else ""
            raise AgreedError(f"{where}{met[0]}", met[1])
