"""torchao's linear layer in fp8, which keeps less for the backward pass here. Importing this file needs torchao.

Each of a layer's three products (output, gradient of the input, gradient of the weight) has both factors in 8 bits. A
factor is scaled by the largest absolute value of the whole tensor (tensorwise; gradients in e5m2), or of each row along
the side that is summed over (rowwise; all in e4m3, scales rounded to powers of two), from the current values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args


def convert(layer: nn.Module, maps: Iterable[nn.Linear], recipe: str, *, emulated: bool) -> None:
    """Make the linear layers `maps` inside `layer` multiply in fp8. Their parameters stay the same objects."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
    chosen = {id(linear) for linear in maps}
    convert_to_float8_training(layer, config=config, module_filter_fn=lambda module, _: id(module) in chosen)
    for module in layer.modules():
        if type(module) is Float8Linear:
            module.__class__ = Fp8Linear


class Fp8Linear(Float8Linear):
    """A linear layer that multiplies in fp8, with a weight in the run's precision."""

    multiplies_in_fp8 = True
    """False: compute as torch.nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        if not self.multiplies_in_fp8:
            return F.linear(input, self.weight, self.bias)
        output: Tensor = _Product.apply(input, self.weight, self.linear_mm_config, self.config)
        return output if self.bias is None else output + self.bias


@torch.compiler.allow_in_graph
class _Product(torch.autograd.Function):
    """Computes x W^T by torchao's function. That would keep a view of W for the backward pass (under ZeRO 3 the
    gathered weight); here the parameter is kept, which under ZeRO 3 is empty until it is gathered again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Any, config: Float8LinearConfig) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.config = products, config
        keeps = SimpleNamespace(save_for_backward=lambda *_: None)
        output: Tensor = matmul_with_hp_or_float8_args.forward(keeps, x, weight.t(), products, config)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        saved = SimpleNamespace(saved_tensors=(x, weight.t()), linear_mm_config=ctx.products, config=ctx.config)
        grad_x, grad_weight, *_ = matmul_with_hp_or_float8_args.backward(saved, gradient)
        return grad_x, grad_weight.t(), None, None
