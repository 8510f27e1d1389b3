"""LoRA and DoRA in plain PyTorch, from their definitions."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.models.spec import ModelSpec
from tests.helpers.training import Case, plain_model, resolved_run


class Adapted(nn.Module):
    """A linear map with low-rank matrices beside it, by the definitions: (W + scale B A) x; DoRA gives each row of that
    matrix a length of its own, and no gradient passes the length that it divides by."""

    def __init__(self, linear: nn.Linear, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.lora_A, self.lora_B = nn.Module(), nn.Module()
        self.lora_A.weight, self.lora_B.weight = nn.Parameter(a), nn.Parameter(b)
        self.lora_magnitude_vector = None if magnitude is None else nn.Parameter(magnitude)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight)
        if self.lora_magnitude_vector is not None:
            weight = weight * (self.lora_magnitude_vector / weight.detach().norm(dim=1)).unsqueeze(1)
        return F.linear(x, weight, self.bias)


def plain_adapted(case: Case) -> Any:
    """The case's model with its adapter, with the values that its run begins with."""
    model = plain_model(case).requires_grad_(False)
    whole = case.adapter.get("modules_to_save", [])
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name.rpartition(".")[0], pattern) for pattern in whole):
            parameter.requires_grad_(True)
    run = resolved_run(case, 1)
    source = ModelSpec.of(run.config.model, run.config.adapter).initial_weights(0, torch.device("cpu"))
    values = {
        name: source.read(name, 0, math.prod(source.shape(name))).view(source.shape(name)).clone()
        for name in source.order()
        if ".lora_" in name
    }
    r, alpha = case.adapter["r"], case.adapter["alpha"]
    scale = alpha / math.sqrt(r) if case.adapter.get("rslora") else alpha / r
    for path in sorted({name.partition(".lora_")[0] for name in values}):
        parent, _, name = path.rpartition(".")
        a, b = values[f"{path}.lora_A.weight"], values[f"{path}.lora_B.weight"]
        magnitude = values.get(f"{path}.lora_magnitude_vector")
        layer = Adapted(model.get_submodule(path), a, b, magnitude, scale)
        setattr(model.get_submodule(parent), name, layer)
    return model
