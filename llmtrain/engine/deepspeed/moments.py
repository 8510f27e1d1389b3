"""The moments that an optimizer keeps of a tensor; AdamW and Lion with moments in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Lion (Chen et al., arXiv 2302.06675): the sign of an interpolated momentum, one moment a parameter.


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, with lists of tensors: on a GPU four kernels a group."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        """`groups`: with `lr`, `betas` and `weight_decay` (decoupled) each."""
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
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


MOMENTUM = "momentum_buffer"
MOMENTS = "moments"
"""Key of a parameter group: the kinds of moments that the optimizer keeps of each of its tensors -> their dtype."""
_CHUNK = 1 << 24  # elements that have fp32 moments at once: 128 MiB with AdamW


def moments_of(optimizer: Any, flat: Tensor, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The moments of a tensor that `optimizer` steps, by kind, each as long as the tensor.

    What the optimizer would create at its first step is created now, with the step counter at 0.
    """
    state = optimizer.state[flat]
    kinds: dict[str, torch.dtype] = settings[MOMENTS]
    if MOMENTUM not in kinds and "step" not in state:
        on_host = hasattr(optimizer, "fp32_optimizer_states")  # DeepSpeed's own, which count in Python
        device = flat.device if optimizer.defaults.get("fused", True) else torch.device("cpu")
        state["step"] = 0 if on_host else torch.zeros((), dtype=torch.float32, device=device)
    for kind, dtype in kinds.items():
        if kind not in state:
            state[kind] = torch.zeros_like(flat, dtype=dtype, requires_grad=False)
    return {kind: state[kind] for kind in kinds}


class Bf16Moments(torch.optim.Optimizer):
    """An optimizer that works element by element, with moments in bf16 between its steps and in fp32 within one.

    So DeepSeek-V3 was trained (arXiv 2412.19437, 3.3.3), whose masters are fp32, too. DeepSpeed has bf16 moments
    beside bf16 masters only, which lose every update of less than 2^-9 of a weight.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        """`inner`: AdamW or Lion over groups that name their moments (`MOMENTS`); its own state is not used."""
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                kept = moments_of(self, parameter, group)
                for low in range(0, parameter.numel(), _CHUNK):
                    self._step(group, parameter, kept, slice(low, low + _CHUNK))
                self.state[parameter]["step"] += 1

    def _step(self, group: dict[str, Any], parameter: Tensor, kept: dict[str, Tensor], part: slice) -> None:
        """Step the elements `part` of a parameter."""
        assert parameter.grad is not None
        piece = parameter.detach().view(-1)[part]
        piece.grad = parameter.grad.view(-1)[part].to(piece.dtype)
        wide = {kind: moment.view(-1)[part].float() for kind, moment in kept.items()}
        self._inner.param_groups = [{**group, "params": [piece]}]
        self._inner.state = {piece: {"step": self.state[parameter]["step"].clone(), **wide}}  # type: ignore[assignment]
        self._inner.step()
        for kind, moment in kept.items():
            moment.view(-1)[part].copy_(wide[kind])
