"""The sharding of a decoder layer's linear maps, found by what depends on what, not by their names.

One layer of a small copy runs with its graph cut behind every module that has parameters. What a map reads then tells
what it is: the hidden state, which all ranks hold (its outputs can be sharded: "column"), or what such maps or the
attention made (its inputs are sharded: "row"). Which output of a fused map belongs to which head, or to which input of
the next map, is read from gradients. sharding_proof.py then plays the ranks, and the layer must come out the same.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmtrain.base.errors import ModelError
from llmtrain.models.build import decoder_layers
from llmtrain.models.experts import expert_blocks
from llmtrain.models.structure.dataflow import LayerGraph
from llmtrain.models.structure.decoder_parts import Anatomy, layer_paths, probe_tokens
from llmtrain.models.structure.probe import Attended, Call, Watch, attention_seen, probe_copy, run_copy
from llmtrain.models.structure.sharding_proof import InnerNorm, Map, rehearse

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Projections:
    """Modules that a tensor-parallel group shards, for all layers, by path. Experts are in the anatomy."""

    maps: tuple[Map, ...]
    norms: tuple[InnerNorm, ...]
    entries: tuple[str, ...]
    """Whole maps of low-rank attention, of whose outputs each rank's heads read a part: gradients are summed there."""
    attentions: tuple[str, ...]
    """Modules that call the attention function."""
    local_numbers: tuple[str, ...]
    """Attributes of those modules that must be divided: they count heads, or features of all heads. In a copy of their
    config, num_attention_heads and num_key_value_heads must be, too."""
    heads: int
    """Query heads."""
    kv_heads: int
    widths: tuple[int, ...]
    """Sharded features of the maps outside of attention, of which each rank needs a whole number."""
    whole: str
    """A note where the attention of some layers cannot be sharded, with the reason."""


@dataclass(frozen=True)
class _OfLayer:
    """`Projections` of one layer of the small copy, by paths within it."""

    maps: list[Map]
    norms: list[InnerNorm]
    entries: list[str]
    attention: str
    """Empty: it is whole on each rank."""
    numbers: tuple[str, ...]
    whole: str
    """The reason why attention is whole."""


def projections(hf: PreTrainedModel, anatomy: Anatomy) -> Projections:
    """Of a model (it may be on the meta device), found and rehearsed on a small copy.

    Raises:
        ModelError: no layer has anything that can be sharded, with the reason.
    """
    small = probe_copy(hf)
    config = small.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kinds: dict[frozenset[tuple[str, int]], _OfLayer] = {}
    with contextlib.ExitStack() as stack:
        attended = stack.enter_context(attention_seen(small, cut=True))
        try:
            calls = _calls(small, anatomy.layer_list)
        except ModelError:  # some code of its own needs a mask of another kind
            stack.close()
            attended, calls = [], _calls(small, anatomy.layer_list)
        for call in calls:
            layer = small.get_submodule(call.path)
            if (kind := _kind(layer)) in kinds:
                continue
            try:
                kinds[kind] = _of_layer(layer, call, heads, kv_heads, attended)
            except ModelError as error:
                kinds[kind] = _of_layer(layer, call, heads, kv_heads, attended, str(error))
    whole = next((found.whole for found in kinds.values() if found.whole), "")
    if whole and not any(found.maps for found in kinds.values()) and not any(part.experts for part in anatomy.layers):
        raise ModelError(whole)
    return _of_whole_model(hf, anatomy, kinds, whole)


def _calls(small: PreTrainedModel, layer_list: str) -> list[Call]:
    with Watch(small, layer_paths(small, layer_list)) as watch:
        run_copy(small, probe_tokens(small))
    return watch.calls


def _of_layer(
    layer: nn.Module, call: Call, heads: int, kv_heads: int, attended: list[Attended], whole: str = ""
) -> _OfLayer:
    graph = LayerGraph(layer, call, kv_heads, attended, mlps_of(layer, call) if whole else None)
    maps, norms = _maps(graph), _norms(graph)
    divided = rehearse(layer, call, maps, norms, graph.attention, heads=heads, kv_heads=kv_heads)
    entries = [node.path for node in graph.nodes if node.role == "entry"]
    return _OfLayer(maps, norms, entries, graph.attention, divided, whole)


def _kind(layer: nn.Module) -> frozenset[tuple[str, int]]:
    """Layers of one kind have the same parameters, but for numbers in names and for sizes."""
    return frozenset((re.sub(r"\d+", "*", name), p.dim()) for name, p in layer.named_parameters())


