"""Calls of a plugin's code during a run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from llmtrain.base import log
from llmtrain.base.errors import ModelError
from llmtrain.base.rank import watch
from llmtrain.base.rank.heartbeat import heart
from llmtrain.config.plugins import is_of_plugin, place_of

T = TypeVar("T")


@contextlib.contextmanager
def calling(key: str, method: str) -> Iterator[None]:
    """A context around a plugin's method; the watch names key and method if the method hangs. A process that the method
    forks ends with the context: else it would run on as a second copy of the rank, and the launcher would never end."""
    rank = os.getpid()
    try:
        with heart.calling(key, method), _bounded():
            yield
    finally:
        if os.getpid() != rank:
            text = f"warning: {key}: {method}: has forked its rank, and the new process returns from it: it is killed\n"
            os.write(2, text.encode())
            os._exit(1)
    if log.reopen():
        raise RuntimeError("it has closed sys.stdout, where the run prints")


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Raise TimeoutError in a plugin's method after `fault.stall_timeout_s` without progress, if no watch runs. Inside
    C code the error comes only when the code returns to Python."""
    limit_s = watch.alone_s
    main = threading.current_thread() is threading.main_thread()
    if limit_s is None or not main or signal.getitimer(signal.ITIMER_REAL)[0]:  # nested, or a test's timer
        yield
        return

    def look(*_: object) -> None:
        if (left_s := limit_s - heart.idle_s()) <= 0:
            raise TimeoutError(f"it has not returned for {limit_s:g} s (fault.stall_timeout_s)")
        signal.setitimer(signal.ITIMER_REAL, left_s, limit_s)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)  # repeats, as the method may catch the error
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def called(owner: object, key: str, method: str, call: Callable[[], T]) -> T:
    """Return `call()`, a call of the owner's `method`. If a plugin defines the owner, the watch names `key` and
    `method` when the call hangs, and an exception becomes a ModelError with key, method and line."""
    if not is_of_plugin(owner):
        return call()
    try:
        with calling(key, method):
            return call()
    except BaseException as error:
        # During a run a signal only sets a flag. With Python's own handler, KeyboardInterrupt was the user's Ctrl-C.
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ModelError(f"{key}: {method}: {place_of(error)}{what}") from error
