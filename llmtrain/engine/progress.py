"""Reports to the watch how the device and torch.compile progress.

A rank that waits for its device polls (cudaStreamSynchronize, NCCL's threads), so a busy processor is no sign of
progress there. Instead an event enters the device's queue with every micro-batch, and a thread sends a heartbeat when
the device reaches the event. Compilation, which runs on the processor, is a phase of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from llmtrain.base.imports import once_loaded
from llmtrain.base.rank.heartbeat import Heartbeat, heart

_POLL_S = 0.25


class Event(Protocol):
    """Interface of torch.cuda.Event: a place in the device's queue, with the time of its completion."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


class DeviceProgress:
    """The events of one rank in its device's queue."""

    def __init__(self, beats: Heartbeat, new_event: Callable[[], Event]) -> None:
        self._beats, self._new_event = beats, new_event
        self._ahead: deque[Event] = deque()
        beats.on_device()

    def mark(self) -> None:
        """Put an event into the queue, after a micro-batch or an update."""
        event = self._new_event()
        event.record()
        self._beats.gave()
        self._ahead.append(event)

    def look(self) -> None:
        """Send a heartbeat for events that the device has reached, from any thread. Raises RuntimeError if the device
        failed."""
        done = 0
        while self._ahead and self._ahead[0].query():
            self._ahead.popleft()
            done += 1
        if done:
            self._beats.device_did(done)


_progress: DeviceProgress | None = None


def begin(device: torch.device, tend: Callable[[Any], None]) -> None:
    """Start to report this rank's device; later calls, and calls without CUDA, do nothing. `tend`: called with
    `flight_recorder` a few times a second (base/rank/watch.py)."""
    global _progress
    if device.type != "cuda" or _progress is not None:
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # NCCL's flight recorder: off by default in older torch
    _progress = DeviceProgress(heart, torch.cuda.Event)
    threading.Thread(target=_tend, args=(_progress, device, tend), name="device-progress", daemon=True).start()


def mark() -> None:
    if _progress is not None:
        _progress.mark()


def _tend(progress: DeviceProgress, device: torch.device, tend: Callable[[Any], None]) -> None:
    torch.cuda.set_device(device)  # by default GPU 0, where a context takes 0.5 GB
    while True:
        time.sleep(_POLL_S)
        with contextlib.suppress(RuntimeError):  # the device failed: the main thread gets and reports the error
            progress.look()
        tend(flight_recorder)


def flight_recorder() -> Mapping[str, Any]:
    """Return the contents of NCCL's flight recorder. Raises AttributeError if torch is built without CUDA."""
    trace: bytes = torch._C._distributed_c10d._dump_nccl_trace_json()  # type: ignore[attr-defined]
    found: dict[str, Any] = json.loads(trace)
    return found


_warned = False


def tell_compilation() -> None:
    """Make the watch see the phase `compile` while torch.compile compiles in any thread. Later calls do nothing."""
    global _warned
    if _warned:
        return
    callback, before = "torch._dynamo.callback", [heart.in_phase()]

    def starts(_: Any) -> None:
        before[0] = heart.in_phase()
        heart.phase("compile")

    def ends(_: Any) -> None:
        heart.phase(before[0])

    once_loaded(callback, lambda: sys.modules[callback].on_compile_start(starts))
    once_loaded(callback, lambda: sys.modules[callback].on_compile_end(ends))
    _warned = True
