"""Finds out how a decoder layer's linear layers ("maps") can be sharded, from dependencies and not from names.

One layer of a small copy runs, and its graph is cut after every module that has parameters. The input of a map decides
its kind. "column": it reads the hidden state, which all ranks hold, so its outputs can be sharded. "row": it reads the
output of such maps or of attention, so its inputs are sharded. Gradients assign each output of a fused map to a head,
or to an input of the next map.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.experts import expert_blocks
from llmtrain.models.skeleton import decoder_layers
from llmtrain.models.structure.calls import Attended, Call, Watch, attention_seen, with_hidden
from llmtrain.models.structure.decoder_parts import Anatomy, layer_paths, probe_tokens
from llmtrain.models.structure.sharding_proof import InnerNorm, Map, rehearse
from llmtrain.models.structure.small_copy import probe_copy, run_copy, structure
from llmtrain.models.transformers_private import with_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_SMALL = 1e-3
"""Largest difference from an integer that an index read from gradients may have."""


@dataclass(eq=False)
class Node:
    path: str
    """Path within the layer."""
    module: nn.Module
    linear: bool
    transposed: bool
    in_list: bool
    """True if the module is an item of a module list."""
    inputs: list[Tensor]
    """Tensors that the module got; experts also get the router's weights."""
    leaves: list[Tensor] = field(default_factory=list)
    """The module's output, as new leaves of the graph."""
    role: str = ""
    """"column", "row", "inner" (acts on a shard of the features) or "stream" (acts on replicated features). In low-rank
    attention also "entry" (a complete map; heads read parts of its output unchanged), "behind" (acts on an entry's
    output) and "inside" (a column map after that)."""

    @property
    def given(self) -> Tensor:
        return self.inputs[0]


