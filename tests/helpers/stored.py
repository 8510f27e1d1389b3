"""Compares the figures of a run with those that a file of this repository has stored, on whatever processor this is.

`make test-processors` trains with the instructions of older processors, and holds what the stored files allow.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FP32, BF16 = 1e-5, 2.0**-8
"""Relative rounding of a few steps: of another order of sums; of half a unit in the last place of bf16."""
SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "TEST_THREADS")
"""The variables by which `make test-processors` changes the order of sums."""


def machine() -> str:
    """Return all that decides about the last bit: type of processor, instructions that torch takes, its version."""
    import torch

    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    cpu = {key.strip(): value.strip() for key, _, value in lines}
    kind = " ".join(cpu.get(key, "?") for key in ("vendor_id", "cpu family", "model"))
    matrices = ["AMX"] if "amx_bf16" in cpu.get("flags", "").split() else []  # a virtual machine may hide it
    changed = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return ", ".join([kind, torch.backends.cpu.get_cpu_capability(), *matrices, f"torch {torch.__version__}", *changed])


def magnitude(key: str, row: Mapping[str, Any]) -> float:
    """The size of the numbers that the figure `key` of this row is made of: its rounding is a share of that.

    A difference of two log-probabilities can be a thousandth of either; the rounding of an exponent grows with it.
    """
    value = abs(row[key])
    if key == "pairs/margin":
        return max(value, *(abs(row[f"pairs/{side}_log_prob"]) for side in ("chosen", "rejected")))
    if key.endswith("perplexity"):
        return value * max(1.0, math.log(value))
    return value


def differences(got: Mapping[str, Any], want: Mapping[str, Any], rounding: float) -> dict[str, tuple[Any, Any]]:
    """The stored numbers that `got` misses by more than `rounding` of their magnitude: key -> (got, want)."""
    numbers = {key: value for key, value in want.items() if isinstance(value, int | float)}
    return {
        key: (got.get(key), value)
        for key, value in numbers.items()
        if key not in got or not abs(got[key] - value) <= rounding * magnitude(key, want)
    }
