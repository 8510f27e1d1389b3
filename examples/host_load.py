"""A part: load of each host's processor, memory, network and GPUs, as figures of the log (`parts: {hosts: {}}`)."""

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

from llmtrain import Part


@dataclass(kw_only=True)
class HostLoad(Part, entry="hosts"):
    """W&B's own monitor sees rank 0's host alone."""

    def open(self, launch):
        self.ranks = launch.setup.ranks
        self.hosts = [seat.host for seat in self.ranks.seats]
        self.passed, self.at_s = self._bytes_passed(), time.monotonic()
        psutil.cpu_percent()  # the next call measures from here on

    def figures(self, done):
        found = {}
        for host, load in zip(self.hosts, self.ranks.gather(self._own()), strict=True):
            for name, value in load.items():
                key = f"{host}/{name}"
                found[key] = max(value, found.get(key, value))  # of GPUs the busiest, and the fullest
        return found

    def _own(self):
        """The first rank of a host speaks for it; each speaks for its GPU."""
        load = {}
        if (device := self.ranks.device).type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            load["gpu_memory_gib"] = (total - free) / 2**30
            with suppress(ImportError, RuntimeError, OSError):  # needs nvidia-ml-py
                load["gpu_percent"] = torch.cuda.utilization(device)
        if self.hosts.index(self.hosts[self.ranks.rank]) == self.ranks.rank:
            passed, now_s = self._bytes_passed(), time.monotonic()
            load["cpu_percent"] = psutil.cpu_percent()
            load["memory_gib"] = psutil.virtual_memory().used / 2**30
            load["network_mib_per_s"] = (passed - self.passed) / max(now_s - self.at_s, 1e-3) / 2**20
            self.passed, self.at_s = passed, now_s
        return load

    def _bytes_passed(self):
        counters = psutil.net_io_counters(pernic=True)
        return sum(each.bytes_sent + each.bytes_recv for name, each in counters.items() if name != "lo")
