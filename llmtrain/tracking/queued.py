"""A tracker on a thread of its own: a slow or dead one costs the run nothing but its own figures."""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from llmtrain.base import log
from llmtrain.base.redact import redact_text
from llmtrain.tracking.sink import Sink

_WAITING = 4096
"""Calls that may wait; those beyond are dropped."""


class Queued:
    """Hands every call to a tracker over to its thread, in order. No method waits or raises."""

    def __init__(self, name: str, sink: Sink, where: Callable[[BaseException], str]) -> None:
        """`name`: the tracker's key in the run's YAML. `where`: from an exception to the place in the user's code."""
        self._name, self._sink, self._where = name, sink, where
        self._calls: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._dropped, self._failed, self._abandoned = 0, False, False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._call(lambda: [importlib.import_module(module) for module in sink.MODULES])
        self._thread.start()

    def call(self, method: str, *words: Any, **options: Any) -> None:
        """Hand one call over."""
        if self._failed:
            return
        if self._calls.qsize() >= _WAITING:
            self._dropped += 1
            return
        self._calls.put_nowait(lambda: getattr(self._sink, method)(*words, **options))

    def end(self, exit_code: int) -> None:
        """Hand over the last call; `join` waits for it."""
        self._calls.put_nowait(lambda: self._sink.close(exit_code=exit_code))
        self._calls.put_nowait(None)

    def join(self, deadline_s: float) -> None:
        """Wait until the tracker is done, at most until `deadline_s` of time.monotonic()."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            log.warn(f"{self._name} did not finish in time; metrics.jsonl holds everything")
        if self._thread.is_alive() or self._failed:
            self._abandoned = True
            try:
                self._sink.abandon()
            except Exception as error:
                log.warn(f"{self._name} cannot be ended ({self._reason(error)}); it may hold up the end of the process")
        if self._dropped:
            log.warn(f"{self._name} was too slow: {self._dropped} calls were dropped; metrics.jsonl has them all")

    def _work(self) -> None:
        while not self._failed and (call := self._calls.get()) is not None:
            self._call(call)

    def _call(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._failed = True
            if self._abandoned:
                return
            log.warn(f"{self._name} is given up ({self._reason(error)}); training goes on, metrics.jsonl holds "
                     "everything")  # fmt: skip

    def _reason(self, error: Exception) -> str:
        return self._where(error) + redact_text(f"{type(error).__name__}: {error}".splitlines()[0])
