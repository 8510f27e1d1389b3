"""Tensor parallelism: the decoder layers' linear maps, the experts and the vocabulary, shared by a group of ranks."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import set_autotp_mode
from torch import Tensor, nn

from llmtrain.config.run import ResolvedRun
from llmtrain.models.build import DTYPES, skeleton
from llmtrain.models.mesh import Mesh
from llmtrain.models.parameters import Share, set_share
from llmtrain.models.region import Region, shard, whole
from llmtrain.models.tensor_layers import Column, Row, Span, copied, gathered, summed
from llmtrain.models.vocabulary import Words, share_embedding


def shared_model(resolved: ResolvedRun, device: torch.device, mesh: Mesh) -> Any:
    """The transformers model with this rank's shards, uninitialised; under ZeRO 3 with its partitions of them.

    Raises:
        ModelError: the model cannot be shared over so many ranks.
    """
    model = resolved.run.model
    hf = skeleton(model, attention=model.attention)
    settle = _partition(resolved, mesh) if resolved.zero_stage == 3 else None
    shard_model(hf, plan_of(hf), mesh.tensor, device, DTYPES[resolved.precision], settle=settle)
    for buffer in hf.buffers():
        buffer.data = buffer.to(device)
    return hf


def _partition(resolved: ResolvedRun, mesh: Mesh) -> Callable[[nn.Parameter], None]:
    """ZeRO 3's partitioning of one new parameter over the ranks that hold the same shard."""
    import deepspeed

    convert: Callable[..., None] | None = None

    def settle(parameter: nn.Parameter) -> None:
        nonlocal convert
        if convert is None:
            holder = nn.Module()
            holder.register_parameter("first", parameter)
            deepspeed.zero.Init(
                module=holder,
                data_parallel_group=mesh.data_and_sequence,
                config_dict_or_path=resolved.deepspeed,
                mpu=mesh,
            )
            convert = parameter.convert_to_zero_parameters  # type: ignore[attr-defined]
        else:
            convert(param_list=[parameter])

    return settle


@dataclass(frozen=True, kw_only=True)
class Map:
    """A linear map inside a decoder layer."""

    path: str
    column: bool
    """Its outputs are shared; else its inputs are."""
    transposed: bool = False
    """The weight is [inputs, outputs] (transformers' Conv1D)."""
    sections: tuple[int, ...] | None = None
    """Outputs of the parts of a fused map: each of them is shared."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the group shares of a model, by module paths. All that a pipeline stage lacks of it is passed over."""

    maps: tuple[Map, ...]
    attentions: tuple[str, ...]
    """Modules that compute attention over a rank's heads."""
    local_numbers: tuple[str, ...] = ()
    """Their attributes that count heads, or features of all heads."""
    partial: tuple[str, ...] = ()
    """Modules that act on a rank's heads with parameters that all ranks hold: each rank has a part of the gradient."""
    across_heads: tuple[tuple[str, int], ...] = ()
    """(module, dimension) of those that need all heads at once."""
    experts: tuple[str, ...] = ()
    """Modules with the weights of all experts of a layer: [experts, 2 x width or width, hidden] and back."""


def shard_model(
    hf: nn.Module,
    plan: Plan,
    group: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    settle: Callable[[nn.Parameter], None] | None = None,
) -> None:
    """Leave this rank's shards in `hf`, and let its modules work on them together with the group's other ranks.

    Args:
        hf: its parameters are on the meta device; they become uninitialised ones of `dtype` on `device`.
        settle: called with each new parameter (ZeRO 3 takes the rank's partition of it right there).
    """
    set_autotp_mode(training=True)
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    modules = dict(hf.named_modules())
    cuts = _cuts(hf, modules, plan, rank, degree)
    words = _share_words(hf, modules, group, cuts)
    settle = settle or (lambda parameter: None)

    def local(parameter: nn.Parameter) -> nn.Parameter:
        new = _local(parameter, cuts.get(id(parameter)), (rank, degree), device, dtype)
        settle(new)
        return new

    _replace_parameters(hf, local)
    span = Span(group, dropout=_drops(modules.values()))
    for entry in plan.maps:
        if entry.path in modules:
            layer = (Column if entry.column else Row)(
                modules[entry.path], span, transposed=entry.transposed, name=entry.path
            )
            parent, _, name = entry.path.rpartition(".")
            setattr(modules[parent], name, layer)
    for path in filter(modules.__contains__, plan.attentions):
        _divide_heads(modules[path], plan.local_numbers, degree)
    for path in filter(modules.__contains__, plan.partial):
        for parameter in modules[path].parameters():
            parameter.register_hook(lambda grad: _sum_of(grad, group))
    for path, dim in plan.across_heads:
        if path in modules:
            _gather_around(modules[path], group, dim)
    for path in filter(modules.__contains__, plan.experts):
        _sum_around(modules[path], group)
    if words is not None:
        _use_words(hf, words)


_Cutting = tuple[Region, tuple[int, ...]]
"""(region, local shape)"""


