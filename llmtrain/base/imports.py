"""For the import of torch and DeepSpeed: environment variables about devices, and packages that they must not find."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from llmtrain.base.errors import ConfigError

_ACCELERATORS = (
    "/dev/nvidia*",
    "/dev/kfd",
    "/dev/dxg",
    "/dev/dri",
    "/dev/davinci*",
    "/dev/accel*",
    "/dev/hl*",
    "/dev/hpu*",
)
"""Device files of NVIDIA, AMD, Windows' Linux, Intel and others."""
_KNOWN = ("cpu", "cuda", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")  # by DeepSpeed 0.19.8


def name_cpu() -> None:
    """Name the CPU as DeepSpeed's accelerator on a host without accelerators, which DeepSpeed would guess with a
    warning. Raises ConfigError: the variable names none.

    With an empty CUDA_VISIBLE_DEVICES, DeepSpeed's launcher would show all GPUs to the ranks again.
    """
    if (given := os.environ.get("DS_ACCELERATOR", "cpu")) not in _KNOWN:
        raise ConfigError(f"DS_ACCELERATOR = {given}: DeepSpeed knows no such accelerator. Remove the variable, or set "
                          f"it to one of {', '.join(_KNOWN)}")  # fmt: skip
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(glob.glob(node) for node in _ACCELERATORS):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def let_segments_grow() -> None:
    """Let torch's allocator on NVIDIA GPUs extend its segments, unless the user has set its options.

    Training, evaluation and rows differ in length, and would leave gaps between fixed segments.
    """
    if glob.glob("/dev/nvidia[0-9]*") and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@contextmanager
def without(package: str) -> Iterator[None]:
    """Context in which Python does not find a package, unless it is already imported.

    DeepSpeed's autotuner imports mlflow wherever it is installed: one CPU second in each process.
    """
    if hidden := package not in sys.modules:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]
