"""The one plain reference of the tests: torch's AdamW, whole batches, one process, fp32, by the definition.

`llmtrain/parity/plain.py` judges users' runs; this class judges runs of the tests, and that file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Nats per counted token."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class PlainTraining:
    """Steps of a transformers model; matrices decay, vectors do not."""

    def __init__(
        self,
        model: Any,
        *,
        lr: float,
        rate: Callable[[int], float] = lambda step: 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        decay: float = 0.1,
        clip: float = 1.0,
        build: Callable[[list[dict[str, Any]], float], torch.optim.Optimizer] | None = None,
    ) -> None:
        """`rate`: factor on lr of a step, of which the first is 0. `build`: another optimizer, of groups and lr."""
        self.model, self._lr, self._rate, self._clip = model, lr, rate, clip
        self._trained = [p for p in model.parameters() if p.requires_grad]
        halves = ([p for p in self._trained if (p.dim() >= 2) == matrices] for matrices in (True, False))
        groups = [{"params": part, "weight_decay": each} for part, each in zip(halves, (decay, 0.0), strict=True)]
        self._optimizer = (
            build(groups, lr)
            if build
            else torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=False, foreach=False)
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, loss: Tensor, more: Tensor | float = 0.0) -> None:
        """An update by the gradient of a batch's loss. `more`: a term that is no part of the loss that is noted."""
        self._optimizer.zero_grad()
        (loss + more).backward()
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self._trained, self._clip)))
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * self._rate(len(self.losses))
        self._optimizer.step()
        self.losses.append(loss.item())

    def parameters(self) -> dict[str, Tensor]:
        """Copies, by name."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
