"""What a host tells of a job that is to be explained: its ranks with their stacks, its GPUs, its kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmtrain.cluster.gpus import MEMORY_REPORT, Command, KernelLog, memory_fault, read_report
from llmtrain.cluster.watch.explain.facts import HostFacts
from llmtrain.cluster.watch.observe import HostRanks

_LATELY_S = 600.0
"""A fault of a GPU that the kernel log told so long before the ranks stopped belongs to it."""
_WITHIN_S = 2.5


def captured(ranks: HostRanks, stall_s: float, *, ends: bool) -> dict[str, Any]:
    """`stacks` of the ranks; of a job on GPUs that `ends` also `xids` and `gpu_health`, as HostFacts has them.

    Takes up to 3 s. A job that only pauses is asked for no more than stacks: what asks the driver may hold a rank up.
    """
    if not ends or not ranks.on_device():
        return {"stacks": ranks.capture()}
    kernel, memory = KernelLog(_LATELY_S + stall_s, _WITHIN_S), Command(MEMORY_REPORT, _WITHIN_S)
    stacks = ranks.capture(record=True)
    faults = {bus: memory_fault(gpu) for bus, gpu in read_report(memory.answer()).items()}
    health = "; ".join(f"GPU {bus}: {what}" for bus, what in faults.items() if what)
    return {"stacks": stacks, "xids": kernel.xid_lines(), "gpu_health": health[:500]}


def with_gpus(host: HostFacts, answer: dict[str, Any]) -> HostFacts:
    """`answer`: of `captured`, perhaps on another host."""
    xids = tuple(str(line) for line in answer.get("xids", ()))
    return replace(host, xids=xids, gpu_health=str(answer.get("gpu_health", "")))
