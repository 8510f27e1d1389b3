"""ZeRO 3's shares of the weights in files on a disk of the host, in place of DeepSpeed's swapper of parameters.

The files are mapped into memory, and the kernel keeps as much of them in memory as fits. DeepSpeed and llmtrain see
tensors in host memory, so whatever reads or writes weights works as with `offload_param.device: cpu`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from llmtrain.engine.deepspeed.patches import Private
from llmtrain.features.nvme.store import SwapError, open_unnamed

PRIVATE = (
    Private("deepspeed.runtime.zero.partition_parameters", ("get_accelerator",), "a new share of weights is a file"),
    Private(
        "deepspeed.runtime.zero.stage3",
        ("_create_param_groups_fp16_flat_cpu_memory", "param_groups_fp16_flat_cpu_memory", "trainable_param_groups"),
        "the shares of trained weights are one file for each group",
    ),
)


@contextlib.contextmanager
def in_files(folder: Path, key: str) -> Iterator[None]:
    """A context in which DeepSpeed puts shares of weights into files of `folder` instead of page-locked memory.

    `key`: key of the folder in the DeepSpeed JSON.
    """

    class Accelerator:
        """DeepSpeed's accelerator, but when it is asked to page-lock a new share it returns a mapped file."""

        def __getattr__(self, name: str) -> Any:
            return getattr(get_accelerator(), name)

        def pin_memory(self, share: Tensor) -> Tensor:
            return mapped(folder, key, share.numel(), share.dtype)

    def make_groups(self: Any) -> None:
        for group in self.trainable_param_groups:
            numel = sum(parameter.partition_numel() for parameter in group["params"])
            self.param_groups_fp16_flat_cpu_memory.append(mapped(folder, key, numel, self.dtype))

    stage3 = DeepSpeedZeroOptimizer_Stage3
    make_in_memory = stage3._create_param_groups_fp16_flat_cpu_memory
    stage3._create_param_groups_fp16_flat_cpu_memory = make_groups
    partition_parameters.get_accelerator = Accelerator
    try:
        yield
    finally:
        partition_parameters.get_accelerator = get_accelerator
        stage3._create_param_groups_fp16_flat_cpu_memory = make_in_memory


def mapped(folder: Path, key: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Make a tensor whose memory is a file without a name. Raises SwapError.

    The file's space is reserved, so that a disk that fills up later does no harm.
    """
    numel = max(1, numel)
    handle = open_unnamed(folder)
    try:
        os.posix_fallocate(handle, 0, numel * dtype.itemsize)
        return torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=numel, dtype=dtype)
    except OSError as error:
        reason = f"{numel * dtype.itemsize} bytes for weights cannot be had: {error.strerror}"
        raise SwapError(f"{key} = {str(folder)!r}: {reason}") from None
    finally:
        os.close(handle)