class LayerGraph:
    """One run of a layer. Raises ModelError if ranks cannot shard maps that are connected in this way."""

    def __init__(
        self, layer: nn.Module, call: Call, kv_heads: int, attended: list[Attended], mlps: list[str] | None = None
    ) -> None:
        """`mlps`: paths of the only modules to shard; None: shard all."""
        assert call.hidden is not None
        self._layer, self._call, self._kv, self._attended, self._mlps = layer, call, kv_heads, attended, mlps
        self.tokens = call.hidden.shape[0] * call.hidden.shape[1]
        self._draw = torch.Generator().manual_seed(5)
        self.nodes: list[Node] = []
        self._run_layer()
        self._give_roles()
        self._first = self.nodes
        inner = {node.path for node in self.nodes if node.role == "inner"}
        if inner:  # run again without these modules to see which head each output belongs to
            roles = {node.path: node.role for node in self.nodes}
            norms = [node for node in self.nodes if node.role == "inner"]
            self._run_layer(passed=inner)
            for node in self.nodes:
                node.role = roles[node.path]
            self.nodes += norms

    def no(self, reason: str) -> ModelError:
        return ModelError(f"model: {self._call.path} cannot be sharded: {reason}.")

    def _run_layer(self, passed: set[str] | None = None) -> None:
        assert self._call.hidden is not None
        self.nodes = []
        handles = []
        for path, module in self._layer.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                record = self._record_node(path, module)
                if passed and path in passed:
                    record = lambda module, args, kwargs, output: args[0]  # noqa: E731
                handles.append(module.register_forward_hook(record, with_kwargs=True))
        self.hidden = self._call.hidden.detach().clone().requires_grad_()
        args, kwargs = with_hidden(self._call.args, self._call.kwargs, self.hidden)
        before = len(self._attended)
        try:
            output = self._layer(*args, **kwargs)
        except Exception as error:
            raise self.no(f"it does not run by itself ({error})") from error
        finally:
            for handle in handles:
                handle.remove()
        self.output: Tensor = output[0] if isinstance(output, tuple) else output
        self.attention = ""
        self.heads: list[Tensor] = []
        self.attended: Tensor | None = None
        if self._mlps is None:
            self._see_attention(self._attended[before:])

    def _see_attention(self, calls: list[Attended]) -> None:
        if len(calls) != 1:
            raise self.no(
                "it does not call transformers' attention function once (a state-space or recurrent layer, or "
                "attention with code of its own), so its heads cannot be sharded"
            )
        (seen,) = calls
        self.attention = seen.path.removeprefix(f"{self._call.path}.")
        for name, _ in self._layer.get_submodule(self.attention).named_parameters(recurse=False):
            raise self.no(
                f"{self.attention} has the parameter {name}, which is part of no linear map (attention sinks)"
            )
        self.heads, self.attended = [seen.query, seen.key, seen.value], seen.output

    def _record_node(self, path: str, module: nn.Module) -> Callable[..., Any]:
        from transformers.pytorch_utils import Conv1D

        conv = isinstance(module, Conv1D)
        parent = self._layer.get_submodule(path.rpartition(".")[0])

        def record(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            node = Node(
                path=path,
                module=module,
                linear=(conv or isinstance(module, nn.Linear)) and isinstance(output, Tensor),
                transposed=conv,
                in_list=isinstance(parent, nn.ModuleList),
                inputs=[value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)],
            )
            self.nodes.append(node)
            return self._cut_graph(output, node)

        return record

    def _cut_graph(self, value: Any, node: Node) -> Any:
        if isinstance(value, tuple):
            return tuple(self._cut_graph(item, node) for item in value)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        # After a map any value will do, but a ReLU must not be 0 for all tokens.
        new = torch.randn(value.shape, generator=self._draw) if node.linear else value.detach().clone()
        node.leaves.append(new.requires_grad_())
        return new.clone()  # the layer may change it in place (OLMo's clip_qkv), which a leaf forbids

    def _reads(self, value: Tensor) -> set[int]:
        """Return the indices of the nodes on which a value depends; -1 is the hidden state, -2 attention."""
        if not value.requires_grad:
            return set()
        begins = [(-1, self.hidden), *([] if self.attended is None else [(-2, self.attended)])]
        begins += [(index, leaf) for index, node in enumerate(self.nodes) for leaf in node.leaves]
        weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(2)) + 0.5
        leaves = [leaf for _, leaf in begins]
        grads = torch.autograd.grad((value * weights).sum(), leaves, allow_unused=True, retain_graph=True)
        return {index for (index, _), grad in zip(begins, grads, strict=True) if grad is not None}

    def _give_roles(self) -> None:
        """Classify the nodes in order. A map whose output is combined with replicated features becomes complete."""
        reads = [set().union(*(self._reads(value) for value in node.inputs)) for node in self.nodes]
        end = self._reads(self.output)
        heads = [self._reads(tensor) for tensor in self.heads]
        complete = set() if self._mlps is None else set(range(len(self.nodes)))
        bare = {node.path for node in self.nodes}  # an MLP with own parameters stays complete
        for mlp in set(self._mlps or ()) - bare:
            complete -= {index for index, node in enumerate(self.nodes) if node.path.startswith(f"{mlp}.")}
        while True:
            stream, inner = {-1}, {-2}
            joined: set[int] = set()
            for index, (node, read) in enumerate(zip(self.nodes, reads, strict=True)):
                inner_reads = read & inner
                if not inner_reads:
                    node.role = "column" if node.linear and index not in complete else "stream"
                elif read <= inner:
                    node.role = "row" if node.linear else "inner"
                else:
                    joined |= inner_reads
                    node.role = "stream"
                (inner if node.role in ("column", "inner") else stream).add(index)
            joined |= end & inner
            for index in set().union(*heads) - inner - {-1}:  # of two maps that make heads (low-rank), the first
                joined |= reads[index] & inner
            for index in reversed(range(len(self.nodes))):  # a norm's inputs become complete with it
                if index in joined and self.nodes[index].role == "inner":
                    joined |= reads[index] & inner
            joined = {index for index in joined if index >= 0}
            if not joined:
                break
            if not joined - complete:
                raise self.no("llmtrain does not understand how its linear maps are connected")
            complete |= joined
        self._check_heads(reads, end, heads)

    def _check_heads(self, reads: list[set[int]], end: set[int], heads: list[set[int]]) -> None:
        """Check that queries, keys and values come from column maps. In low-rank attention all heads also read a part
        of a complete map's output (a rotary key); its gradient, and that of all values computed from it, is summed over
        the ranks."""
        columns = {index for index, node in enumerate(self.nodes) if node.role in ("column", "inner")}
        entries: set[int] = set()
        for name, read in zip(("queries", "keys", "values"), heads, strict=bool(heads)):
            entries |= read - columns
            if not read & columns or not all(index >= 0 and self.nodes[index].linear for index in read - columns):
                raise self.no(f"its {name} are not made from the hidden state by linear maps")
        behind = set(entries)
        for index, (node, read) in enumerate(zip(self.nodes, reads, strict=True)):
            if index in entries:
                node.role = "entry"
            elif read & behind:
                if not read <= behind or node.role == "row" or (node.linear and node.role == "stream"):
                    raise self.no(f"{node.path} also reads an input of the heads that every rank computes completely")
                node.role = "inside" if node.role == "column" else "behind"
                behind |= {index} if node.role == "behind" else set()
        if end & behind:
            raise self.no("its output depends directly on an input of the heads that every rank computes completely")

    def heads_and_size(self, node: Node) -> tuple[int, int]:
        """Return (number of heads, features of a head) for a module with the role "inner"."""
        if not self.heads:
            return 0, 0
        query, other = ((heads.shape[1], heads.shape[-1]) for heads in self.heads[:2])
        if query == other:
            return query
        features = node.given.numel() // self.tokens
        if node.in_list:
            siblings = sum(n.path.rpartition(".")[0] == node.path.rpartition(".")[0] for n in self._first)
            return query if siblings == query[0] else other
        return query if features == query[0] * query[1] else other

    def _owners(self, target: Tensor, count: int, source: Tensor) -> Tensor | None:
        """Return for each feature of `source` [F] the index along the last dimension of `target` (`count` long) that
        depends on it, -1 for none. Returns None if several indices depend on one feature.

        The elements of `target` are summed twice, the second time weighted by their index: the quotient of the
        gradients is the index. `source`: [..., F] for each token, or [B, T, heads, size] with F = heads * size.
        """
        draw = torch.Generator().manual_seed(3)
        noise = torch.rand((*target.shape[:-1], 1), generator=draw) + 0.5
        steps = torch.arange(1, count + 1, dtype=target.dtype)
        grads = []
        for weights in (noise.expand(target.shape), noise * steps):
            (grad,) = torch.autograd.grad((target * weights).sum(), source, retain_graph=True, allow_unused=True)
            grads.append(torch.zeros_like(source) if grad is None else grad)
        plain, counted = (grad.reshape(self.tokens, -1) for grad in grads)
        strong = plain.abs() > 1e-2 * plain.abs().amax(0, keepdim=True).clamp_min(1e-20)
        quotient = torch.where(strong, counted / torch.where(strong, plain, 1), 0)
        nearest = quotient.abs().amax(0).round()
        off = torch.where(strong, (quotient - nearest).abs(), 0)
        if bool((off > (_SMALL * nearest).clamp(_SMALL, 0.25)).any()):
            return None
        return torch.where(plain.abs().amax(0) > 1e-20, nearest.long() - 1, -1)

    def sections(self, node: Node) -> tuple[int, ...] | None:
        """Return the sizes of the parts of a column map's outputs that are sharded separately; None: one part."""
        (source,) = node.leaves
        owners = torch.full((source.shape[-1],), -1)
        readers = [self._by_head(tensor) for tensor in self.heads]
        readers += [self._by_feature(row) for row in self.nodes if row.role == "row"]
        counts = set()
        for target, count in readers:
            if not target.requires_grad:
                continue
            of_target = self._owners(target, count, source)
            if of_target is None:
                raise self.no(f"one output of {node.path} is used by several heads or features")
            owned = of_target >= 0
            if bool((owned & (owners >= 0)).any() and not torch.equal(owners[owned], of_target[owned])):
                raise self.no(f"modules disagree on which head an output of {node.path} belongs to")
            if bool(owned.any()):
                counts.add(count)
            owners = torch.where(owned, of_target, owners)
        if bool((owners < 0).any()) or len(counts) != 1:
            raise self.no(f"{int((owners < 0).sum())} outputs of {node.path} cannot be assigned to heads or features")
        return self._parts(node, owners.tolist(), counts.pop())

    def _by_head(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Turn [B, heads, T, size] into [B, T, features of a group, groups]; a group is a key/value head and its
        queries."""
        batch, heads, length, size = tensor.shape
        if heads % self._kv:
            raise self.no(f"it has {heads} heads for {self._kv} key/value heads")
        grouped = tensor.reshape(batch, self._kv, heads // self._kv, length, size)
        return grouped.permute(0, 3, 2, 4, 1), self._kv

    def _by_feature(self, row: Node) -> tuple[Tensor, int]:
        """Return a row map's inputs and the size of their last dimension (features; after attention key/value
        heads)."""
        if -2 not in self._reads(row.given):
            return row.given, row.given.shape[-1]
        return row.given.unflatten(-1, (self._kv, -1)).transpose(-1, -2), self._kv

    def _parts(self, node: Node, owners: list[int], count: int) -> tuple[int, ...] | None:
        begins = [0] + [i for i in range(1, len(owners)) if owners[i] < owners[i - 1]] + [len(owners)]
        for begin, end in itertools.pairwise(begins):
            part = owners[begin:end]
            if part != sorted(part) or {part.count(owner) for owner in range(count)} != {(end - begin) // count}:
                raise self.no(f"the outputs of {node.path} are in an order that cannot be cut into equal shards")
        sizes = tuple(end - begin for begin, end in itertools.pairwise(begins))
        return sizes if len(sizes) > 1 else None

    def check_row(self, node: Node) -> None:
        """Check that a row map after attention reads the heads in order."""
        if self.attended is None or -2 not in self._reads(node.given):
            return  # not after attention
        features = node.given.shape[-1]
        order = self._owners(node.given, features, self.attended)
        if order is None or order.tolist() != list(range(features)):
            raise self.no(f"{node.path} does not read the heads one after another")


@dataclass(frozen=True, kw_only=True)
class Projections:
    """Paths of the modules that a tensor-parallel group shards, for all layers. (The anatomy has the experts.)"""

    maps: tuple[Map, ...]
    norms: tuple[InnerNorm, ...]
    entries: tuple[str, ...]
    """Complete maps of low-rank attention. Each rank's heads read parts of their outputs, so gradients are summed
    there."""
    attentions: tuple[str, ...]
    """Modules that call the attention function."""
    local_numbers: tuple[str, ...]
    """Attributes of these modules that are divided by the number of ranks: they count heads, or features of all heads.
    num_attention_heads and num_key_value_heads in their copy of the config are divided, too."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    widths: tuple[int, ...]
    """Numbers of sharded features of maps outside attention; each must be a multiple of the number of ranks."""
    note: str
    """A line with the reason, if the attention of some layers cannot be sharded; else ""."""


