"""The watch for your own training script under DeepSpeed's launcher; docs/watch.md shows one. It uses nothing else of
llmtrain. Without the launcher these calls do nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from llmtrain.base.errors import number_in
from llmtrain.base.rank import heartbeat
from llmtrain.base.rank import watch as rank_side
from llmtrain.base.rank.heartbeat import heart

during = heart.during
"""`with during("save")`: a phase between steps, one of heartbeat.PHASES such as save or evaluate."""


@contextlib.contextmanager
def watch(folder: str, *, stall_timeout_s: float = 300.0, start_timeout_s: float = 300.0) -> Iterator[None]:
    """Explain a job that fails or hangs, and end all its processes. Wrap all of a rank's work, from before the import
    of torch; an exception, or sys.exit with a code other than 0, is a failure. `folder`: faults are appended to its
    events.jsonl. `stall_timeout_s`: limit of the time without a step, phase or collective. `start_timeout_s`: limit of
    the time until all ranks have met."""
    with rank_side.outcome_reported():
        rank_side.begin(
            stall_timeout_s=stall_timeout_s,
            start_timeout_s=start_timeout_s,
            run_dir=folder,
            agent="llmtrain.features.watch.agent",
        )
        yield


def count_collectives(torch: Any) -> None:
    """Count each rank's collectives for reports; call it with the module torch before DeepSpeed starts."""
    heartbeat.count_collectives(torch)
    heart.phase("model")


def met(torch: Any) -> None:
    """Connect the agents of several hosts. Call it on every rank after deepspeed.initialize."""
    cuda = torch.cuda.is_available()
    rank, local_rank = torch.distributed.get_rank(), number_in("LOCAL_RANK", 0)
    about = {
        "rank": rank,
        "host": socket.gethostname(),
        "local_rank": local_rank,
        "device": f"cuda:{torch.cuda.current_device()}" if cuda else "cpu",
        "pid": os.getpid(),
        "agent": rank_side.agent_address(),
    }
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, about)
    rank_side.met(everyone)
    heart.phase("data")


@contextlib.contextmanager
def step(number: int) -> Iterator[None]:
    """Wrap an optimizer step, without the wait for its data. `number`: optimizer steps done after it."""
    heart.begin_step()
    heart.phase("forward")
    yield
    heart.end_step(number)
    heart.phase("data")
