"""Devices with fp16 and without, whatever this one is: some processors have it (AVX512-FP16), and every GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


def set_fp16(there: bool, _rank: int = 0) -> None:
    """From here on DeepSpeed takes this process's device for one that has fp16, or has not. `_rank`: of forked.py."""
    from deepspeed.accelerator import get_accelerator

    dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if there else [])]
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: there
    accelerator.supported_dtypes = lambda: dtypes


@contextlib.contextmanager
def fp16(there: bool) -> Iterator[None]:
    """The same for a while; as a decorator, for a function."""
    from deepspeed.accelerator import get_accelerator

    set_fp16(there)
    try:
        yield
    finally:
        del get_accelerator().is_fp16_supported, get_accelerator().supported_dtypes


def on_device(there: bool, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) on a device with fp16, or without; for the ranks of a pool."""
    with fp16(there):
        return function(*args)