@dataclass(frozen=True)
class _OfLayer:
    """`Projections` of one layer of the small copy, with paths within the layer."""

    maps: list[Map]
    norms: list[InnerNorm]
    entries: list[str]
    attention: str
    """"" if attention is not sharded."""
    numbers: tuple[str, ...]
    note: str
    """The reason if attention is not sharded, else ""."""


@with_values()
def projections(hf: PreTrainedModel, anatomy: Anatomy) -> Projections:
    """Find the parts of a model that tensor-parallel ranks can shard. `hf` may be on the meta device. Raises ModelError
    if no layer has such a part."""
    small = probe_copy(hf)
    config = small.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kinds: dict[frozenset[tuple[str, int]], _OfLayer] = {}
    with contextlib.ExitStack() as stack:
        attended = stack.enter_context(attention_seen(small, cut=True))
        try:
            calls = _calls(small, anatomy.layer_list)
        except ModelError:  # attention code of its own may need another mask
            stack.close()
            attended, calls = [], _calls(small, anatomy.layer_list)
        for call in calls:
            layer = small.get_submodule(call.path)
            if (kind := structure(layer)) in kinds:
                continue
            try:
                kinds[kind] = _of_layer(layer, call, heads, kv_heads, attended)
            except ModelError as error:
                kinds[kind] = _of_layer(layer, call, heads, kv_heads, attended, str(error))
    reason = next((kind.note for kind in kinds.values() if kind.note), "")
    if reason and not any(kind.maps for kind in kinds.values()) and not any(part.experts for part in anatomy.layers):
        raise ModelError(reason)
    return _of_whole_model(hf, anatomy, kinds, reason)


