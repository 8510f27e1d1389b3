"""What the watch learns of a real device: that its queue moves, and what NCCL's flight recorder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.base.rank.heartbeat import Heartbeat, read
from llmtrain.base.rank.stacks import excerpt
from llmtrain.engine import progress
from llmtrain.engine.progress import DeviceProgress
from tests.helpers.training import joined


def test_a_mark_is_reached_when_the_work_before_it_is_done(cuda: None, pools: Any, tmp_path: Path) -> None:
    before, after = pools(1).run(marks, tmp_path / "rank-00000.beat")[0]
    assert before == (True, 1, 0), "the device is still at work"
    assert after == (True, 1, 1)


def marks(page: Path) -> list[tuple[bool, int, int]]:
    """(on a device, given, done) while the device works, and afterwards."""
    device = joined().device
    heart = Heartbeat()
    heart.connect(page, rank=0, local_rank=0)
    marks = DeviceProgress(heart, torch.cuda.Event)
    matrix = torch.ones(8192, 8192, device=device)
    found = []
    for _ in range(20):  # 22 TFLOP in fp32: no device has done them before the host looks
        matrix = matrix @ matrix / 8192
    marks.mark()
    for wait in (False, True):
        if wait:
            torch.cuda.synchronize()
        marks.look()
        beat = read(page)
        assert beat is not None
        found.append((beat.on_device, beat.given, beat.done))
    return found


def test_the_flight_recorder_tells_of_a_collective(cuda: None, pools: Any) -> None:
    """A name of torch's own without a promise: should it go, this says so."""
    begun, pending, ranks = pools(1).run(recorded)[0]
    assert begun >= 1 and pending == 0 and ranks == (0,)


def recorded() -> tuple[int, int, tuple[int, ...]]:
    ranks = joined()
    dist.all_reduce(torch.ones(4, device=ranks.device))
    torch.cuda.synchronize()
    group = excerpt(progress.flight_recorder())[0]
    return group.begun, group.pending, group.ranks
