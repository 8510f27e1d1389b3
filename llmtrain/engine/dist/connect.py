"""The first process groups of a run, once its ranks have met; and how a rank leaves them."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.cluster.hosts.interfaces import GLOO, NCCL
from llmtrain.cluster.watch.explain.device import device_fault, with_reason
from llmtrain.cluster.watch.heartbeat import heart
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.engine.dist.rendezvous import Meeting, RendezvousError
from llmtrain.models.parallel.mesh import host_group


def connect_all(meeting: Meeting, backend: str, device: torch.device, limit_s: float) -> Any:
    """The process group of all ranks, and a gloo group of the same, which is returned. Raises RendezvousError."""
    limit, world_size = timedelta(seconds=limit_s), len(meeting.seats)
    rank = int(os.environ["RANK"])
    # As DeepSpeed would (comm/torch.py): a rank alone has no peer, and with a device every later group costs a split.
    bound = device if device.type == "cuda" and world_size > 1 else None
    heart.phase("connect")  # NCCL has no limit of its own here: the watch has one
    connecting = backend
    try:
        dist.init_process_group(
            backend, store=meeting.store, rank=rank, world_size=world_size, timeout=limit, device_id=bound
        )
        connecting = "gloo"
        return host_group(None, limit_s)
    except RuntimeError as error:  # gloo raises no class of its own
        raise _not_connected(f"rank {rank} on {meeting.seats[rank].host}", connecting, str(error)) from error


def another_group(ranks: Ranks, limit_s: float) -> Ranks:
    """The same ranks with a gloo group of their own, for another thread's collectives. All ranks call it together."""
    return replace(ranks, control=host_group(None, limit_s))


def _not_connected(who: str, backend: str, said: str) -> RendezvousError:
    """`said`: by `backend`, "nccl" or "gloo"."""
    name, variable = ("NCCL", NCCL) if backend == "nccl" else (backend, GLOO)
    head = f"{who} has met the others at {os.environ['MASTER_ADDR']}, but {name} cannot connect it to them"
    fault = device_fault(said)
    if fault is not None:
        found = RendezvousError(f"{head}: {fault.means} ({with_reason(said)}). {fault.remedy}")
        found.passing = fault.again
        return found
    return RendezvousError(
        f"{head} ({with_reason(said)}). Every host must reach every other one on all ports above 1024, over interface "
        f"{os.environ.get(variable, '(not set)')} ({variable})."
    )


def leave_all(error: BaseException | None) -> None:
    """Leave the process groups without waiting for ranks that may be gone. `error`: with which the run ends, or None.

    NCCL waits: for every collective that was handed over, and for its peers, who may wait for this rank. So a rank that
    fails alone leaves that to the end of its process.
    """
    alone = error is not None and not getattr(error, "everywhere", False)
    if dist.is_initialized() and not (alone and dist.get_backend() == "nccl"):
        # DeepSpeed keeps the groups that it has made, too: a second run in this process would meet the first one's.
        comm = sys.modules.get("deepspeed.comm")
        (comm if comm is not None and comm.is_initialized() else dist).destroy_process_group()
