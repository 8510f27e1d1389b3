"""Tensor parallelism: the layers' linear layers, the experts and the vocabulary, sharded over a group of ranks.

The linear layers are DeepSpeed's AutoTP layers with our own forward. That of DeepSpeed 0.19.8 (module_inject/layers.py)
reduces the gradient of an input once for each layer that reads it (three times for query, key and value), loses the sum
if the gradient is not contiguous, and under ZeRO 3 keeps every gathered weight until the backward pass, because it
saves a transposed view of the weight.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.base.units import divisors
from llmtrain.config.topology import Mix
from llmtrain.models.adapter import put_around
from llmtrain.models.parallel.deepspeed_private import overrides
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.parameters import Shard, frozen_tensors, set_shard, tensor_shapes
from llmtrain.models.skeleton import DTYPES
from llmtrain.models.spec import ModelSpec
from llmtrain.models.structure.decoder_parts import Anatomy
from llmtrain.models.structure.projections import Projections
from llmtrain.models.structure.sharding_proof import divide_heads
from llmtrain.storage.region import Region, shard, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Span:
    """A part of a decoder layer in which each rank has its own shard of the activations.

    It begins where a column layer reads the replicated activation, and ends where the next row layer sums the ranks'
    outputs. Layers that read the same activation share one sum of its gradient. Inside, each rank's dropout draws its
    own random numbers; outside, all ranks draw the same.
    """

    def __init__(self, group: Any, *, dropout: bool) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.degree = dist.get_world_size(group)
        self._dropout = dropout
        self._read: tuple[Tensor, Tensor] | None = None
        self._outside: Any = None

    def enter(self, replicated: Tensor, *, training: bool) -> Tensor:
        """Return the input for a layer whose output is this rank's shard."""
        if self._dropout and training and self._outside is None:
            self._outside = _own_stream(replicated.device, self.rank)
        if not (torch.is_grad_enabled() and replicated.requires_grad):
            return replicated
        if self._read is None or self._read[0] is not replicated:
            self._read = replicated, copied(replicated, self.group)
        return self._read[1]

    def leave(self) -> None:
        self._read = None
        if self._outside is not None:
            _common_stream(self._outside)
            self._outside = None


def copied(replicated: Tensor, group: Any) -> Tensor:
    """Return the tensor itself; in the backward pass the ranks' gradients are summed."""
    return _Copied.apply(replicated, group)


def summed(parts: Tensor, group: Any) -> Tensor:
    """Sum over the group, in place; the gradient is passed on as it is, since it is equal on all ranks."""
    return _Summed.apply(parts, group)


def gathered(shard: Tensor, group: Any, dim: int) -> Tensor:
    """Return all ranks' shards joined along `dim`, for a computation of which each rank then uses its own part."""
    return _Gathered.apply(shard, group, dim)


