"""This process among the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.dist.rendezvous import Seat


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    control: Any
    """gloo group over all ranks for small host-side messages: reading its results never waits for the device."""
    seats: tuple[Seat, ...] = ()
    """Where each rank runs, in order of rank."""
    store: dist.Store | None = None
    """Keys and values that all ranks see, served by rank 0's process."""
