"""How long a rank computes for a sequence, without its waiting for others.

On the processor: the time of a step's forward and backward passes less that inside collectives. On a GPU, where the
host waits for nothing and collectives stand in the device's queue: events around a forward pass. Under ZeRO 3 that pass
waits for parameters, so there the events stand around each module that has some, after they have come.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.data.stream.loader import MicroBatch


class Pace(Protocol):
    """A rank's own speed."""

    def measured(self, micros: Sequence[MicroBatch]) -> contextlib.AbstractContextManager[None]:
        """In which these are computed, forward and backward."""
        ...

    def take(self) -> int:
        """Nanoseconds that a sequence took in a step since the last call; 0: not known."""
        ...

    def forget(self) -> None:
        """What was measured so far does not count."""
        ...


class HostPace:
    """On the processor. Collectives are those that `count_collectives` counts."""

    def __init__(self, waited_s: Callable[[], float] = heart.waited_s, clock: Callable[[], float] = time.monotonic):
        self._waited_s, self._clock = waited_s, clock
        self._found = 0

    @contextlib.contextmanager
    def measured(self, micros: Sequence[MicroBatch]) -> Iterator[None]:
        began_s, waited_s = self._clock(), self._waited_s()
        yield
        own_s = self._clock() - began_s - (self._waited_s() - waited_s)
        rows = sum(len(micro.sample_indices) for micro in micros)
        self._found = max(1, round(own_s * 1e9 / rows))

    def take(self) -> int:
        found, self._found = self._found, 0
        return found

    def forget(self) -> None:
        self._found = 0


class Event(Protocol):
    """As torch.cuda.Event: a place in the device's queue, with the time when the device was there."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


def _cuda_event() -> Event:
    return torch.cuda.Event(enable_timing=True)


class DevicePace:
    """On a GPU: of the first forward pass of a step. Nothing waits for the device."""

    def __init__(self, module: nn.Module, *, gathers: bool, new_event: Callable[[], Event] = _cuda_event) -> None:
        """`gathers`: parameters come when their module begins (ZeRO 3); its hooks are there already."""
        self._new_event = new_event
        self._wanted = self._inside = False
        self._open: list[Event] = []
        self._pairs: list[tuple[Event, Event]] = []
        self._ahead: deque[tuple[int, list[tuple[Event, Event]]]] = deque()
        module.register_forward_pre_hook(self._enter)
        timed = [each for each in module.modules() if any(True for _ in each.parameters(recurse=False))]
        for each in timed if gathers else [module]:
            each.register_forward_pre_hook(self._begin)
            each.register_forward_hook(self._end, prepend=True)  # before parameters are given back
        module.register_forward_hook(self._leave)

    @contextlib.contextmanager
    def measured(self, micros: Sequence[MicroBatch]) -> Iterator[None]:
        self._wanted, self._pairs = True, []
        try:
            yield
        finally:
            self._wanted = self._inside = False
        self._ahead.append((len(micros[0].sample_indices), self._pairs))

    def take(self) -> int:
        found = 0
        while self._ahead and all(end.query() for _, end in self._ahead[0][1]):
            rows, pairs = self._ahead.popleft()
            found = max(1, round(sum(begin.elapsed_time(end) for begin, end in pairs) * 1e6 / rows))
        return found

    def forget(self) -> None:
        self._ahead.clear()

    def _enter(self, *_: Any) -> None:
        self._inside, self._wanted = self._wanted, False

    def _leave(self, *_: Any) -> None:
        self._inside = False

    def _begin(self, *_: Any) -> None:
        if self._inside:
            self._open.append(self._marked())

    def _end(self, *_: Any) -> None:
        if self._inside:
            self._pairs.append((self._open.pop(), self._marked()))

    def _marked(self) -> Event:
        event = self._new_event()
        event.record()
        return event


def pace_of(module: nn.Module, device: torch.device, *, gathers: bool) -> Pace:
    """How this rank's speed is measured. `gathers`: as `DevicePace` has it."""
    return DevicePace(module, gathers=gathers) if device.type == "cuda" else HostPace()