def _cuts(hf: nn.Module, modules: dict[str, nn.Module], plan: Plan, rank: int, degree: int) -> dict[int, _Cutting]:
    """By parameter; what is not named is held by all ranks."""
    cuts: dict[int, _Cutting] = {}
    for entry in plan.maps:
        if entry.path not in modules:
            continue
        module: Any = modules[entry.path]
        outputs, inputs = (1, 0) if entry.transposed else (0, 1)
        weight, bias = module.weight, module.bias
        cuts[id(weight)] = shard(tuple(weight.shape), outputs if entry.column else inputs, rank, degree, entry.sections)
        if bias is not None and entry.column:
            cuts[id(bias)] = shard(tuple(bias.shape), 0, rank, degree, entry.sections)
    for path in filter(modules.__contains__, plan.experts):
        cuts.update(_expert_cuts(modules[path], rank, degree))
    return cuts


def _expert_cuts(experts: Any, rank: int, degree: int) -> dict[int, _Cutting]:
    """Each expert's width is shared (transformers names and lays out the weights of all experts alike)."""
    into = experts.gate_up_proj if experts.has_gate else experts.up_proj
    outputs, inputs = (2, 1) if experts.is_transposed else (1, 2)
    width = into.shape[outputs]
    sections = (width // 2, width // 2) if experts.has_gate and experts.is_concatenated else None
    down = experts.down_proj
    return {
        id(into): shard(tuple(into.shape), outputs, rank, degree, sections),
        id(down): shard(tuple(down.shape), inputs, rank, degree),
    }


def _share_words(hf: Any, modules: dict[str, nn.Module], group: Any, cuts: dict[int, _Cutting]) -> Words | None:
    total = hf.config.get_text_config().vocab_size
    words = Words.of(total, group)
    for module in (hf.get_input_embeddings(), hf.get_output_embeddings()):
        for parameter in module.parameters():
            inner = parameter.numel() // parameter.shape[0]
            local = (words.count, *parameter.shape[1:])
            cuts[id(parameter)] = Region(words.first * inner, words.count * inner), local
    return words


def _replace_parameters(hf: nn.Module, local: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Every parameter becomes this rank's, once, however many modules hold it."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in hf.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in new:
                    new[parameter] = local(parameter)
                module._parameters[name] = new[parameter]


def _local(
    parameter: nn.Parameter, cut: _Cutting | None, place: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    assert parameter.is_meta
    shape = tuple(parameter.shape)
    region, here = cut or (whole(shape), shape)
    new = nn.Parameter(torch.empty(here, dtype=dtype, device=device), parameter.requires_grad)
    if cut is None:
        set_share(new, Share(shape=shape, region=region, copy=place))
    else:
        new.tensor_model_parallel = True  # type: ignore[attr-defined]  # DeepSpeed's norm counts it on every rank
        set_share(new, Share(shape=shape, region=region))
    return new


def _drops(modules: Any) -> bool:
    """Whether any module drops something at random. transformers keeps the rates of attention as plain attributes."""
    for module in modules:
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False


def _divide_heads(attention: Any, names: tuple[str, ...], degree: int) -> None:
    for name in names:
        setattr(attention, name, getattr(attention, name) // degree)
    if hasattr(attention, "config"):
        local = copy.copy(attention.config)
        for name in ("num_attention_heads", "num_key_value_heads"):
            if isinstance(count := getattr(local, name, None), int):
                setattr(local, name, count // degree)
        attention.config = local


def _sum_of(grad: Tensor, group: Any) -> Tensor:
    grad = grad.clone()
    dist.all_reduce(grad, group=group)
    return grad


def _gather_around(module: nn.Module, group: Any, dim: int) -> None:
    """Let a module that normalises across heads see all of them; this rank goes on with its part of the result."""
    own = module.forward
    rank, degree = dist.get_rank(group), dist.get_world_size(group)

    def forward(module: nn.Module, share: Tensor) -> Tensor:
        return own(gathered(share, group, dim)).chunk(degree, dim)[rank]

    module.forward = types.MethodType(forward, module)


def _sum_around(experts: nn.Module, group: Any) -> None:
    """Each rank has a share of every expert's width: what the experts give is a part of the sum, and so are the
    gradients of their inputs and of the router's weights."""
    own = experts.forward

    def forward(experts: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(_copied_if_needed(value, group) for value in args)
        kwargs = {name: _copied_if_needed(value, group) for name, value in kwargs.items()}
        return summed(own(*args, **kwargs).contiguous(), group)

    experts.forward = types.MethodType(forward, experts)


def _copied_if_needed(value: Any, group: Any) -> Any:
    differentiable = torch.is_tensor(value) and value.requires_grad and torch.is_grad_enabled()
    return copied(value, group) if differentiable else value


def _use_words(hf: Any, words: Words) -> None:
    share_embedding(hf.get_input_embeddings(), words)
    hf.get_output_embeddings().words = words


def plan_of(hf):  # PROTOTYPE
    maps, attentions = [], []
    for index in range(len(hf.model.layers)):
        base = f"model.layers.{index}"
        maps += [Map(path=f"{base}.self_attn.{n}_proj", column=n != "o") for n in "qkvo"]
        maps += [Map(path=f"{base}.mlp.{n}_proj", column=n != "down") for n in ("gate", "up", "down")]
        attentions.append(f"{base}.self_attn")
    return Plan(maps=tuple(maps), attentions=tuple(attentions))
