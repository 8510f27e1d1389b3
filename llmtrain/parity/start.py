"""Initial weights at which a fault shows."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from llmtrain.models.source import RandomSource
from llmtrain.models.spec import ModelSpec

_LOUDER = 6.0


def noise(seed: int, name: str, count: int) -> Tensor:
    """Normal random numbers of the run's seed and a parameter's name, on the host."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    return torch.randn(count, generator=torch.Generator().manual_seed(number))


class LoudSource(RandomSource):
    """The model's own initialisation, with matrices 6 times as large and vectors that are not all the same.

    So are tensors that do not train: a router's bias of all zeros would not show that it was lost.

    At a standard deviation of 0.02 and a width of 64, attention is next to uniform and a lost position offset changes
    the loss by less than rounding; norms that are all 1 and biases that are all 0 hide that they were swapped or
    left out. A factor of 6 gives matrices of that width a gain near 1, as large models have it.
    """

    def __init__(self, spec: ModelSpec, seed: int, device: torch.device) -> None:
        super().__init__(spec.skeleton, seed, device)
        self._noisy: dict[str, Tensor] = {}

    def _left_out(self, name: str, value: Tensor) -> None:
        """Any value will do: a run from a folder has the folder's, and what is compared is the training."""
        value.fill_(0.5)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._noisy:
            shape = self.shape(name)
            count = int(torch.Size(shape).numel())
            values = super().read(name, 0, count).float()
            if name in self.frozen and bool((values != values[:1]).any()):
                pass  # computed by the constructor: the model needs it as it is
            elif name not in self.frozen and len(shape) >= 2:
                values = values * _LOUDER
            else:
                values = values + 0.1 * noise(self._seed, name, count).to(values.device)
            self._noisy[name] = values
        return self._noisy[name][start:stop]
