"""Linear layers in plain PyTorch, by their definition: LoRA, DoRA, 4 bits, fp8; and initial values that show faults."""

from __future__ import annotations

import copy
import math
import types
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.config.run import AdapterConfig
from llmtrain.models.adapter import ALL, AdaptedSource
from llmtrain.models.parameters import MAGNITUDE, B
from llmtrain.models.source import ParameterSource
from llmtrain.models.spec import ModelSpec
from llmtrain.parity.small import LoudSource, noise


class LoudAdapter(AdaptedSource):
    """Initial values with B other than 0, and with magnitudes other than their rows' norms. Otherwise the first loss
    would not depend on the adapter."""

    def _first(self, name: str) -> Tensor:
        values = super()._first(name)
        if name.endswith(B):
            return values + 0.1 * noise(self._seed, name, values.numel())
        if name.endswith(MAGNITUDE):
            return values * (1 + 0.1 * noise(self._seed, name, values.numel()))
        return values


def loud_source(spec: ModelSpec, seed: int) -> ParameterSource:
    base = LoudSource(spec, seed, torch.device("cpu"))
    return base if spec.adapter.r is None else LoudAdapter(base, spec.adapter_shapes, seed)


class LowRank(nn.Module):
    """A linear layer with its adapter: Wx + s B A x. With a magnitude m, each row of W + s B A is scaled to the length
    m; no gradient flows through the row's own length (DoRA, section 4.3)."""

    def __init__(self, linear: nn.Linear, r: int, scale: float, *, dora: bool, summed: bool) -> None:
        """`summed`: compute (W + s B A) x, which is mathematically equal."""
        super().__init__()
        self.weight, self.bias, self._scale, self._summed = linear.weight, linear.bias, scale, summed
        outputs, inputs = linear.weight.shape
        self.lora_A, self.lora_B = nn.Module(), nn.Module()
        self.lora_A.weight = nn.Parameter(linear.weight.new_empty(r, inputs))
        self.lora_B.weight = nn.Parameter(linear.weight.new_empty(outputs, r))
        self.lora_magnitude_vector = nn.Parameter(linear.weight.new_empty(outputs)) if dora else None
        self.base = self._base
        """The layer without its adapter."""

    def _base(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        a: Any = self.lora_A.weight
        b: Any = self.lora_B.weight
        if self.lora_magnitude_vector is None and not self._summed:
            return self.base(x) + self._scale * F.linear(F.linear(x, a), b)
        weight = self.weight + self._scale * (b @ a)
        if self.lora_magnitude_vector is not None:
            weight = weight * (self.lora_magnitude_vector / weight.detach().norm(dim=1)).unsqueeze(1)
        return F.linear(x, weight, self.bias)


NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
       0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
"""The 16 values of NF4: quantiles of a normal distribution, one of them 0 (arXiv 2305.14314, appendix E)."""


def in_four_bits(weight: Tensor) -> Tensor:
    """Round a weight to NF4. Each 64 consecutive elements share a scale: their largest absolute value."""
    flat = weight.detach().float().reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    code = torch.tensor(NF4, device=weight.device)
    middle = (code[1:] + code[:-1]) / 2
    values = code[torch.bucketize(blocks / scale.clamp_min(torch.finfo(torch.float32).tiny), middle)] * scale
    return values.view(-1)[: len(flat)].view_as(weight).to(weight.dtype)


def pack_plainly(model: nn.Module, adapter: AdapterConfig) -> None:
    """Round the base weights of adapted layers, which are already loaded, to `adapter.quantize`."""
    for module in model.modules():
        if adapter.quantize is not None and isinstance(module, LowRank):
            module.weight.data = in_four_bits(module.weight)


def base_of(model: nn.Module, masters: dict[str, Tensor]) -> nn.Module:
    """Return a frozen copy without the adapter, at the initial values: the definition of an online reference."""
    base = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name in masters:
                parameter.copy_(masters[name])
    for path, module in list(base.named_modules()):
        if isinstance(module, LowRank):
            parent, _, name = path.rpartition(".")
            linear = nn.Linear(module.weight.shape[1], module.weight.shape[0], bias=False, device="meta")
            linear.weight, linear.bias = module.weight, module.bias
            setattr(base.get_submodule(parent), name, linear)
    return base.requires_grad_(False)


def frozen_beside(model: nn.Module, adapter: AdapterConfig) -> set[str]:
    named = list(model.named_parameters(remove_duplicate=False))
    whole = {
        id(p)
        for name, p in named
        for pattern in (*adapter.modules_to_save, "score")  # a reward model's new head trains completely
        if fnmatchcase(name.rpartition(".")[0], pattern)
    }
    return {name for name, parameter in named if id(parameter) not in whole}


def adapt_plainly(model: nn.Module, adapter: AdapterConfig, *, summed: bool) -> None:
    """Put the run's adapter into a transformers model, without values."""
    if adapter.r is None:
        return
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=lambda m: len(list(m.parameters())))
    inside = set(layers.modules())
    scale = adapter.alpha / (math.sqrt(adapter.r) if adapter.rslora else adapter.r)
    for path, module in list(model.named_modules()):
        wanted = any(pattern == ALL or fnmatchcase(path, pattern) for pattern in adapter.targets)
        if wanted and isinstance(module, nn.Linear) and module in inside:
            parent, _, name = path.rpartition(".")
            layer = LowRank(module, adapter.r, scale, dora=adapter.dora, summed=summed)
            setattr(model.get_submodule(parent), name, layer)


_E4M3, _E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
"""Formats of 8 bits, each with its largest number."""


def in_eight_bits(values: Tensor, recipe: str, dim: int, *, gradient: bool = False) -> Tensor:
    """Round `values` [., .] to fp8, and return them in fp32. A scale maps the largest value to the format's largest
    number. tensorwise: one scale; gradients in e5m2. rowwise: a scale, rounded down to a power of two, for each row
    along `dim`, which is the side of a product that is summed over; all in e4m3."""
    dtype, largest = _E5M2 if gradient and recipe == "tensorwise" else _E4M3
    size = values.abs().max() if recipe == "tensorwise" else values.abs().amax(dim, keepdim=True)
    scale = (largest / size.double().clamp_min(1e-12)).float()
    if recipe == "rowwise":
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (values.float() * scale).clamp(-largest, largest).to(dtype).float() / scale


class _Product(torch.autograd.Function):
    """Computes x W^T for x [N, inputs] and W [outputs, inputs]. All three products round both factors."""

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
    """Multiply. `halves`: as a sum of two products, which is mathematically equal."""
    half = a.shape[1] // 2
    return a[:, :half] @ b[:half] + a[:, half:] @ b[half:] if halves else a @ b


def compute_in_fp8(model: nn.Module, recipe: str | None, *, halves: bool) -> None:
    """Make the linear layers of a transformers model's decoder layers compute in fp8, except for routers, experts and
    sides that are no multiples of 16. `halves`: in another order of summation."""
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
