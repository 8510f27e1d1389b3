"""The dependencies within one decoder layer: its graph, cut behind every module that has parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.structure.probe import Attended, Call, with_hidden

_SMALL = 1e-3
"""Largest distance of an index read from gradients to a whole number."""


@dataclass(eq=False)
class Node:
    """A module with parameters of its own, in one run."""

    path: str
    """Within the layer."""
    module: nn.Module
    linear: bool
    transposed: bool
    in_list: bool
    """It is an item of a module list."""
    inputs: list[Tensor]
    """Its inputs: experts get the router's weights, too."""
    leaves: list[Tensor] = field(default_factory=list)
    """Its output, as a new leaf of the graph."""
    role: str = ""
    """"column", "row", "inner" (acts on a shard of the features), "stream" (on what all ranks hold), or in low-rank
    attention "entry" (a whole map of whose output the heads read a part as it is), "behind" (acts on what an entry
    gave) and "inside" (a column map that reads that)."""

    @property
    def given(self) -> Tensor:
        """The first of its inputs."""
        return self.inputs[0]


class LayerGraph:
    """One run of a layer. Raises ModelError where its maps are connected in a way that ranks cannot shard."""

    def __init__(
        self, layer: nn.Module, call: Call, kv_heads: int, attended: list[Attended], mlps: list[str] | None = None
    ) -> None:
        """`mlps`: paths of the only modules to be sharded; all else stays whole."""
        assert call.hidden is not None
        self._layer, self._call, self._kv, self._attended, self._mlps = layer, call, kv_heads, attended, mlps
        self.tokens = call.hidden.shape[0] * call.hidden.shape[1]
        self._draw = torch.Generator().manual_seed(5)
        self.nodes: list[Node] = []
        self._run()
        self._give_roles()
        self._first = self.nodes
        inner = {node.path for node in self.nodes if node.role == "inner"}
        if inner:  # a second run without them shows which output goes to which head
            roles = {node.path: node.role for node in self.nodes}
            norms = [node for node in self.nodes if node.role == "inner"]
            self._run(passed=inner)
            for node in self.nodes:
                node.role = roles[node.path]
            self.nodes += norms

    def no(self, reason: str) -> ModelError:
        return ModelError(f"model: {self._call.path} cannot be sharded: {reason}.")

    def _run(self, passed: set[str] | None = None) -> None:
        assert self._call.hidden is not None
        self.nodes = []
        handles = []
        for path, module in self._layer.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                record = self._passing() if passed and path in passed else self._recording(path, module)
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

    def _passing(self) -> Callable[..., Any]:
        return lambda module, args, kwargs, output: args[0]

    def _recording(self, path: str, module: nn.Module) -> Callable[..., Any]:
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
            return self._cut(output, node)

        return record

    def _cut(self, value: Any, node: Node) -> Any:
        if isinstance(value, tuple):
            return tuple(self._cut(item, node) for item in value)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        # Behind a map any value will do; a rectifier must not be shut for all tokens.
        new = torch.randn(value.shape, generator=self._draw) if node.linear else value.detach().clone()
        node.leaves.append(new.requires_grad_())
        return new.clone()  # which the layer may change in place (OLMo's clip_qkv), as it may not change a leaf

    def _reads(self, value: Tensor) -> set[int]:
        """The nodes (by index; -1: the hidden state, -2: attention) that a value is made of."""
        if not value.requires_grad:
            return set()
        begins = [(-1, self.hidden), *([] if self.attended is None else [(-2, self.attended)])]
        begins += [(index, leaf) for index, node in enumerate(self.nodes) for leaf in node.leaves]
        weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(2)) + 0.5
        leaves = [leaf for _, leaf in begins]
        grads = torch.autograd.grad((value * weights).sum(), leaves, allow_unused=True, retain_graph=True)
        return {index for (index, _), grad in zip(begins, grads, strict=True) if grad is not None}

    def _give_roles(self) -> None:
        """Classify the nodes from first to last; a map whose output joins what all ranks hold turns out to be whole."""
        reads = [set().union(*(self._reads(value) for value in node.inputs)) for node in self.nodes]
        end = self._reads(self.output)
        heads = [self._reads(tensor) for tensor in self.heads]
        kept = set() if self._mlps is None else set(range(len(self.nodes)))
        bare = {node.path for node in self.nodes}  # a parameter of the MLP itself may act anywhere in it
        for mlp in set(self._mlps or ()) - bare:
            kept -= {index for index, node in enumerate(self.nodes) if node.path.startswith(f"{mlp}.")}
        while True:
            stream, inner = {-1}, {-2}
            joined: set[int] = set()
            for index, (node, read) in enumerate(zip(self.nodes, reads, strict=True)):
                own = read & inner
                if not own:
                    node.role = "column" if node.linear and index not in kept else "stream"
                elif read <= inner:
                    node.role = "row" if node.linear else "inner"
                else:
                    joined |= own
                    node.role = "stream"
                (inner if node.role in ("column", "inner") else stream).add(index)
            joined |= end & inner
            for index in set().union(*heads) - inner - {-1}:  # heads made by two maps (low-rank): the first is whole
                joined |= reads[index] & inner
            for index in reversed(range(len(self.nodes))):  # and with a norm what it reads
                if index in joined and self.nodes[index].role == "inner":
                    joined |= reads[index] & inner
            joined = {index for index in joined if index >= 0}
            if not joined:
                break
            if not joined - kept:
                raise self.no("its maps are connected in a way that is not understood")
            kept |= joined
        self._check_heads(reads, end, heads)

    def _check_heads(self, reads: list[set[int]], end: set[int], heads: list[set[int]]) -> None:
        """Queries, keys and values come from column maps. In low-rank attention all heads have a part of what a whole
        map gives besides (a rotary key): its gradient, and that of what else is made of it, is a sum over the ranks."""
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
                    raise self.no(f"{node.path} reads what its heads read, too")
                node.role = "inside" if node.role == "column" else "behind"
                behind |= {index} if node.role == "behind" else set()
        if end & behind:
            raise self.no("its output and its heads are made of the same")

    def heads_and_size(self, node: Node) -> tuple[int, int]:
        """(heads, features of one) where an inner module acts: on queries, or on keys and values."""
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
        """For each feature of `source` [F] the one index along the last dimension of `target` (`count` long) that it
        has a part in; -1: in none. Returns None where a feature has a part in several.

        The elements of `target` are summed twice, the second time weighted with their index: the quotient of the
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
        found = quotient.abs().amax(0).round()
        off = torch.where(strong, (quotient - found).abs(), 0)
        if bool((off > (_SMALL * found).clamp(_SMALL, 0.25)).any()):
            return None
        return torch.where(plain.abs().amax(0) > 1e-20, found.long() - 1, -1)

    def sections(self, node: Node) -> tuple[int, ...] | None:
        """The parts of a column map's outputs within which shards lie side by side."""
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
                raise self.no(f"an output of {node.path} goes to several heads or features of what reads it")
            own = of_target >= 0
            if bool((own & (owners >= 0)).any() and not torch.equal(owners[own], of_target[own])):
                raise self.no(f"an output of {node.path} goes to several places")
            if bool(own.any()):
                counts.add(count)
            owners = torch.where(own, of_target, owners)
        if bool((owners < 0).any()) or len(counts) != 1:
            raise self.no(f"what {int((owners < 0).sum())} outputs of {node.path} are for is not to be found")
        return self._parts(node, owners.tolist(), counts.pop())

    def _by_head(self, tensor: Tensor) -> tuple[Tensor, int]:
        """[B, heads, T, size] -> [B, T, features of a group, groups]: a group is a key/value head and its queries."""
        batch, heads, length, size = tensor.shape
        if heads % self._kv:
            raise self.no(f"it has {heads} heads for {self._kv} key/value heads")
        grouped = tensor.reshape(batch, self._kv, heads // self._kv, length, size)
        return grouped.permute(0, 3, 2, 4, 1), self._kv

    def _by_feature(self, row: Node) -> tuple[Tensor, int]:
        """The inputs of a row map: feature by feature, or behind attention by their key/value head."""
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
        """A row map behind attention must read the heads one after another."""
        if self.attended is None or -2 not in self._reads(node.given):
            return  # not behind attention
        features = node.given.shape[-1]
        order = self._owners(node.given, features, self.attended)
        if order is None or order.tolist() != list(range(features)):
            raise self.no(f"{node.path} does not read the heads one after another")
