"""Table of device faults: a text of CUDA, cuBLAS or NCCL -> its meaning and a remedy.

The text is an exception's message or a line of standard error: NCCL's watchdog ends a rank from a thread without
Python, and prints its reason nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class DeviceFault:
    name: str
    """Name of the cause."""
    pattern: str
    """Regular expression to search for in the text."""
    means: str
    """What has happened, to follow "that is"."""
    remedy: str
    unfit: bool = False
    """True if the host is at fault, so that a restart should leave it out."""
    again: bool = True
    """True if another start may succeed."""

    def matches(self, text: str) -> bool:
        return re.search(self.pattern, text) is not None


_LOOK = "Look at `nvidia-smi -q` and at `dmesg | grep -i xid` on the host; a reset or a reboot may be needed."
OUT_OF_MEMORY = DeviceFault(
    name="out_of_memory",
    pattern=r"out of memory|^\w*MemoryError|DefaultCPUAllocator|Cannot allocate memory|CU\w+_STATUS_ALLOC_FAILED|"
    r"Failed to CUDA (host )?[cm]alloc",
    means="memory ran out",
    remedy="`llmtrain plan RUN.yaml --memory SIZE` rehearses what takes less: a smaller train.micro_batch, recomputed "
    "layers, a higher ZeRO stage, offload.",
)
FAULTS = (
    DeviceFault(
        name="duplicate_gpu",
        pattern=r"Duplicate GPU detected",
        means="two ranks use one GPU",
        remedy="Give each host no more slots than it has GPUs, no host twice, and no CUDA_VISIBLE_DEVICES that hides "
        "some; NCCL cannot join several MIG instances of one GPU.",
        again=False,
    ),
    DeviceFault(
        name="gpu_memory",
        pattern=r"uncorrectable ECC error|cudaErrorECCUncorrectable",
        means="the GPU's memory has an error that cannot be corrected",
        remedy=_LOOK,
        unfit=True,
    ),
    DeviceFault(
        name="nvlink",
        pattern=r"uncorrectable NVLink error|cudaErrorNvlinkUncorrectable",
        means="a link between the GPUs has failed",
        remedy=_LOOK,
        unfit=True,
    ),
    DeviceFault(
        name="gpu_lost",
        pattern=r"GPU is lost|fallen off the bus|hardware stack error|no CUDA-capable device is detected|"
        r"CUDA error: unknown error|Unable to determine the device handle",
        means="the GPU does not answer its driver any more",
        remedy=_LOOK,
        unfit=True,
    ),
    DeviceFault(
        name="gpu_in_use",
        pattern=r"device\(s\) is/are busy or unavailable|cudaErrorDevicesUnavailable",
        means="the GPU is held by another process alone (compute mode), or is in a bad state",
        remedy="`nvidia-smi` shows who uses it; `nvidia-smi -c DEFAULT` lets several processes use it. " + _LOOK,
    ),
    DeviceFault(
        name="fabric_manager",
        pattern=r"system not yet initialized|cudaErrorSystemNotReady|system has unsupported display driver",
        means="the host's GPUs are not ready: its fabric manager does not run, or not in the driver's version",
        remedy="On the host: systemctl restart nvidia-fabricmanager; `llmtrain doctor` looks at the fabric's state.",
        unfit=True,
    ),
    DeviceFault(
        name="no_kernel_image",
        pattern=r"no kernel image is available|device kernel image is invalid|named symbol not found",
        means="this build of torch, or a compiled op, has no code for this kind of GPU",
        remedy="Install a torch that names the GPU in torch.cuda.get_arch_list(), and remove ops that were compiled "
        "elsewhere (~/.cache/torch_extensions).",
        again=False,
    ),
    DeviceFault(
        name="driver_too_old",
        pattern=r"driver version is insufficient|NVIDIA driver on your system is too old|"
        r"PTX was compiled with an unsupported toolchain",
        means="the driver is older than this build of torch wants",
        remedy="Install a newer driver on the host, or a torch for an older CUDA.",
        again=False,
    ),
    DeviceFault(
        name="no_peer_access",
        pattern=r"peer access is not supported|peer mapping resources exhausted",
        means="two GPUs of a host cannot reach each other's memory",
        remedy="`nvidia-smi topo -p2p r` shows which; NCCL_P2P_DISABLE=1 goes through host memory, and is slower.",
        again=False,
    ),
    DeviceFault(
        name="shared_memory",
        pattern=r"Error while creating shared memory segment|posix_fallocate failed|while attaching to shared memory",
        means="/dev/shm is too small for NCCL",
        remedy="mount -o remount,size=50% /dev/shm on the host (docker run --shm-size 16g); `llmtrain doctor` looks at "
        "it.",
        again=False,
    ),
    DeviceFault(
        name="device_assert",
        pattern=r"device-side assert triggered|cudaErrorAssert",
        means="a kernel got a value that it cannot take, mostly an index beyond its table: a token or label not below "
        "model.config's vocab_size, a position beyond its limit",
        remedy="The line above it, `Assertion ... failed`, shows which, and CUDA_LAUNCH_BLOCKING=1 makes the traceback "
        "true. A restart has the same data.",
        again=False,
    ),
    OUT_OF_MEMORY,
    DeviceFault(
        name="illegal_address",
        pattern=r"illegal memory access|misaligned address|illegal instruction was encountered|unspecified launch "
        r"failure|invalid program counter|invalid device pointer|cudaErrorIllegalAddress|cudaErrorLaunchFailure",
        means="a kernel read or wrote outside of its tensors: a bug in a kernel, or a broken GPU",
        remedy="With CUDA_LAUNCH_BLOCKING=1 the traceback names the kernel. If it is always one host, leave it out.",
    ),
    DeviceFault(
        name="gpu_error",
        pattern=r"CUDA error:|Cuda failure|unhandled cuda error|CU(BLAS|DNN|SPARSE|SOLVER)_STATUS_(?!SUCCESS)\w+",
        means="a call of the device's libraries failed",
        remedy=_LOOK,
    ),
)
"""The first match counts, so special patterns come before general ones."""


def device_fault(text: str) -> DeviceFault | None:
    return next((row for row in FAULTS if row.matches(text)), None)


def with_reason(message: str) -> str:
    """Return the first line of an exception's message, and for NCCL also the reason in the line after "Last error:"."""
    first, *more = message.strip().splitlines() or [""]
    return " ".join([first, *(line for before, line in pairwise([first, *more]) if before.startswith("Last error"))])


_SECONDARY = re.compile(
    r"Connection (closed|reset)|Broken pipe|Connection refused|remote peer|[Tt]imed? ?out|NCCL|remote process exited|"
    r"Application timeout|Socket Timeout|recvValue failed|failed to recv|EOFError|DistNetworkError|DistBackendError"
)
"""Errors of a rank whose peer has ended, which is then the cause."""


def is_echo(error: str) -> bool:
    """Return True if an exception only echoes another rank's end. A CUDA error within NCCL is this rank's own."""
    return bool(_SECONDARY.search(error)) and device_fault(error) is None