def _maps(graph: LayerGraph) -> list[Map]:
    """Paths within the layer."""
    found = []
    for node in graph.nodes:
        if node.role in ("column", "inside", "row"):
            column = node.role != "row"
            found.append(
                Map(
                    path=node.path,
                    column=column,
                    transposed=node.transposed,
                    sections=graph.sections(node) if column else None,
                    bias=getattr(node.module, "bias", None) is not None,
                    inside=node.role == "inside",
                )
            )
    for node in graph.nodes:
        if node.role == "row":
            graph.check_row(node)
    return found


def _norms(graph: LayerGraph) -> list[InnerNorm]:
    found = []
    for node in graph.nodes:
        if node.role == "behind":
            found.append(InnerNorm(path=node.path, kind="each_head"))
        if node.role != "inner":
            continue
        shapes = {tuple(p.shape) for p in node.module.parameters()}
        last = node.given.shape[-1]
        heads, size = graph.heads_and_size(node)
        if node.in_list and node.given.numel() == graph.tokens * size:
            kind = "one_head"
        elif last == size and shapes == {(size,)}:
            kind = "each_head"
        elif last == size and shapes == {(heads, size)}:
            kind = "own_heads"
        elif last == heads * size and shapes == {(last,)}:
            kind = "across_heads"
        else:
            raise graph.no(f"{node.path} acts on a shard of the features in a way that is not understood")
        found.append(InnerNorm(path=node.path, kind=kind))
    return found


def _of_whole_model(
    hf: PreTrainedModel,
    anatomy: Anatomy,
    kinds: dict[frozenset[tuple[str, int]], _OfLayer],
    whole: str,
) -> Projections:
    maps: list[Map] = []
    norms: list[InnerNorm] = []
    entries, attentions, widths = [], [], set()
    for part in anatomy.layers:
        layer = hf.get_submodule(part.path)
        of_kind = kinds.get(_kind(layer))
        if of_kind is None:
            raise ModelError(f"model: {part.path} has parameters that no layer of its small copy has.")
        if of_kind.attention:
            attentions.append(f"{part.path}.{of_kind.attention}")
        entries += [f"{part.path}.{path}" for path in of_kind.entries]
        for entry in of_kind.maps:
            for path in _alike(entry.path, layer):
                module: Any = layer.get_submodule(path)
                maps.append(replace(entry, path=f"{part.path}.{path}", sections=_full_sections(entry, module)))
                if not entry.column and not (of_kind.attention and path.startswith(f"{of_kind.attention}.")):
                    widths.add(module.weight.shape[0 if entry.transposed else 1])
        for norm in of_kind.norms:
            norms += [InnerNorm(path=f"{part.path}.{path}", kind=norm.kind) for path in _alike(norm.path, layer)]
    heads = hf.config.num_attention_heads if attentions else 0
    kv_heads = getattr(hf.config, "num_key_value_heads", None) or heads
    if whole:
        count, reason = len(anatomy.layers), whole.removeprefix("model: ").removesuffix(".")
        whole = (
            f"the attention of {count - len(attentions)} of {count} layers is whole on every rank; their MLPs and "
            f"experts are sharded ({reason})"
        )
    return Projections(
        maps=_unique(maps),
        norms=_unique(norms),
        entries=tuple(entries),
        attentions=tuple(attentions),
        local_numbers=tuple(sorted({number for found in kinds.values() for number in found.numbers})),
        heads=heads,
        kv_heads=kv_heads if attentions else 0,
        widths=tuple(sorted(widths)),
        whole=whole,
    )


def _alike(path: str, layer: nn.Module) -> list[str]:
    """The place within a layer of the full model: numbers of a module list (experts, heads) in a path are any."""
    paths = [""]
    for name in path.split("."):
        found = []
        for parent in paths:
            module = layer.get_submodule(parent)
            several = isinstance(module, nn.ModuleList)
            names = [child for child, _ in module.named_children()] if several else [name]
            found += [f"{parent}.{child}" if parent else child for child in names]
        paths = found
    return paths


def _unique(found: list[Any]) -> tuple[Any, ...]:
    return tuple({entry.path: entry for entry in found}.values())


def _full_sections(entry: Map, module: Any) -> tuple[int, ...] | None:
    """In the full model a fused map has the same parts in proportion."""
    if entry.sections is None:
        return None
    total, small = module.weight.shape[1 if entry.transposed else 0], sum(entry.sections)
    full = tuple(section * total // small for section in entry.sections)
    if sum(full) != total:
        raise ModelError(f"model: {entry.path} has {total} outputs, which are no multiple of its {len(full)} parts.")
    return full


# The MLPs of a decoder, found by what its modules do in a forward pass, not by their names.


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
