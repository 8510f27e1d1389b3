"""The machines that a run is planned for, and what makes a rehearsal on this machine choose as they would."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from llmtrain.base.choice import either
from llmtrain.config.load import COMMAND_LINE
from llmtrain.config.problems import stop
from llmtrain.config.run import RunConfig

MIB = 1024**2
DEVICES = {
    "a10g-24": 23_028,
    "rtx4090-24": 24_564,
    "v100-32": 32_768,
    "a100-40": 40_960,
    "l40s-48": 46_068,
    "h100-80": 81_559,
    "a100-80": 81_920,
    "h200-141": 143_771,
    "b200-180": 183_359,
}
"""MiB of memory, as nvidia-smi shows it."""


@dataclass(frozen=True)
class Held:
    """Memory of a device that no tensor holds."""

    what: str
    low: int
    high: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Machines:
    hosts: int
    slots: int
    """Ranks of each host."""
    device: str
    """Device as the user has named it."""
    on_gpu: bool
    memory: int | None
    """Bytes of a device; None: the user has named none."""
    begun: bool = False
    """True if `memory` is what a running process finds free, with CUDA's context and NCCL's buffers already there."""
    host_memory: int | None
    """Bytes of a host; None: the user has named none."""
    link: str | None = None
    """Network between hosts, as the user has named it."""
    price: float | None = None
    """A device's hour costs this."""
    disk: int | None = None
    """Bytes a second at which a checkpoint is written."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.slots

    def others(self, peak: int) -> list[Held]:
        """Return memory of a rank's device that is no tensor, estimated from the sources in the comments.

        The estimates for GPUs have not been measured. `peak`: bytes of tensors.
        """
        if not self.on_gpu:
            process = Held(
                "the process before the run", 160 * MIB, 300 * MIB, "Python, torch, DeepSpeed and transformers"
            )
            return [
                *([] if self.begun else [process]),
                # It keeps them between long-lived tensors (docs/developers/benchmarks.md).
                Held("gaps of the C library's heap", 4 * peak // 100, 35 * peak // 100, "4 to 35 % were measured"),
            ]
        nccl = Held("buffers of NCCL", 100 * MIB, 1000 * MIB, "4 MiB (NCCL_BUFFSIZE) a channel, peer and direction")
        context = Held("CUDA context and kernels", 300 * MIB, 700 * MIB, "nvidia-smi less torch's reserved bytes")
        if self.begun:
            context = Held("kernels that are loaded later", 0, 400 * MIB, "the rest of the context is there")
        return [
            context,
            # One of the forward pass, one of autograd's thread, one of cublasLt.
            Held("workspaces of cuBLAS", 16 * MIB, 130 * MIB, "CUBLAS_WORKSPACE_CONFIG: 8.1 MiB, on Hopper 32, each"),
            *([nccl] if self.ranks > 1 and not self.begun else []),
            # Blocks of 2 MiB, and gaps.
            Held("the allocator's unused blocks", peak // 100, 6 * peak // 100, "1 to 6 % with expandable segments"),
        ]

    def room(self, peak: int, memory: int) -> tuple[int, int]:
        """Return the least and the most bytes of a device's memory that are left; negative if they are missing."""
        left, others = memory - peak, self.others(peak)
        return left - sum(other.high for other in others), left - sum(other.low for other in others)


def memory_of(device: str | None, memory: str | None) -> int | None:
    """Return the bytes of a device, given by its name or size. Raises ConfigError: an unknown device, or no size."""
    if memory is not None:
        return parse_size("--memory", memory)
    if device in (None, "cpu"):
        return None
    if device not in DEVICES:
        remedy = f"write {either(['cpu', *DEVICES])}, or give --memory 80GiB"
        raise stop("--device", device, "is not in the table of devices", remedy, COMMAND_LINE)
    return DEVICES[device] * MIB


def parse_size(key: str, text: str) -> int:
    """Parse a size such as 80GiB or 1.5TB into bytes. Raises ConfigError."""
    units = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(i?)b?", text.lower())
    if match is None or float(match[1]) == 0:
        raise stop(key, text, "is not a size", f"write {key} 80GiB", COMMAND_LINE)
    if not match[2] and float(match[1]) < 1 << 20:
        raise stop(key, text, "is a number of bytes without a unit", f"write {key} {match[1]}GiB", COMMAND_LINE)
    power = units[match[2]] if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def on_gpu(config: RunConfig) -> RunConfig:
    """Return the run with the kernels that it would choose on a GPU, replaced by ones that a CPU has.

    Flash attention and varlen keep the same tensors as torch's own kernel without a mask. fp8 keeps less than is
    counted, which is what the run's precision keeps.
    """
    model, data = replace(config.model, fp8=None), config.data
    if model.attention.startswith("flash") or (data.isolate_documents and model.attention in ("auto", "varlen")):
        model, data = replace(model, attention="sdpa"), replace(data, isolate_documents=False)
    return replace(config, model=model, data=data)
