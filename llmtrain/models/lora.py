"""peft's LoRA layer with less to compute. Import it only with peft installed."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn


class _AddedTo(nn.Linear):
    """B of an adapter, whose product is added to the map's output as it is computed: that output is read and written
    once less, 2 of 3 passes over it. The module is called, so that ZeRO 3 gathers its weight."""

    def forward(self, few: Tensor, output: Tensor) -> Tensor:  # type: ignore[override]
        """few: [..., r], output: [..., out]. Returns output + B few."""
        if output.dtype != self.weight.dtype:
            return output + super().forward(few)
        return torch.addmm(output.flatten(0, -2), few.flatten(0, -2), self.weight.T).view_as(output)


class ScaledFirst(Linear):
    """Wx + B (s A x) instead of peft's Wx + s (B A x), s = alpha / r: s multiplies r features of a token, not all
    outputs, also in the gradient. If s is a power of two, both have equal rounding."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        if self.disable_adapters or self.merged:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        (name,) = self.active_adapters
        a, b = self.lora_A[name], self.lora_B[name]
        result = self.base_layer(x, *args, **kwargs)
        weight: Tensor = a.weight  # type: ignore[assignment]
        few = a(self.lora_dropout[name](x.to(weight.dtype))) * self.scaling[name]
        return b(few, result).to(result.dtype)


def scaled_first(layer: Any) -> Any:
    """Turn a layer into a `ScaledFirst` if it is peft's of a linear map and no variant (DoRA)."""
    if type(layer) is Linear and not layer.lora_variant:
        layer.__class__ = ScaledFirst
        for b in layer.lora_B.values():
            b.__class__ = _AddedTo
    return layer
