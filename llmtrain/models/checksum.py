"""A checksum of a tensor that can be computed slice by slice, in any order, on any number of ranks.

Each element is hashed together with its position in the flat tensor, and the hashes are added modulo 2^64.
Sums of slices add up to the sum of the tensor, so two ranks that hold halves of a parameter and one rank
that holds all of it agree, and a slice in the wrong place, missing or there twice does not go unnoticed.
It guards against faults, not against an attacker.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements hashed at a time: the int64 temporaries stay at a few times 8 MiB
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as int64
_MIX = -4658895280553007687  # the first multiplier of splitmix64, as int64


def checksum(values: Tensor, start: int = 0) -> int:
    """Hash of `values` (any shape, fp32 once converted) as the elements [start, start + numel) of a flat tensor.

    Returns an integer in [0, 2^64). `(checksum(x[:k]) + checksum(x[k:], k)) % 2**64 == checksum(x)`.
    """
    flat = values.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for low in range(0, flat.numel(), _CHUNK):
        part = flat[low : low + _CHUNK].to(torch.float32).contiguous()
        bits = part.view(torch.int32).to(torch.int64)
        position = torch.arange(start + low, start + low + part.numel(), dtype=torch.int64, device=flat.device)
        mixed = (bits + position.mul_(_GOLDEN)).mul_(_MIX)
        mixed ^= mixed >> 29
        mixed.mul_(_GOLDEN)
        mixed ^= mixed >> 32
        total += mixed.sum()
    return int(total.item()) % 2**64


def as_int64(value: int) -> int:
    """The same 64 bits as a signed number, for tensors that are summed over ranks."""
    return value - 2**64 if value >= 2**63 else value
