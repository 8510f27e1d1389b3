"""peft's LoRA layer with less to compute. Import it only with peft installed."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor


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
        return (result + b(few)).to(result.dtype)


def scaled_first(layer: Any) -> Any:
    """Turn a layer into a `ScaledFirst` if it is peft's of a linear map and no variant (DoRA)."""
    if type(layer) is Linear and not layer.lora_variant:
        layer.__class__ = ScaledFirst
    return layer
