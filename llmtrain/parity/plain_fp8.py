"""Linear maps in fp8 in plain PyTorch, from their definition."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.parity.plain_adapter import LowRank

_E4M3, _E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
"""Formats of 8 bits, each with its largest number."""


def in_eight_bits(values: Tensor, recipe: str, dim: int, *, gradient: bool = False) -> Tensor:
    """Round `values` [., .] to fp8; return them in fp32.

    A scale maps the largest value to the format's largest. tensorwise: one scale, gradients in e5m2. rowwise: a scale,
    rounded down to a power of two, for each row along `dim`, the summed side of a product; all in e4m3.
    """
    dtype, largest = _E5M2 if gradient and recipe == "tensorwise" else _E4M3
    size = values.abs().max() if recipe == "tensorwise" else values.abs().amax(dim, keepdim=True)
    scale = (largest / size.double().clamp_min(1e-12)).float()
    if recipe == "rowwise":
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (values.float() * scale).clamp(-largest, largest).to(dtype).float() / scale


class _Product(torch.autograd.Function):
    """x W^T for x [N, inputs], W [outputs, inputs]; all three products round both factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str, halves: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.halves = recipe, halves
        return _times(in_eight_bits(x, recipe, 1), in_eight_bits(weight, recipe, 1).t(), halves).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        recipe, halves = ctx.recipe, ctx.halves
        of_x = _times(in_eight_bits(grad, recipe, 1, gradient=True), in_eight_bits(weight, recipe, 0), halves)
        of_weight = _times(in_eight_bits(grad, recipe, 0, gradient=True).t(), in_eight_bits(x, recipe, 0), halves)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None, None


def _times(a: Tensor, b: Tensor, halves: bool) -> Tensor:
    """`halves`: a sum of two products, which is mathematically equal."""
    half = a.shape[1] // 2
    return a[:, :half] @ b[:half] + a[:, half:] @ b[half:] if halves else a @ b


def compute_in_fp8(model: nn.Module, recipe: str | None, *, halves: bool) -> None:
    """Let the maps of a transformers model's decoder layers compute in fp8, except routers, experts and sides that 16
    does not divide. `halves`: another order of summation."""
    if recipe is None:
        return

    def forward(self: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        product: Tensor = _Product.apply(flat, self.weight, recipe, halves)
        product = product.view(*x.shape[:-1], -1)
        return product if self.bias is None else product + self.bias

    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=lambda m: len(list(m.parameters())))
    for path, module in layers.named_modules():
        if not isinstance(module, (nn.Linear, LowRank)) or {"experts", "gate", "router"} & set(path.split(".")):
            continue
        if not any(side % 16 for side in module.weight.shape):
            method = types.MethodType(forward, module)
            if isinstance(module, LowRank):
                module.base = method
            else:
                module.forward = method  # type: ignore[method-assign]
