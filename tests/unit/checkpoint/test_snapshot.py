"""The copy of a GPU's state, with CUDA's streams and events simulated: what waits, and who is told of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.checkpoint import save, snapshot
from llmtrain.checkpoint.save import HostCopy
from llmtrain.checkpoint.snapshot import RankFile, Snapshot, lock_pages
from llmtrain.engine.api import StateTensor
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.region import whole
from tests.helpers import fake_cuda


def piece(view: Any, device: torch.device, count: int = 4) -> StateTensor:
    """A parameter that this rank holds whole."""
    return StateTensor(
        name="weight",
        kind=PARAM,
        region=whole((count,)),
        own=slice(0, count),
        replica=(0, 1),
        dtype=torch.float32,
        device=device,
        open=lambda: contextlib.nullcontext(view),
    )


@pytest.mark.parametrize(("copy_ms", "backward_ms", "waits_s"), [(300.0, 150.0, 0.15), (100.0, 150.0, 0.0)])
def test_the_gpus_own_wait_for_the_copy_is_told(copy_ms: float, backward_ms: float, waits_s: float) -> None:
    device = torch.device("cuda", 1)
    with fake_cuda.streams() as (compute, current):
        copy = Snapshot(device)

        class SlowPlace:
            def __len__(self) -> int:
                return 4

            def copy_(self, *_: Any, **__: Any) -> None:
                copy._stream.now_ms += copy_ms

        done = threading.Event()
        copy.start([piece(torch.zeros(4), device)], [[SlowPlace()]], then=done.set)  # type: ignore[list-item]
        assert done.wait(5)
        compute.now_ms += backward_ms
        copy.wait_before_update()
        assert copy.device_wait_s() == pytest.approx(waits_s)
    assert current == [device], "the thread of the copy has GPU 0, where a context takes memory"


def test_values_that_are_computed_when_they_are_opened_are_there_when_they_are_copied() -> None:
    """Packed parameters: their values come on the stream that computes, and must not be freed while they are read."""
    device, copied_at_ms, read_by = torch.device("cuda", 1), [], []
    with fake_cuda.streams() as (compute, _):
        copy = Snapshot(device)
        values = torch.zeros(4)
        values.record_stream = read_by.append  # type: ignore[method-assign]

        @contextlib.contextmanager
        def unpacked() -> Iterator[torch.Tensor]:
            compute.now_ms += 7.0
            yield values

        class Place:
            def __len__(self) -> int:
                return 4

            def copy_(self, *_: Any, **__: Any) -> None:
                copied_at_ms.append(copy._stream.now_ms)

        packed = replace(piece(values, device), open=unpacked, write=unpacked)
        done = threading.Event()
        copy.start([packed], [[Place()]], then=done.set)  # type: ignore[list-item]
        assert done.wait(5) and copied_at_ms == [7.0] and read_by == [copy._stream]


def test_memory_is_locked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a GiB at a time: 15 GB at once would hold up the thread that trains."""
    runtime = fake_cuda.PageLocks()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    assert lock_pages(4096, 2**29 + 4096)
    assert runtime.locked == {4096: 2**28, 4096 + 2**28: 2**28, 4096 + 2**29: 4096}
    snapshot.unlock_pages(4096, 2**29 + 4096)
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, asked, locked = [], [], []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, *_: len(locked) == 2 or locked.append(address) or 0,
        cudaHostUnregister=locked.remove,
    )
    library = SimpleNamespace(cudaGetLastError=lambda: asked.append(1))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(snapshot.ctypes, "CDLL", lambda name: loaded.append(name) or library)
    assert not lock_pages(4096, 2**30)
    assert locked == [], "two pieces were locked before the one that CUDA refused"
    assert loaded == ["libcudart.so.13"] and asked == [1]


class SlowImage:
    got = threading.Event()

    def __init__(self, plan: Any, *, cuda: bool) -> None:
        assert self.got.wait(20), "training waited for it"
        if plan.bytes > 1000:
            raise OSError("no space")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("wanted", [1000, 2000])
def test_training_begins_while_the_memory_is_got(monkeypatch: pytest.MonkeyPatch, wanted: int) -> None:
    monkeypatch.setattr(save, "HostImage", SlowImage)
    monkeypatch.setattr(save, "WriterProcess", lambda *_: SimpleNamespace(close=lambda: None))
    SlowImage.got.clear()
    copy = HostCopy(SimpleNamespace(bytes=wanted), {}, torch.device("cpu"))  # type: ignore[arg-type]
    SlowImage.got.set()
    problem = copy.problem()
    assert problem is None if wanted == 1000 else "no space" in str(problem)
    copy.close()


def test_the_writer_outlives_the_start_that_a_thread_gave_it(tmp_path: Path) -> None:
    """It dies with its parent, which for the kernel is the thread that started it. The table is more than a socket
    holds, so that the thread is still there when the writer asks the kernel for that."""
    values = torch.zeros(4)
    plan = RankFile([piece(values, values.device)])
    copy = HostCopy(plan, {"own": [], "tensors": {"weight" * (1 << 20): [4]}}, torch.device("cpu"))
    try:
        assert copy.problem() is None
        time.sleep(0.5)
        copy.writer().send({"do": "discard", "folder": str(tmp_path / "none")})
        until_s = time.monotonic() + 30
        while (answer := copy.answer()) is None and time.monotonic() < until_s:
            time.sleep(0.01)
        assert answer == {}
    finally:
        copy.close()


class DeviceView:
    """Memory of a GPU that keeps count of how it is written."""

    def __init__(self, count: int, copies: list[tuple[int, bool, bool]]) -> None:
        self._count, self._copies = count, copies

    def numel(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> DeviceView:
        return DeviceView(len(range(*part.indices(self._count))), self._copies)

    def copy_(self, values: Any, non_blocking: bool = False) -> None:
        self._copies.append((len(values), getattr(values, "locked", False), non_blocking))


def test_weights_reach_a_gpu_through_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmtrain.engine.weights import fill

    def lock(values: torch.Tensor) -> torch.Tensor:
        values.locked = True  # type: ignore[attr-defined]
        return values

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    copies: list[tuple[int, bool, bool]] = []
    count = (1 << 22) + 5
    there = piece(DeviceView(count, copies), torch.device("cuda", 0), count)
    fill(there, lambda region: torch.zeros(region.numel))
    assert copies == [(1 << 22, True, True), (5, True, True)]
