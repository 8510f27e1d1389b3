"""What CUDA, NCCL and NVIDIA's driver say of faults, as they say it (torch 2.5 to 2.13, NCCL 2.21 to 2.28)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_HINT = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
_NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.27.7\n{}\nLast error:\n{}"
)
DUPLICATE_GPU = _NCCL.format(
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000",
)
UNHANDLED = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
CALL_FAILED = "ncclUnhandledCudaError: Call to CUDA function failed."
NCCL_OUT_OF_MEMORY = _NCCL.format(UNHANDLED, CALL_FAILED, "Failed to CUDA calloc async 4194304 bytes")
NCCL_NO_PEER = _NCCL.format(
    UNHANDLED, CALL_FAILED, "Cuda failure 217 'peer access is not supported between these two devices'"
)
NCCL_UNHANDLED = _NCCL.format(UNHANDLED, CALL_FAILED, "Cuda failure 999 'unknown error'")
NCCL_REMOTE = _NCCL.format(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "socketPollConnect: connect to 10.0.0.3<41234> returned Connection refused, exceeded error retry count",
)
NCCL_SHM = _NCCL.format(
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "Error while creating shared memory segment /dev/shm/nccl-Xb1aQx (size 9637888), error: No space left on device",
)
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB."
CUBLAS_ALLOC = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
CUBLAS_FAILED = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`"
ILLEGAL = f"CUDA error: an illegal memory access was encountered{_HINT}"
LAUNCH_FAILURE = f"CUDA error: unspecified launch failure{_HINT}"
ASSERT = f"CUDA error: device-side assert triggered{_HINT}"
ECC = f"CUDA error: uncorrectable ECC error encountered{_HINT}"
NO_IMAGE = f"CUDA error: no kernel image is available for execution on the device{_HINT}"
UNAVAILABLE = f"CUDA error: CUDA-capable device(s) is/are busy or unavailable{_HINT}"
NOT_READY = f"CUDA error: system not yet initialized{_HINT}"
NVLINK = f"CUDA error: uncorrectable NVLink error detected during the execution{_HINT}"
LOST = "No CUDA GPUs are available; CUDA error: no CUDA-capable device is detected"
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)

_TIMED_OUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, OpType=ALLREDUCE, NumelIn=29360128, "
    "NumelOut=29360128, Timeout(ms)=600000) ran for 600009 milliseconds before timing out."
)
_ENDED = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
_FRAMES = (
    "Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:760 (most recent "
    "call first):\nframe #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7fc805b6afad in libc10.so)\n"
)
WATCHDOG_TIMED_OUT = f"""/venv/torch/utils/checkpoint.py:86: UserWarning: None of the inputs have requires_grad=True.
[rank1]:[E606 09:10:08.362102117 ProcessGroupNCCL.cpp:682] {_TIMED_OUT}
[rank1]:[E606 09:10:08.363090292 ProcessGroupNCCL.cpp:2197] {_ENDED}{_TIMED_OUT}
{_FRAMES}
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {_ENDED}{_TIMED_OUT}
{_FRAMES}
"""


def watchdog_ended(error: str) -> str:
    """Standard error of a rank whose watchdog has met an error of CUDA."""
    return (
        f"UserWarning: CUDA out of memory is near; the NVIDIA driver on your system is too old\n"
        f"[rank1]:[E409 05:10:01.930967482 ProcessGroupNCCL.cpp:1595] {_ENDED}{error}\n{_FRAMES}\n"
        f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {_ENDED}{error}\n{_FRAMES}"
    )


def xid(number: int, rest: str = "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.") -> str:
    """A line of the kernel log."""
    return f"[2093411.114] NVRM: Xid (PCI:0000:18:00): {number}, {rest}"


def report(**changed: str) -> str:
    """nvidia-smi -q of two GPUs, of which `changed` (lines by their beginning) differs on the second."""
    text = Path(__file__).parents[1].joinpath("data/nvidia_smi.txt").read_text()
    head, mark, rest = text.partition("GPU {bus}")
    first, second = ((mark + rest).format(bus=f"00000000:{bus}:00.0") for bus in ("18", "2A"))
    return head + first + _changed(second, changed)


def _changed(text: str, changed: dict[str, str]) -> str:
    lines = text.splitlines()
    for key, value in changed.items():
        at = next(n for n, line in enumerate(lines) if line.strip().replace(" ", "_").startswith(key))
        lines[at] = f"{lines[at].partition(' : ')[0]} : {value}"
    return "\n".join(lines) + "\n"


def trace(begun: int, done: int, ranks: int = 3) -> dict[str, Any]:
    """As torch's `_dump_nccl_trace_json` has it: collectives up to `begun`, of which the device has ended `done`."""

    def entry(number: int, state: str, p2p: bool = False) -> dict[str, Any]:
        return {
            "record_id": number,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": "nccl:send 0->1" if p2p else "nccl:all_reduce",
            "time_created_ns": 1763719200000000000,
            "input_sizes": [[29360128]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[29360128]],
            "output_dtypes": ["BFloat16"],
            "state": state,
            "timeout_ms": 600000,
            "time_discovered_started_ns": 0,
            "time_discovered_completed_ns": 0,
            "retired": state == "completed",
            "is_p2p": p2p,
            "thread_id": "140",
            "thread_name": "pt_main_thread",
        }

    numbers = range(max(1, begun - 3), begun + 1)
    entries = [entry(number, "completed" if number <= done else "scheduled") for number in numbers]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    return {
        "version": "2.10",
        "pg_config": config,
        "pg_status": {},
        "entries": [*entries, entry(900, "scheduled", True)],
    }
