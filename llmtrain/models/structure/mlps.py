"""The MLPs of a decoder, found by what its modules do in a forward pass, not by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from llmtrain.base.errors import ModelError
from llmtrain.models.build import decoder_layers
from llmtrain.models.experts import expert_blocks
from llmtrain.models.structure.probe import Call, Watch, probe_copy, run_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def dense_mlps(hf: PreTrainedModel) -> list[nn.Module]:
    """Every dense MLP of the decoder; the model may be on the meta device.

    Raises:
        ModelError: there are none.
    """
    small = probe_copy(hf)
    paths = _layer_paths(small)
    with torch.no_grad(), Watch(small, paths) as watch:
        run_copy(small, torch.arange(12).unsqueeze(0) + 3)
    kinds = {
        (path, type(small.get_submodule(f"{call.path}.{path}"))): None
        for call in watch.calls
        for path in mlps_of(small.get_submodule(call.path), call)
    }
    if not kinds:
        raise ModelError(
            f"model.mlp_tile_tokens: {type(hf).__name__} has no MLP module that could work on slices of the sequence "
            "(experts need all tokens at once; some models compute their MLP among other things). Set it to null."
        )
    every = dict(hf.named_modules())
    places = ((every.get(f"{layer}.{path}"), kind) for layer in _layer_paths(hf) for path, kind in kinds)
    return [module for module, kind in places if module is not None and type(module) is kind]


def _layer_paths(hf: nn.Module) -> list[str]:
    layers = set(decoder_layers(hf))
    return [path for path, module in hf.named_modules() if module in layers]


def mlps_of(layer: nn.Module, call: Call) -> list[str]:
    """Paths within a layer of a small copy, which `call` ran.

    An MLP maps [B, T, H] to [B, T, H] token by token, through at least two matrices, and holds no experts.
    """
    experts = {block.module for block in expert_blocks(layer)}
    with torch.no_grad(), Watch(layer, [path for path, _ in layer.named_modules() if path]) as watch:
        layer(*call.args, **call.kwargs)
    calls = {inner.path: inner for inner in watch.calls}
    found: list[str] = []
    for path, module in layer.named_modules():
        inside = any(path.startswith(f"{mlp}.") for mlp in found)
        if path in calls and not inside and experts.isdisjoint(module.modules()) and _is_mlp(module, calls[path]):
            found.append(path)
    return found


def _is_mlp(module: nn.Module, call: Call) -> bool:
    given, result = call.hidden, call.result
    if given is None or result is None or len(call.args) != 1 or call.kwargs or call.output is not result:
        return False
    if given.shape != result.shape or sum(p.dim() == 2 for p in module.parameters()) < 2:
        return False
    with torch.no_grad():  # not compared with the result, to which some layers add in place
        parts = torch.cat([module(part) for part in given.split(5, dim=1)], dim=1)
        return torch.allclose(parts, module(given), rtol=1e-4, atol=1e-5)
