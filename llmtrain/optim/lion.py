"""Lion (Chen et al., arXiv 2302.06675): the sign of an interpolated momentum, one moment per parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of the paper on lists of tensors: five foreach operators for each group."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        """`groups`: parameter groups; each has `lr`, `betas` and `weight_decay` (decoupled)."""
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step(group, parameters)

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        slow, fast = group["betas"]
        gradients = [p.grad.to(p.dtype) for p in parameters if p.grad is not None]
        moments = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
            state["step"] += 1
            moments.append(state["exp_avg"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        signs = torch._foreach_sign(torch._foreach_lerp(moments, gradients, 1 - slow))
        torch._foreach_add_(parameters, signs, alpha=-group["lr"])
        torch._foreach_lerp_(moments, gradients, 1 - fast)
