"""Counts the collectives of torch.distributed in this rank's heartbeat; introduces the hosts' watches to each other.

DeepSpeed's communication ends in torch.distributed's functions, so wrapping these counts both. A stack alone would not
tell two ranks apart that wait in the same line at different rounds; the count does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.cluster.watch import watched
from llmtrain.cluster.watch.heartbeat import heart, named
from llmtrain.config.run import TrackingConfig
from llmtrain.dist.control import from_all
from llmtrain.dist.ranks import Ranks
from llmtrain.topology import Mix

_FUNCTIONS = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "_all_gather_base",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "scatter",
    "scatter_object_list",
    "send",
    "split_group",
)


def count_collectives() -> None:
    """Wrap them, once a process. Before DeepSpeed starts: it keeps some of them (comm/torch.py)."""
    if getattr(dist.all_reduce, "counted", False):
        return
    for name in _FUNCTIONS:
        plain = getattr(dist, name, None)
        if plain is not None:
            setattr(dist, name, _counted(name.removeprefix("_"), plain))
    work: Any = dist.Work
    work.wait = _counted("an asynchronous collective", work.wait)


def _counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    entry = named(name)
    enter, leave = heart.enter, heart.leave
    compiling = torch.compiler.is_compiling

    @functools.wraps(plain)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if compiling():  # torch.compile knows the plain function by name, and must see nothing else
            return plain(*args, **kwargs)
        enter(entry)
        try:
            return plain(*args, **kwargs)
        finally:
            leave()

    counted.counted = True  # type: ignore[attr-defined]
    return counted


def introduce(ranks: Ranks) -> None:
    """Tell every rank's watch of all the others. Every rank must call it."""
    agents = from_all(ranks, watched.agent_address())
    watched.met([{**asdict(seat), "agent": agent} for seat, agent in zip(ranks.seats, agents, strict=True)])


def describe(tracking: TrackingConfig, mix: Mix, run_id: str, experts: bool) -> None:
    """Tell the watch what a report of a fault needs to know of the run. `run_id`: W&B's."""
    watched.describe(
        run_id=run_id,
        tracking={"wandb": tracking.wandb, "project": tracking.project, "entity": tracking.entity},
        experts=experts,
        zero_stage=mix.zero_stage,
        alike=mix.degrees.pipeline == 1,
    )
