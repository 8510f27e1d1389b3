"""The process group, with the backend of DeepSpeed's accelerator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from llmtrain.base.rank import watch
from llmtrain.config.topology import cores_of_a_rank
from llmtrain.engine import progress
from llmtrain.engine.deepspeed.patches import apply_group_timeout
from llmtrain.engine.process_memory import keep_freed_memory
from llmtrain.engine.ranks.device import own_device
from llmtrain.engine.ranks.ranks import ConnectedRanks
from llmtrain.engine.ranks.rendezvous import connect_all, meet


def join_process_group(
    timeout_s: float, *, start_timeout_s: float = 300.0, settings: Mapping[str, Any] | None = None
) -> ConnectedRanks:
    """Start torch.distributed for the launcher's RANK, WORLD_SIZE, LOCAL_RANK; alone (one rank) without a launcher.
    `timeout_s`: of a collective. `settings`: must be equal on all ranks. Raises RendezvousError: ranks are missing or
    differ. Raises ConfigError: no device, or no such network interface."""
    for key, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    accelerator = get_accelerator()
    device = own_device()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_of_a_rank())
    if device.type == "cpu":
        # DeepSpeed's shared-memory all-reduce leaves 69 MB a rank in /dev/shm for ever; gloo carries it instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        keep_freed_memory()
    progress.begin(device, watch.tend)
    backend = accelerator.communication_backend_name()
    meeting = meet(device=device, backend=backend, settings=settings or {}, limit_s=start_timeout_s)
    # NCCL makes a group's connections at its first use, and asks the store for them: a slow rank counts as elsewhere.
    meeting.store.set_timeout(timedelta(seconds=max(timeout_s, start_timeout_s)))
    control = connect_all(meeting, backend, device, start_timeout_s)
    apply_group_timeout(timeout_s)
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)
    return ConnectedRanks(
        rank=dist.get_rank(control),
        world_size=dist.get_world_size(control),
        device=device,
        control=control,
        seats=meeting.seats,
        store=meeting.store,
    )
