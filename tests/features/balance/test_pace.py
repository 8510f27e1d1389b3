"""How a rank's own computing is measured: without collectives on the processor, by events on a device."""

from __future__ import annotations

import torch
from torch import nn

from llmtrain.data.batches import MicroBatch
from llmtrain.features.balance.part import DevicePace, HostPace


def micro(rows: int) -> MicroBatch:
    empty = torch.zeros(rows, 1, dtype=torch.int64)
    return MicroBatch(inputs=empty, labels=empty, sequences=list(range(rows)))


def test_waiting_in_collectives_is_not_computing() -> None:
    now, waited = [100.0], [7.0]
    pace = HostPace(lambda: waited[0], lambda: now[0])
    assert pace.take() == 0
    with pace.measured([micro(3), micro(2)]):
        now[0] += 2.0
        waited[0] += 1.5
    assert pace.take() == 100_000_000 and pace.take() == 0  # 0.5 s of five sequences; each step is told once
    with pace.measured([micro(1)]):
        now[0] += 1.0
    pace.forget()
    assert pace.take() == 0


class Queue:
    """A device that is done with what was put into its queue when `done` says so; its clock is `now_ms`."""

    def __init__(self) -> None:
        self.now_ms, self.done = 0.0, True

    def event(self) -> Mark:
        return Mark(self)


class Mark:
    def __init__(self, queue: Queue) -> None:
        self._queue, self.at_ms = queue, -1.0

    def record(self) -> None:
        self.at_ms = self._queue.now_ms

    def query(self) -> bool:
        return self._queue.done

    def elapsed_time(self, end: Mark) -> float:
        return end.at_ms - self.at_ms


class Takes(nn.Module):
    """A layer with a parameter that comes in `wait_ms`, when its hooks ask for it, and computes for `own_ms`."""

    def __init__(self, queue: Queue, wait_ms: float, own_ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._queue, self._wait_ms, self._own_ms = queue, wait_ms, own_ms
        self.register_forward_pre_hook(self._gather)
        self.register_forward_hook(self._give_back)

    def _gather(self, *_: object) -> None:
        self._queue.now_ms += self._wait_ms

    def _give_back(self, *_: object) -> None:
        self._queue.now_ms += 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._queue.now_ms += self._own_ms
        return x


def trained(pace: DevicePace, model: nn.Module) -> None:
    with pace.measured([micro(4), micro(3)]):
        for _ in range(2):
            model(torch.zeros(1))
            model[0](torch.zeros(1))  # as in the backward pass, where activations are recomputed


def test_events_stand_around_the_first_forward_pass() -> None:
    queue = Queue()
    model = nn.Sequential(Takes(queue, 0, 5), nn.Identity(), Takes(queue, 0, 7))
    pace = DevicePace(model, gathers=False, new_event=queue.event)
    model(torch.zeros(1))  # an evaluation
    trained(pace, model)
    queue.done = False
    assert pace.take() == 0  # the device has not come so far: nobody waits for it
    queue.done = True
    assert pace.take() == round((5 + 7 + 2000) * 1e6 / 4) and pace.take() == 0
    trained(pace, model)
    pace.forget()
    assert pace.take() == 0


def test_under_zero_3_waiting_for_parameters_is_not_computing() -> None:
    queue = Queue()
    model = nn.Sequential(Takes(queue, 100, 5), nn.Identity(), Takes(queue, 200, 7))
    pace = DevicePace(model, gathers=True, new_event=queue.event)
    trained(pace, model)
    assert pace.take() == 3_000_000  # 12 ms of four sequences
