"""Calls in threads of their own, for who must not wait for them for ever. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Begin a call; its result, or what it raises, comes later. The thread ends with the process, whatever it waits
    for, as an executor's does not."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
