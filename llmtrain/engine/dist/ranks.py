"""This process among the ranks of its site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Seat:
    rank: int
    host: str
    local_rank: int
    """Index among the ranks of its host."""
    device: str
    """The driver's name of the device."""
    pid: int


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the ranks of one engine (a site), numbered from 0.

    Collectives of a step, a save or a check stay within the site: each names a group, and numbers ranks within it.
    """

    rank: int
    world_size: int
    """Ranks of the site."""
    device: torch.device
    control: Any
    """gloo group over the site for small host-side messages: reading its results never waits for the device."""
    seats: tuple[Seat, ...] = ()
    """The process of each rank, in order of rank."""
    rehearsed: bool = False
    """The other ranks do not exist (engine/deepspeed/rehearsed.py): each is taken to say what this one says."""
    store: dist.Store | None = None
    """Keys and values that all ranks see, served by rank 0's process."""