class Column(LinearLayer):
    """A linear layer with some of the outputs on this rank. The weight is [outputs, inputs], or transposed."""

    def __init__(self, linear: nn.Module, span: Span, *, transposed: bool, inside: bool, name: str) -> None:
        super().__init__(linear, span.group, skip_partition=True, name=name)
        self._span = span
        self._transposed = transposed
        self._inside = inside  # then the gradient of its input is summed elsewhere

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] replicated -> [..., outputs / degree]."""
        if not self._inside:
            input = self._span.enter(input, training=self.training)
        return _linear(input, self.weight, self.bias, self._transposed)

    @overrides(LinearLayer)
    def _mark_uc_metadata(self) -> None:
        """Do nothing: our checkpoints describe shards as regions (storage/region.py)."""


class Row(LinearAllreduce):
    """A linear layer with some of the inputs on this rank. The bias is added once, to the sum over the ranks."""

    def __init__(self, linear: nn.Module, span: Span, *, transposed: bool, name: str) -> None:
        super().__init__(linear, span.group, name=name)
        self._span = span
        self._transposed = transposed

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs / degree] -> [..., outputs] replicated."""
        self._span.leave()
        output = summed(_linear(input, self.weight, None, self._transposed), self._span.group)
        return output if self.bias is None else output + self.bias

    @overrides(LinearAllreduce)
    def _tp_partition(self, params_list: Sequence[Any]) -> None:
        """Do nothing: the parameter is a shard already."""

    @overrides(LinearAllreduce)
    def _mark_uc_metadata(self) -> None:
        """See Column."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Multiply by the weight. For the backward pass it saves the parameter, not a view, as ZeRO 3 frees the memory."""
    if not transposed:
        return F.linear(input, weight, bias)  # under ZeRO 3 this is DeepSpeed's, which saves no view
    flat = input.reshape(-1, input.shape[-1])
    output = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
    return output.view(*input.shape[:-1], weight.shape[1])


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicated: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return replicated.view_as(replicated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(parts)
        dist.all_reduce(parts, group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, shard.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous()  # each rank has the gradient only of its own use of the result
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None


def _own_stream(device: torch.device, rank: int) -> tuple[torch.Generator, Any]:
    """Seed the default generator for this rank from its current state, so that recomputation draws the same numbers.
    Returns the argument of `_common_stream`."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        seed, offset = generator.initial_seed(), generator.get_offset()  # the host knows both without waiting
        generator.manual_seed(_mixed(seed, offset, rank))
        return generator, (seed, offset + 4)  # advanced, so that the next span draws other numbers
    generator = torch.default_generator
    number = int(torch.randint(2**62, (), device="cpu"))
    state = generator.get_state()
    generator.manual_seed(_mixed(number, 0, rank))
    return generator, state


def _common_stream(outside: tuple[torch.Generator, Any]) -> None:
    generator, state = outside
    if generator.device.type == "cuda":
        seed, offset = state
        generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        generator.set_state(state)


def _mixed(seed: int, offset: int, rank: int) -> int:
    return (seed * 6_364_136_223_846_793_005 + offset * 1_442_695_040_888_963_407 + rank + 1) % 2**63


def sharded_model(
    spec: ModelSpec, mix: Mix, exact: dict[str, Any], device: torch.device, mesh: Mesh
) -> tuple[PreTrainedModel, str]:
    """Return the transformers model with this rank's uninitialised shards (partitioned under ZeRO 3), and a note if
    some attention is not sharded, else "". `exact`: the DeepSpeed JSON. Raises ModelError if this number of ranks
    cannot share the model."""
    hf = spec.own_skeleton()
    settle = _partition(exact, mesh) if mix.zero_stage == 3 else _leave
    anatomy, plan = spec.anatomy, spec.projections
    shard_model(hf, anatomy, plan, mesh.tensor, device, DTYPES[mix.precision], settle=settle)
    for buffer in hf.buffers():
        buffer.data = buffer.to(device)
    if spec.adapter.r is not None:
        put_around(hf, spec.adapted, device, DTYPES[mix.precision], functools.partial(share_adapter, plan, mesh.tensor))
        hf.whole_shapes = spec.shapes  # type: ignore[assignment]
    return hf, plan.note


def _leave(parameter: nn.Parameter) -> None:
    pass


def _partition(exact: dict[str, Any], mesh: Mesh) -> Callable[[nn.Parameter], None]:
    """Return a function that partitions a new parameter for ZeRO 3 over the ranks with the same shard."""
    import deepspeed

    convert: Callable[..., None] | None = None

    def settle(parameter: nn.Parameter) -> None:
        nonlocal convert
        if convert is None:
            holder = nn.Module()
            holder.register_parameter("first", parameter)
            deepspeed.zero.Init(
                module=holder, data_parallel_group=mesh.data_and_sequence, config_dict_or_path=exact, mpu=mesh
            )
            convert = parameter.convert_to_zero_parameters  # type: ignore[attr-defined]
        else:
            convert(param_list=[parameter])

    return settle


def shard_model(
    hf: nn.Module,
    anatomy: Anatomy,
    plan: Projections,
    group: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    settle: Callable[[nn.Parameter], None] = _leave,
) -> None:
    """Replace the parameters of `hf`, which is on the meta device, by this rank's shards, and make its modules
    communicate.

    Args:
        anatomy, plan: structure of the complete model; `hf` may be a pipeline stage.
        settle: called with each new parameter (ZeRO 3 partitions it).

    Raises:
        ModelError: this number of ranks cannot share the model.
    """
    set_autotp_mode(training=True)
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    modules: dict[str, Any] = dict(hf.named_modules())
    experts = {layer.experts: modules[layer.experts] for layer in anatomy.layers if layer.experts in modules}
    check_degree(plan, degree, {path: _expert_width(path, module) for path, module in experts.items()})
    hf.whole_shapes = tensor_shapes(hf)  # type: ignore[assignment]
    # A score head has one row, and is complete on every rank, like the hidden state that it reads.
    tables = [path for path in (anatomy.embedding, anatomy.head) if path in modules]
    weights = {path: next(modules[path].parameters(), None) for path in tables}
    # Embedding and head may differ in rows: Moshi's embedding has one more. On other pipeline stages they have none.
    vocabularies = {path: VocabularyShard.of(len(w), group) for path, w in weights.items() if w is not None}
    shards = _map_shards(modules, plan, rank, degree) | _vocabulary_shards(modules, vocabularies)
    for module in experts.values():
        shards |= _expert_shards(module, rank, degree)
    shards |= _norm_shards(modules, plan, rank, degree)
    _replace_parameters(hf, shards, (rank, degree), device, dtype, settle)
    for frozen in frozen_tensors(hf).values():
        shape = tuple(frozen.shape)
        set_shard(frozen, Shard(shape=shape, region=whole(shape), copy=(rank, degree)))

    span = Span(group, dropout=_drops(hf.modules()))
    for entry in plan.maps:
        if entry.path in modules:
            options: dict[str, Any] = {"transposed": entry.transposed, "name": entry.path}
            kind = functools.partial(Column, inside=entry.inside) if entry.column else Row
            hf.set_submodule(entry.path, kind(modules[entry.path], span, **options))
    for path in plan.entries:
        if path in modules:
            modules[path].register_forward_hook(lambda _, args, output: _read(output, group))
    for path in plan.attentions:
        if path in modules:
            divide_heads(modules[path], plan.local_numbers, degree)
    for norm in plan.norms:  # norms over shared heads: sum the gradients, gather for the mean square
        if norm.path in modules and norm.kind in ("each_head", "across_heads"):
            for parameter in modules[norm.path].parameters():
                parameter.register_hook(lambda grad: _sum_of(grad, group))
            if norm.kind == "across_heads":
                _gather_around(modules[norm.path], group)
    for module in experts.values():
        _sum_around(module, group)
    if isinstance(embedding := modules.get(anatomy.embedding), nn.Embedding):
        shard_embedding(embedding, vocabularies[anatomy.embedding])
    if isinstance(head := modules.get(anatomy.head), nn.Linear):
        head.vocabulary = vocabularies[anatomy.head]  # type: ignore[assignment]  # for models/head.py


def share_adapter(plan: Projections, group: Any, path: str, layer: Any) -> None:
    """Cut the adapter of a linear layer (peft's `layer`, on the meta device) to this rank's part: the outputs of B of a
    column layer, or the inputs of A of a row layer. In a row layer the r features after A are summed over the ranks, in
    a column layer their gradient. Raises ModelError."""
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    entry = next((entry for entry in plan.maps if entry.path == path), None)
    if path in plan.entries or (entry is not None and entry.inside):
        raise ModelError(
            f"adapter.targets: {path} belongs to a low-rank attention, whose adapters tensor-parallel ranks cannot "
            "share. Name other maps in adapter.targets, or use ZeRO 3 instead of tensor_parallel."
        )
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    cuts: dict[nn.Module, tuple[Shard, tuple[int, ...]]] = {}
    if entry is not None and entry.column:
        cuts[b] = _cut(b.weight, 0, rank, degree, entry.sections)
        a.register_forward_hook(lambda _, args, output: _read(output, group))
    elif entry is not None:
        cuts[a] = _cut(a.weight, 1, rank, degree, entry.sections)
        a.register_forward_hook(lambda _, args, output: summed(output, group))
    for linear in (a, b):
        shape = tuple(linear.weight.shape)
        shard, local = cuts.get(linear, (Shard(shape=shape, region=whole(shape), copy=(rank, degree)), shape))
        linear.weight = nn.Parameter(torch.empty(local, device="meta"))
        set_shard(linear.weight, shard)
        linear.weight.tensor_model_parallel = linear in cuts  # see _replace_parameters


def check_degree(plan: Projections, degree: int, expert_widths: dict[str, int] | None = None) -> None:
    """Check that `degree` ranks can have equal parts of the model. Raises ModelError with the possible degrees."""
    numbers = {"query heads (num_attention_heads)": plan.heads, "key/value heads": plan.kv_heads}  # 0: not sharded
    numbers |= {"features within an MLP": math.gcd(*plan.widths)} if plan.widths else {}
    numbers |= {f"features within {path}": width for path, width in (expert_widths or {}).items()}
    common = math.gcd(*numbers.values())
    for what, number in numbers.items():
        if number % degree:
            legal = divisors(common, 2)
            raise ModelError(
                f"tensor_parallel.autotp_size = {degree} does not divide the model's {number} {what}. "
                + (f"Set it to one of {legal}" if legal else "No other degree works either: remove the key")
                + "; use more ranks with data parallelism, ZeRO 3 or a pipeline."
            )


_Shards = dict[nn.Parameter, tuple[Shard, tuple[int, ...]]]
"""Parameter of the complete model -> (this rank's shard, its shape). Parameters that are not in it stay complete."""


def _cut(parameter: Any, dim: int, rank: int, degree: int, sections: Any = None) -> tuple[Shard, tuple[int, ...]]:
    shape = tuple(parameter.shape)
    region, local = shard(shape, dim, rank, degree, sections)
    return Shard(shape=shape, region=region), local


def _map_shards(modules: dict[str, Any], plan: Projections, rank: int, degree: int) -> _Shards:
    shards: _Shards = {}
    for entry in plan.maps:
        if entry.path not in modules:
            continue
        module = modules[entry.path]
        outputs, inputs = (1, 0) if entry.transposed else (0, 1)
        dim = outputs if entry.column else inputs
        shards[module.weight] = _cut(module.weight, dim, rank, degree, entry.sections)
        if entry.bias and entry.column:
            shards[module.bias] = _cut(module.bias, 0, rank, degree, entry.sections)
    return shards


def _vocabulary_shards(modules: dict[str, Any], vocabularies: dict[str, VocabularyShard]) -> _Shards:
    """Return shards of the rows of embedding and head, which may be one parameter."""
    shards: _Shards = {}
    for path, mine in vocabularies.items():
        for parameter in modules[path].parameters():
            shape = tuple(parameter.shape)
            inner = math.prod(shape[1:])
            shard = Shard(shape=shape, region=Region(mine.first * inner, mine.count * inner))
            shards[parameter] = shard, (mine.count, *shape[1:])
    return shards


def _expert_width(path: str, experts: Any) -> int:
    """Return the number of features within each expert. All fused experts of transformers have the same names and
    layouts. Raises ModelError for experts of another form."""
    names = {name for name, _ in experts.named_parameters()}
    forms = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})
    if names not in forms or not hasattr(experts, "is_transposed") or getattr(experts, "has_post_expert_norm", False):
        raise ModelError(
            f"tensor_parallel.autotp_size: {path} ({type(experts).__name__}) keeps its experts in a form that llmtrain "
            "cannot shard over ranks. Remove the key and use ZeRO 3, or expert parallelism."
        )
    return int(experts.down_proj.shape[1 if experts.is_transposed else 2])


def _expert_shards(experts: Any, rank: int, degree: int) -> _Shards:
    """Return shards that give each rank a part of each expert's width."""
    into = experts.gate_up_proj if experts.has_gate else experts.up_proj
    outputs, inputs = (2, 1) if experts.is_transposed else (1, 2)
    width = into.shape[outputs]
    sections = (width // 2, width // 2) if experts.has_gate and experts.is_concatenated else None
    return {
        into: _cut(into, outputs, rank, degree, sections),
        experts.down_proj: _cut(experts.down_proj, inputs, rank, degree),
    }


def _norm_shards(modules: dict[str, Any], plan: Projections, rank: int, degree: int) -> _Shards:
    """Return shards of norms with weights for each head. Other ranks' norms are removed if each head has its own
    module."""
    shards: _Shards = {}
    lists: dict[str, list[str]] = {}
    for norm in plan.norms:
        if norm.path in modules and norm.kind == "own_heads":
            shards |= {p: _cut(p, 0, rank, degree) for p in modules[norm.path].parameters()}
        elif norm.path in modules and norm.kind == "one_head":
            lists.setdefault(norm.path.rpartition(".")[0], []).append(norm.path)
    for parent, paths in lists.items():
        count = len(paths) // degree
        for path in paths[rank * count : (rank + 1) * count]:
            for name, parameter in modules[path].named_parameters():
                shape = tuple(parameter.shape)
                shards[parameter] = Shard(shape=shape, region=whole(shape), name=f"{path}.{name}"), shape
        modules[""].set_submodule(parent, modules[parent][rank * count : (rank + 1) * count])
    return shards


def _replace_parameters(
    hf: nn.Module,
    shards: _Shards,
    place: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    settle: Callable[[nn.Parameter], None],
) -> None:
    """Replace every parameter by this rank's; modules that share one still share it."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in hf.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                assert parameter.is_meta, name
                shape = tuple(parameter.shape)
                shard, local = shards.get(parameter, (Shard(shape=shape, region=whole(shape), copy=place), shape))
                new = nn.Parameter(torch.empty(local, dtype=dtype, device=device), parameter.requires_grad)
                set_shard(new, shard)
                # DeepSpeed's gradient norm counts parameters with this mark on every rank, the others on the first.
                new.tensor_model_parallel = parameter in shards  # type: ignore[attr-defined]
                settle(new)
                made[parameter] = new
            setattr(module, name, made[parameter])


def _drops(modules: Iterable[nn.Module]) -> bool:
    """Return True if any module has dropout. transformers keeps the rates of attention as plain attributes."""
    for module in modules:
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False


def _sum_of(grad: Tensor, group: Any) -> Tensor:
    grad = grad.clone()
    dist.all_reduce(grad, group=group)
    return grad


def _gather_around(module: nn.Module, group: Any) -> None:
    """Let a module that normalises across heads see the heads of all ranks; it returns this rank's part."""
    inner = module.forward
    rank, degree = dist.get_rank(group), dist.get_world_size(group)

    def forward(module: nn.Module, part: Tensor) -> Tensor:
        return inner(gathered(part, group, -1)).chunk(degree, -1)[rank]

    module.forward = types.MethodType(forward, module)


def _sum_around(experts: nn.Module, group: Any) -> None:
    """Sum over the ranks the output of experts that each have a part of the width, and the gradients of their inputs
    and of the router's weights."""
    inner = experts.forward

    def forward(experts: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(_read(value, group) for value in args)
        kwargs = {name: _read(value, group) for name, value in kwargs.items()}
        return summed(inner(*args, **kwargs).contiguous(), group)

    experts.forward = types.MethodType(forward, experts)


def _read(value: Any, group: Any) -> Any:
    differentiable = torch.is_tensor(value) and value.requires_grad and torch.is_grad_enabled()
    return copied(value, group) if differentiable else value


# A vocabulary sharded over a tensor-parallel group: rows of embedding and head, and the loss. The method is
# Megatron-LM's (arXiv 1909.08053, section 3), in the chunks of models/loss.py: a rank has the logits of its own token
# ids, and the group sums two numbers a token for the softmax.


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's token ids of the vocabulary: [first, first + count) of `total`. The first ranks may hold one more."""

    group: Any
    first: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, group: Any) -> VocabularyShard:
        rank, degree = dist.get_rank(group), dist.get_world_size(group)
        counts = _counts(total, degree)
        return cls(group, sum(counts[:rank]), counts[rank], total)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits over the whole vocabulary, [..., V], without a gradient."""
        part = F.linear(hidden, weight, bias).detach()
        counts = _counts(self.total, dist.get_world_size(self.group))
        parts = [part.new_empty(*part.shape[:-1], counts[0]) for _ in counts]
        dist.all_gather(parts, F.pad(part, (0, counts[0] - self.count)), group=self.group)
        return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], dim=-1)

    def shared(self, hidden: Tensor) -> Tensor:
        """Return the hidden state, which is equal on all ranks, as input for `chunked_nll_sums` on the shards."""
        return copied(hidden, self.group)

    def take_largest(self, values: Tensor) -> None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)

    def add_up(self, values: Tensor) -> None:
        dist.all_reduce(values, group=self.group)


def _counts(total: int, degree: int) -> list[int]:
    share, more = divmod(total, degree)
    return [share + (rank < more) for rank in range(degree)]


def shard_embedding(embedding: nn.Embedding, vocabulary: VocabularyShard) -> None:
    """Make an embedding whose weight is a shard look up all token ids: for ids of other ranks it adds zeros. The
    embedding's own forward is still called, because some scale their output (Gemma 3)."""
    inner = embedding.forward
    padding = embedding.padding_idx
    if padding is not None:
        is_local = vocabulary.first <= padding < vocabulary.first + vocabulary.count
        embedding.padding_idx = padding - vocabulary.first if is_local else None

    def forward(embedding: nn.Embedding, input: Tensor) -> Tensor:
        row = input - vocabulary.first
        elsewhere = (row < 0) | (row >= vocabulary.count)
        return summed(inner(row.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0), vocabulary.group)

    embedding.forward = types.MethodType(forward, embedding)  # type: ignore[method-assign]
