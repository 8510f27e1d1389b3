"""What torch.cuda does for a program, where there is no GPU: streams and events with a clock, page locks, answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)


class Stream:
    """Work in order, on a clock of its own (ms)."""

    cuda_stream = 0
    device = DEVICE

    def __init__(self, *_: Any, **__: Any) -> None:
        self.now_ms = 0.0

    def wait_stream(self, other: Stream) -> None:
        self.now_ms = max(self.now_ms, other.now_ms)

    def wait_event(self, event: Event) -> None:
        self.now_ms = max(self.now_ms, event.at_ms)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    at_ms = 0.0

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        self.at_ms = 0.0 if stream is None else stream.now_ms

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        assert self.timed and other.timed
        return other.at_ms - self.at_ms


class PageLocks(TorchDispatchMode):
    """The CUDA runtime's registrations of host memory: a copy that leaves the one it begins in is an invalid argument,
    as cudaMemcpyAsync says, though the next one be its neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: dict[int, int] = {}
        """First byte -> bytes."""
        self.copies = 0
        self.refuses_all = False

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:
        return int(self.locked.setdefault(address, size) != size)

    def cudaHostUnregister(self, address: int) -> int:
        return int(self.locked.pop(address, None) is None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], torch._subclasses.FakeTensor):
            first = args[0].data_ptr()
            inside = [low for low, size in self.locked.items() if low <= first < low + size]
            if inside:
                self.copies += 1
                stop = first + args[0].numel() * args[0].itemsize
                if self.refuses_all or stop > inside[0] + self.locked[inside[0]]:
                    raise RuntimeError("CUDA error: invalid argument")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def streams() -> Iterator[tuple[Stream, list[Any]]]:
    """Yield the compute stream, and the devices that threads make current."""
    compute, current = Stream(), list[Any]()
    fakes = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: compute,
        "default_stream": lambda *_: compute,
        "stream": contextlib.nullcontext,
        "set_stream": lambda _: None,
        "set_device": current.append,
    }
    with patch.multiple(torch.cuda, **fakes):
        yield compute, current


@contextlib.contextmanager
def page_locks() -> Iterator[PageLocks]:
    """Let host memory be locked, and copies to it be held to the registrations in this thread."""
    with streams(), PageLocks() as locks, patch.object(torch.cuda, "cudart", lambda: locks):
        yield locks
