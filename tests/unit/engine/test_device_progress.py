"""Progress of a device and of torch.compile, as the watch sees it; a fake event stands in for CUDA's."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from llmtrain.base.rank import folder, watch
from llmtrain.base.rank.heartbeat import Heartbeat, read
from llmtrain.base.rank.watched import Watched
from llmtrain.checkpoint import snapshot
from llmtrain.data.batches import MicroBatch
from llmtrain.engine import progress
from llmtrain.engine.deepspeed.engine import ZeroEngine
from llmtrain.engine.progress import DeviceProgress
from tests.helpers.gpu_texts import trace


class Event:
    """A place in the queue of a device that comes to it when the test says so."""

    reached: ClassVar[set[int]] = set()
    made = 0

    def __init__(self) -> None:
        self.number = Event.made
        Event.made += 1

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.number in Event.reached


@pytest.fixture
def device(tmp_path: Path) -> tuple[DeviceProgress, Path]:
    Event.made, Event.reached = 0, set()
    heart = Heartbeat()
    heart.connect(tmp_path / "rank-00000.beat", rank=0, local_rank=0)
    return DeviceProgress(heart, Event), tmp_path / "rank-00000.beat"


def test_the_heart_beats_when_the_device_has_come_to_a_mark(device: tuple[DeviceProgress, Path]) -> None:
    marks, page = device
    for _ in range(3):
        marks.mark()
    assert (read(page).on_device, read(page).given, read(page).done) == (True, 3, 0)
    before = read(page).beats
    marks.look()
    assert read(page).beats == before, "the device has done nothing, however often one asks"
    Event.reached = {0, 2}  # a queue: it has not been at 2 before 1
    marks.look()
    assert read(page).done == 1 and read(page).beats > before
    Event.reached = {0, 1, 2}
    marks.look()
    assert read(page).done == 3


class Engine:
    """What ours asks of DeepSpeed's, written down."""

    def __init__(self, done: list[str]) -> None:
        self.done = done
        self.module: Any = torch.nn.Linear(1, 1)
        self.module.balance = None
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.1)
        self.optimizer.param_groups[0]["peak_lr"] = 0.1
        self.optimizer.overflow, self.optimizer._global_grad_norm = False, 1.0  # type: ignore[attr-defined]
        self.seq_dp_world_size = 1

    def fp16_enabled(self) -> bool:
        return False

    def __call__(self, *_: Any) -> torch.Tensor:
        self.done.append("forward")
        return torch.zeros(1)

    def gradient_accumulation_steps(self) -> int:
        return 2

    def backward(self, _: Any) -> None:
        self.done.append("backward")

    def step(self) -> None:
        self.done.append("step")


def test_every_micro_batch_and_every_update_leaves_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(progress, "mark", lambda: done.append("mark"))
    monkeypatch.setattr(ZeroEngine, "_on_device", lambda self, micro: micro)
    theirs: Any = Engine(done)
    ours: Any = ZeroEngine.__new__(ZeroEngine)
    ours.deepspeed, ours.module, ours._attention, ours._must_look = theirs, theirs.module, contextlib.nullcontext, False
    ours._state = SimpleNamespace(base=theirs.optimizer)
    micro = MicroBatch(inputs=torch.zeros(1, 1), labels=torch.zeros(1, 1), sequences=[0])
    ours.forward_backward([micro] * 2, lambda: 1)
    ours.update(1.0)
    assert done == ["forward", "backward", "mark", "step", "forward", "backward", "mark", "step", "mark"]


def test_the_watch_gets_the_flight_recorder_when_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_watched", Watched(tmp_path))
    monkeypatch.setenv("RANK", "3")
    asked: list[int] = []

    def recorder() -> dict[str, Any]:
        asked.append(1)
        return trace(begun=121, done=119)

    watch.tend(recorder)
    assert not asked, "asking the driver may take long: only a job that ends is asked"
    (tmp_path / folder.RECORD_WANTED).touch()
    watch.tend(recorder)
    watch.tend(recorder)
    assert len(asked) == 1
    kept = json.loads((tmp_path / "rank-00003.record").read_text())["groups"]
    assert kept == [{"group": "0", "ranks": [0, 1, 2], "begun": 121, "pending": 120, "name": "all_reduce"}]


def test_compiling_is_a_phase_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pace is the processor's, in whichever thread it is; afterwards the rank is where it was."""
    heart = Heartbeat()
    monkeypatch.setattr(progress, "heart", heart)
    monkeypatch.setattr(progress, "_warned", False)
    import torch._dynamo
    from torch._dynamo.callback import callback_handler

    phases: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        phases.append(heart.in_phase())
        return graph.forward

    try:
        progress.tell_compilation()
        progress.tell_compilation()
        heart.phase("forward")
        double = torch.compile(lambda x: 2 * x, backend=backend)
        assert double(torch.ones(2)).tolist() == [2.0, 2.0] and heart.in_phase() == "forward"
        double(torch.ones(2))
    finally:
        callback_handler.start_callbacks.clear()
        callback_handler.end_callbacks.clear()
        torch._dynamo.reset()
    assert phases == ["compile"]


def test_the_thread_of_a_copy_uses_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0: every other rank would make a context there."""
    on: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: on.append((threading.current_thread().name, d)))
    copies = snapshot.Snapshot(torch.device("cpu"))
    copies._device = torch.device("cuda", 5)

    class Copied:
        def synchronize(self) -> None:
            on.append(("synchronize", None))

    done = threading.Event()
    thread = threading.Thread(target=copies._finish, args=([], Copied(), done.set), name="copy")
    thread.start()
    thread.join(10)
    assert on == [("copy", torch.device("cuda", 5)), ("synchronize", None)] and done.is_set() and copies.error is None
