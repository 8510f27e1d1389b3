"""The MLPs of a decoder, found by what its modules do in a forward pass, not by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.errors import ModelError
from llmtrain.models.build import decoder_layers
from llmtrain.models.experts import expert_blocks
from llmtrain.models.structure.probe import attention_seen, probe_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def dense_mlps(hf: PreTrainedModel) -> list[nn.Module]:
    """Every dense MLP of the decoder; the model may be on the meta device.

    Raises:
        ModelError: there are none.
    """
    kinds = _mlp_kinds(hf)
    found = []
    for _, layer in _layers(hf):
        for path, kind in kinds:
            mlp: Any = layer
            for part in path.split("."):
                mlp = getattr(mlp, part, None)
            if isinstance(mlp, nn.Module) and type(mlp) is kind:
                found.append(mlp)
    return found


def _layers(hf: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    layers = {id(layer) for layer in decoder_layers(hf)}
    return ((name, module) for name, module in hf.named_modules() if id(module) in layers)


def _mlp_kinds(hf: PreTrainedModel) -> list[tuple[str, type]]:
    """(path in a decoder layer, class) of the MLPs, found by what modules of a small copy do.

    An MLP maps [B, T, H] to [B, T, H] token by token, through at least two matrices, without attention.
    """
    small = probe_copy(hf)
    experts = {id(block.module) for block in expert_blocks(small)}
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
    handles = [
        module.register_forward_hook(
            lambda m, args, kwargs, out: calls.update({m: (args, kwargs, out)}), with_kwargs=True
        )
        for _, layer in _layers(small)
        for module in layer.modules()
    ]
    with torch.no_grad(), attention_seen(small) as attended:
        small(input_ids=torch.arange(12).unsqueeze(0) + 3, use_cache=False)
    for handle in handles:
        handle.remove()
    looking = {call.path for call in attended}
    kinds: dict[tuple[str, type], None] = {}
    for name, layer in _layers(small):
        taken: list[str] = []
        for path, module in layer.named_modules():
            inside = any(path.startswith(f"{other}.") for other in taken)
            attends = any(other == f"{name}.{path}" or other.startswith(f"{name}.{path}.") for other in looking)
            mixed = any(id(part) in experts for part in module.modules())
            if path and not inside and not attends and not mixed and _is_mlp(module, calls.get(module)):
                taken.append(path)
                kinds[path, type(module)] = None
    if not kinds:
        raise ModelError(
            f"model.mlp_tile_tokens: {type(hf).__name__} has no MLP module that could work on slices of the sequence "
            "(experts need all tokens at once; some models compute their MLP among other things). Set it to null."
        )
    return list(kinds)


def _is_mlp(module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any], Any] | None) -> bool:
    if call is None or sum(1 for p in module.parameters() if p.dim() == 2) < 2:
        return False
    args, kwargs, output = call
    given = args[0] if len(args) == 1 and not kwargs else None
    if not (isinstance(given, Tensor) and isinstance(output, Tensor) and given.shape == output.shape):
        return False
    if given.dim() != 3:
        return False
    with torch.no_grad():
        parts = torch.cat([module(part) for part in given.split(5, dim=1)], dim=1)
    return torch.allclose(parts, output, rtol=1e-4, atol=1e-5)
