"""peft's LoRA layer with less computation. Importing this file needs peft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn


class _AddedTo(nn.Linear):
    """An adapter's B, whose product is added to the wrapped layer's output as it is computed, which saves 1 of 3 passes
    over that output. It is called as a module, so that ZeRO 3 gathers its weight."""

    def forward(self, few: Tensor, output: Tensor) -> Tensor:  # type: ignore[override]
        """few: [..., r], output: [..., out]. Returns output + B few."""
        if output.dtype != self.weight.dtype:
            return output + super().forward(few)
        return torch.addmm(output.flatten(0, -2), few.flatten(0, -2), self.weight.T).view_as(output)


_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that get the same input in most families; that it is the same is checked at each call."""


class SharedInput:
    """Layers with the same input: when the first is called, A x is computed for all of them in one product. A layer
    that is called before the first leaves the group for good: its recomputation, with the same input, could otherwise
    get a product left over from the forward pass."""

    def __init__(self, layers: list[ScaledFirst]) -> None:
        self._layers = layers
        self._x: Tensor | None = None
        self._few: dict[int, Tensor] = {}
        """Place of a layer -> its A x, until the layer takes it."""
        for place, layer in enumerate(layers):
            layer.shared, layer.place = self, place

    def take(self, place: int, x: Tensor) -> Tensor:
        """Return A x, [..., r], of the layer at this place. x: [..., in]."""
        if place == 0:
            layers = [layer for layer in self._layers if layer.shared is self]
            weights = [layer.weight_of_a() for layer in layers]
            few = F.linear(x.to(weights[0].dtype), torch.cat(weights)).split([len(a) for a in weights], dim=-1)
            self._x, self._few = x, {layer.place: part for layer, part in zip(layers, few, strict=True)}
        elif self._x is None:
            self._layers[place].shared = None
            return self._layers[place].apply_a(x)
        elif self._x is not x or place not in self._few:
            return self._layers[place].apply_a(x)
        mine = self._few.pop(place)
        if not self._few:
            self._x = None
        return mine


class ScaledFirst(Linear):
    """Computes Wx + B (s A x) instead of peft's Wx + s (B A x), s = alpha / r: s multiplies r features of a token
    instead of all outputs, also in the gradient. If s is a power of two, both round equally."""

    shared: SharedInput | None = None
    place = 0

    def weight_of_a(self) -> Tensor:
        (name,) = self.active_adapters
        weight: Tensor = self.lora_A[name].weight  # type: ignore[assignment]
        return weight

    def apply_a(self, x: Tensor) -> Tensor:
        (name,) = self.active_adapters
        few: Tensor = self.lora_A[name](self.lora_dropout[name](x.to(self.weight_of_a().dtype)))
        return few

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        if self.disable_adapters or self.merged:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        (name,) = self.active_adapters
        result = self.base_layer(x, *args, **kwargs)
        few = self.apply_a(x) if self.shared is None else self.shared.take(self.place, x)
        return self.lora_B[name](few * self.scaling[name], result).to(result.dtype)


def scaled_first(layer: Any) -> Any:
    """Make a layer a `ScaledFirst` if it is peft's plain LoRA layer (not DoRA) of a linear layer. Returns the layer."""
    if type(layer) is Linear and not layer.lora_variant:
        layer.__class__ = ScaledFirst
        for b in layer.lora_B.values():
            b.__class__ = _AddedTo
    return layer


def share_inputs(layers: Mapping[str, Any]) -> None:
    """Let layers of one module with the same input read it once. Layers with dropout are left out, because each drops
    other elements. `layers`: path -> layer, without layers whose A is sharded, which must stay a product of its own."""
    alike = {
        path: layer
        for path, layer in layers.items()
        if type(layer) is ScaledFirst and all(type(drop) is nn.Identity for drop in layer.lora_dropout.values())
    }
    for path in alike:
        parent, _, first = path.rpartition(".")
        for names in _SAME_INPUT:
            paths = [".".join(filter(None, (parent, name))) for name in names]
            group = [alike[other] for other in paths if other in alike]
            if first == names[0] and len(group) > 1:
                SharedInput(group)
