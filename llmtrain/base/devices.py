"""Environment variables about devices, which torch and DeepSpeed read when they are imported."""

from __future__ import annotations

import glob
import os

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


def name_cpu() -> None:
    """Tell DeepSpeed that there is only the CPU, where no accelerator can be: it would guess that, with a warning.

    Its launcher would also show the ranks all GPUs again where an empty CUDA_VISIBLE_DEVICES hides them.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(glob.glob(node) for node in _ACCELERATORS):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def let_segments_grow() -> None:
    """Let torch's allocator on NVIDIA GPUs extend its segments instead of mapping new ones beside half-empty ones.

    Evaluation, training and rows of other lengths ask for other sizes, and what one leaves between two blocks is no
    use to the next. Read when torch is imported. A user's own choice stays.
    """
    if glob.glob("/dev/nvidia[0-9]*") and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
