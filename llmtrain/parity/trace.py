"""What a small training left behind, whoever ran it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class Trace:
    """Losses and gradient norms of each step, and all parameters after each."""

    losses: list[float] = field(default_factory=list)
    """Mean loss over the counted tokens of the global batch, in nats, before the step's update."""
    norms: list[float] = field(default_factory=list)
    """Global gradient norm before clipping. Empty in a reference whose run reports another (Muon)."""
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    """fp32 values by Hugging Face name: at the start, after step 1, after step 2, ..."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """AdamW's and Lion's first moment after step 1: (1 - beta) x the clipped gradient. Muon's matrices have none."""
    by_sign: bool = False
    """The optimizer steps by a sign: two orders of summation part by a whole step where a gradient is all rounding."""
    skipped: list[int] = field(default_factory=list)
    """Steps whose update the engine left out."""

    def until(self, step: int) -> Trace:
        """Its first steps."""
        return replace(self, losses=self.losses[:step], norms=self.norms[:step], parameters=self.parameters[: step + 1])

    def save(self, path: str) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: str) -> Trace:
        return cls(**torch.load(path, weights_only=True))
