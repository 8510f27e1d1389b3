"""The load of each host of a run: processor, memory, network, GPUs, at the points where metrics are logged."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psutil
import torch

from llmtrain.base.units import GIB
from llmtrain.engine.dist.control import from_all
from llmtrain.training.parts import Done, Part

if TYPE_CHECKING:
    from llmtrain.engine.dist.ranks import Ranks

_MIB = 1 << 20


class HostLoad(Part):
    """Gathers the load of all hosts in a run on several: W&B's own monitor sees rank 0's host alone."""

    def __init__(self, ranks: Ranks) -> None:
        """`ranks`: on several hosts."""
        self._ranks, self._hosts = ranks, [seat.host for seat in ranks.seats]
        self._speaks = self._hosts.index(self._hosts[ranks.rank]) == ranks.rank
        """This rank is its host's first."""
        psutil.cpu_percent()  # from here on
        self._passed, self._at_s = _bytes_passed(), time.monotonic()

    def figures(self, done: Done) -> dict[str, Any]:
        everyone: list[dict[str, float]] = from_all(self._ranks, self._own())
        found: dict[str, Any] = {}
        for host, own in zip(self._hosts, everyone, strict=True):
            for name, value in own.items():
                key = f"hosts/{host}/{name}"
                found[key] = max(value, found.get(key, value))  # of GPUs the busiest, and the fullest
        return found

    def _own(self) -> dict[str, float]:
        own = _of_gpu(self._ranks.device)
        if not self._speaks:
            return own
        passed, now_s = _bytes_passed(), time.monotonic()
        speed = (passed - self._passed) / max(now_s - self._at_s, 1e-3) / _MIB
        self._passed, self._at_s = passed, now_s
        return {
            "cpu_percent": psutil.cpu_percent(),
            "memory_gib": round(psutil.virtual_memory().used / GIB, 3),
            "network_mib_per_s": round(speed, 3),
            **own,
        }


def _bytes_passed() -> int:
    counters = psutil.net_io_counters(pernic=True)
    return sum(each.bytes_sent + each.bytes_recv for name, each in counters.items() if name != "lo")


def _of_gpu(device: torch.device) -> dict[str, float]:
    """Memory and load of this rank's GPU; empty on a CPU. The load needs nvidia-ml-py."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    found = {"gpu_memory_gib": round((total - free) / GIB, 3)}
    try:
        found["gpu_percent"] = torch.cuda.utilization(device)
    except (ImportError, RuntimeError, OSError):
        return found
    return found
