"""Counts the collectives of torch.distributed in this rank's heartbeat.

DeepSpeed's communication ends in torch.distributed's functions, so wrapping these counts both. A stack alone would not
tell two ranks apart that wait in the same line at different rounds; the count does. torch is given, not imported: the
watch has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llmtrain.cluster.watch.heartbeat import heart, named

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


def count_collectives(torch: Any) -> None:
    """Wrap those of the module torch, once a process. Before DeepSpeed starts: it keeps some (comm/torch.py)."""
    dist = torch.distributed
    if getattr(dist.all_reduce, "counted", False):
        return
    compiling = torch.compiler.is_compiling
    for name in _FUNCTIONS:
        plain = getattr(dist, name, None)
        if plain is not None:
            setattr(dist, name, _counted(name.removeprefix("_"), plain, compiling))
    dist.Work.wait = _counted("an asynchronous collective", dist.Work.wait, compiling)


def _counted(name: str, plain: Callable[..., Any], compiling: Callable[[], bool]) -> Callable[..., Any]:
    entry = named(name)
    enter, leave = heart.enter, heart.leave

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