def _calls(small: PreTrainedModel, layer_list: str) -> list[Call]:
    with Watch(small, layer_paths(small, layer_list)) as watch:
        run_copy(small, probe_tokens(small))
    return watch.calls


def _of_layer(
    layer: nn.Module, call: Call, heads: int, kv_heads: int, attended: list[Attended], reason: str = ""
) -> _OfLayer:
    graph = LayerGraph(layer, call, kv_heads, attended, mlps_of(layer, call) if reason else None)
    maps, norms = _maps(graph), _norms(graph)
    divided = rehearse(layer, call, maps, norms, graph.attention, heads=(heads, kv_heads))
    entries = [node.path for node in graph.nodes if node.role == "entry"]
    return _OfLayer(maps, norms, entries, graph.attention, divided, reason)


def _maps(graph: LayerGraph) -> list[Map]:
    maps = []
    for node in graph.nodes:
        if node.role in ("column", "inside", "row"):
            column = node.role != "row"
            maps.append(
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
    return maps


def _norms(graph: LayerGraph) -> list[InnerNorm]:
    norms = []
    for node in graph.nodes:
        if node.role == "behind":
            norms.append(InnerNorm(path=node.path, kind="each_head"))
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
            raise graph.no(f"{node.path} has a shape that is neither that of a head nor of all features")
        norms.append(InnerNorm(path=node.path, kind=kind))
    return norms


def _of_whole_model(
    hf: PreTrainedModel, anatomy: Anatomy, kinds: dict[frozenset[tuple[str, int]], _OfLayer], note: str
) -> Projections:
    maps: list[Map] = []
    norms: list[InnerNorm] = []
    entries, attentions, widths = [], [], set()
    for part in anatomy.layers:
        layer = hf.get_submodule(part.path)
        of_kind = kinds.get(structure(layer))
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
    if note:
        count, reason = len(anatomy.layers), note.removeprefix("model: ").removesuffix(".")
        note = (
            f"the attention of {count - len(attentions)} of {count} layers is complete on every rank; their MLPs and "
            f"experts are sharded ({reason})"
        )
    return Projections(
        maps=_unique(maps),
        norms=_unique(norms),
        entries=tuple(entries),
        attentions=tuple(attentions),
        local_numbers=tuple(sorted({number for kind in kinds.values() for number in kind.numbers})),
        heads=heads,
        kv_heads=kv_heads if attentions else 0,
        widths=tuple(sorted(widths)),
        note=note,
    )


def _alike(path: str, layer: nn.Module) -> list[str]:
    """Return the paths in a layer of the full model that equal `path`, with every index in place of the one in each
    ModuleList (experts, heads)."""
    paths = [""]
    for name in path.split("."):
        below = []
        for parent in paths:
            module = layer.get_submodule(parent)
            several = isinstance(module, nn.ModuleList)
            names = [child for child, _ in module.named_children()] if several else [name]
            below += [f"{parent}.{child}" if parent else child for child in names]
        paths = below
    return paths


def _unique(items: list[Any]) -> tuple[Any, ...]:
    return tuple({entry.path: entry for entry in items}.values())


def _full_sections(entry: Map, module: Any) -> tuple[int, ...] | None:
    if entry.sections is None:
        return None
    total, small = module.weight.shape[1 if entry.transposed else 0], sum(entry.sections)
    full = tuple(section * total // small for section in entry.sections)
    if sum(full) != total:
        raise ModelError(f"model: {entry.path} has {total} outputs, which is not a multiple of its {len(full)} parts.")
    return full


# The MLPs of a decoder, found by a forward pass, not by their names.


if TYPE_CHECKING:
    from transformers import PreTrainedModel


@with_values()
def dense_mlps(hf: PreTrainedModel) -> list[nn.Module]:
    """Return all dense MLPs of the decoder, which may be on the meta device. Raises ModelError if there are none."""
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
            "(experts need all tokens at once; some models have no module for their MLP). Set it to null."
        )
    every = dict(hf.named_modules())
    places = ((every.get(f"{layer}.{path}"), kind) for layer in _layer_paths(hf) for path, kind in kinds)
    return [module for module, kind in places if module is not None and type(module) is kind]


def _layer_paths(hf: nn.Module) -> list[str]:
    layers = set(decoder_layers(hf))
    return [path for path, module in hf.named_modules() if module in layers]


def mlps_of(layer: nn.Module, call: Call) -> list[str]:
    """Return the paths of the MLPs within a layer of a small copy. An MLP maps [B, T, H] to [B, T, H] token by token,
    through at least two matrices, and contains no experts. `call`: a run of the layer."""
    experts = {block.module for block in expert_blocks(layer)}
    with torch.no_grad(), Watch(layer, [path for path, _ in layer.named_modules() if path]) as watch:
        layer(*call.args, **call.kwargs)
    calls = {inner.path: inner for inner in watch.calls}
    mlps: list[str] = []
    for path, module in layer.named_modules():
        inside = any(path.startswith(f"{mlp}.") for mlp in mlps)
        if path in calls and not inside and experts.isdisjoint(module.modules()) and _is_mlp(module, calls[path]):
            mlps.append(path)
    return mlps


def _is_mlp(module: nn.Module, call: Call) -> bool:
    hidden, result = call.hidden, call.result
    if hidden is None or result is None or len(call.args) != 1 or call.kwargs or call.output is not result:
        return False
    if hidden.shape != result.shape or sum(p.dim() == 2 for p in module.parameters()) < 2:
        return False
    with torch.no_grad():  # run again, because some layers add to `result` in place
        parts = torch.cat([module(part) for part in hidden.split(5, dim=1)], dim=1)
        return torch.allclose(parts, module(hidden), rtol=1e-4, atol=1e-5)
