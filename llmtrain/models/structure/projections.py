"""How the linear maps of a decoder layer can be shared by ranks, found by what depends on what, not by their names.

One layer of a small copy runs with its graph cut behind every module that has parameters. What a map reads then tells
what it is: the hidden state, which all ranks hold (its outputs can be shared: "column"), or what such maps or the
attention made (its inputs are shared: "row"). Which output of a fused map belongs to which head, or to which input of
the next map, is read from gradients. rehearsal.py then plays the ranks, and the whole layer has to come out the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmtrain.errors import ModelError
from llmtrain.models.structure.anatomy import Anatomy
from llmtrain.models.structure.layer_graph import LayerGraph
from llmtrain.models.structure.probe import Watch, attention_seen, probe_copy, run_copy
from llmtrain.models.structure.rehearsal import InnerNorm, Map, rehearse

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Projections:
    """What a tensor-parallel group shares, for all layers of a model, by module paths. Experts are in the anatomy."""

    maps: tuple[Map, ...]
    norms: tuple[InnerNorm, ...]
    attentions: tuple[str, ...]
    """Modules that call the attention function."""
    local_numbers: tuple[str, ...]
    """Attributes of those modules that must be divided: they count heads, or features of all heads. In a copy of their
    config, num_attention_heads and num_key_value_heads must be, too."""
    heads: int
    """Query heads."""
    kv_heads: int
    widths: tuple[int, ...]
    """Shared features of the maps outside of attention, of which each rank needs a whole number."""


def projections(hf: PreTrainedModel, anatomy: Anatomy) -> Projections:
    """Of a model (it may be on the meta device), found and rehearsed on a small copy.

    Raises:
        ModelError: a layer's maps cannot be shared, with the reason.
    """
    small = probe_copy(hf)
    config = small.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    ids = torch.randint(0, min(config.vocab_size, 512), (2, 12), generator=torch.Generator().manual_seed(0))
    paths = [f"{anatomy.layer_list}.{name}" for name, _ in small.get_submodule(anatomy.layer_list).named_children()]
    with attention_seen(small, cut=True) as attended:
        with Watch(small, paths) as watch:
            try:
                run_copy(small, ids)
            except ModelError as error:  # some code of its own needs a mask of another kind
                raise _own_attention(hf, str(error)) from error
        kinds: dict[frozenset[tuple[str, int]], tuple[list[Map], list[InnerNorm], str]] = {}
        numbers: set[str] = set()
        for call in watch.calls:
            layer = small.get_submodule(call.path)
            if (kind := _kind(layer)) in kinds:
                continue
            if sum(seen.path.startswith(f"{call.path}.") for seen in attended) != 1:
                raise _own_attention(hf)
            graph = LayerGraph(layer, call, kv_heads, attended)
            found = _maps(graph), _norms(graph), graph.attention
            kinds[kind] = found
            numbers |= set(rehearse(layer, call, *found, heads=heads, kv_heads=kv_heads))
    return _of_whole_model(hf, anatomy, kinds, tuple(sorted(numbers)))


def _own_attention(hf: PreTrainedModel, error: str = "") -> ModelError:
    return ModelError(
        f"model: {type(hf).__name__} has layers that do not call transformers' attention function once (state-space or "
        "recurrent layers, or attention with code of its own), so its heads cannot be shared; remove the key, or use a "
        f"pipeline.{f' ({error})' if error else ''}"
    )


def _kind(layer: nn.Module) -> frozenset[tuple[str, int]]:
    """Layers of one kind have the same parameters, but for numbers in names and for sizes."""
    return frozenset((re.sub(r"\d+", "*", name), p.dim()) for name, p in layer.named_parameters())


def _maps(graph: LayerGraph) -> list[Map]:
    """Paths within the layer."""
    found = []
    for node in graph.nodes:
        if node.role in ("column", "row"):
            found.append(
                Map(
                    path=node.path,
                    column=node.role == "column",
                    transposed=node.transposed,
                    sections=graph.sections(node) if node.role == "column" else None,
                    bias=getattr(node.module, "bias", None) is not None,
                )
            )
    for node in graph.nodes:
        if node.role == "row":
            graph.check_row(node)
    return found


def _norms(graph: LayerGraph) -> list[InnerNorm]:
    found = []
    for node in graph.nodes:
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
            raise graph.no(f"{node.path} acts on a share of the features in a way that is not understood")
        found.append(InnerNorm(path=node.path, kind=kind))
    return found


def _of_whole_model(
    hf: PreTrainedModel,
    anatomy: Anatomy,
    kinds: dict[frozenset[tuple[str, int]], tuple[list[Map], list[InnerNorm], str]],
    numbers: tuple[str, ...],
) -> Projections:
    maps: list[Map] = []
    norms: list[InnerNorm] = []
    attentions, widths = [], set()
    for part in anatomy.layers:
        layer = hf.get_submodule(part.path)
        of_kind = kinds.get(_kind(layer))
        if of_kind is None:
            raise ModelError(f"model: {part.path} has parameters that no layer of its small copy has.")
        attentions.append(f"{part.path}.{of_kind[2]}")
        for entry in of_kind[0]:
            for path in _alike(entry.path, layer):
                module: Any = layer.get_submodule(path)
                full = _full_sections(entry, module)
                maps.append(
                    Map(
                        path=f"{part.path}.{path}",
                        column=entry.column,
                        transposed=entry.transposed,
                        sections=full,
                        bias=entry.bias,
                    )
                )
                if not entry.column and not path.startswith(f"{of_kind[2]}."):
                    widths.add(module.weight.shape[0 if entry.transposed else 1])
        for norm in of_kind[1]:
            norms += [InnerNorm(path=f"{part.path}.{path}", kind=norm.kind) for path in _alike(norm.path, layer)]
    heads = hf.config.num_attention_heads
    return Projections(
        maps=_unique(maps),
        norms=_unique(norms),
        attentions=tuple(attentions),
        local_numbers=numbers,
        heads=heads,
        kv_heads=getattr(hf.config, "num_key_value_heads", None) or heads,
        widths=tuple(sorted(widths)),
    )


def _alike(path: str, layer: nn.Module) -> list[str]:
    """The same place within a layer of the full model: numbers of a module list (experts, heads) in a path are any."""
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
