"""A paragraph on a rank whose memory has run out: what was alive, what was planned, and changes with their effect."""

from __future__ import annotations

import resource

import torch

from llmtrain.base.rank.device_faults import OUT_OF_MEMORY, device_fault
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.units import size
from llmtrain.config.run import Run
from llmtrain.engine.ranks.device import memory_of
from llmtrain.features.plan.planned import stored


def explain(error: Exception, run: Run, device: torch.device) -> str:
    """Return the paragraph; empty for an error of another kind."""
    if device_fault(f"{type(error).__name__}: {error}") is not OUT_OF_MEMORY:
        return ""
    on_gpu, total = device.type == "cuda", size(memory_of(device))
    planned = stored(run, on_gpu=on_gpu)
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(device)
        used, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        alive = f"{size(used)} of tensors, {size(reserved - used)} of unused blocks; {size(free)} of {total} are free"
        others = memory_of(device) - free - reserved
        alive += f", and {size(others)} belong to CUDA, NCCL and other processes"
        most = torch.cuda.max_memory_allocated(device)
    else:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        alive = f"{size(most)} of the process, of {total} for each rank of the host"
    lines = [f"memory ran out in the phase {heart.in_phase()!r}, with {alive}."]
    if planned is None:
        return f"{lines[0]} `llmtrain plan RUN.yaml --memory SIZE` rehearses the run, and changes that take less."
    if on_gpu and most > planned.of_rank_0:
        lines.append(f"The tensors were {size(most - planned.of_rank_0)} above the plan.")
    return " ".join([*lines, planned.told(heart.in_phase())])
