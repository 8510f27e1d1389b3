"""Expert parallelism: each rank holds some experts of each block, and tokens are sent to them.

DeepSpeed's AutoEP replaces the blocks (module_inject/auto_ep*.py). llmtrain does this before the engine is built, so
that no rank ever holds all experts (except one block at a time under ZeRO 3), and the optimizer's groups are made from
the local parameters.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.config.topology import Mix
from llmtrain.models.experts import ExpertBlock, expert_blocks, experts_per_token, fit_grouped_product, set_leaf_modules
from llmtrain.models.parallel.deepspeed_private import (
    TravellingTokens,
    activate_in_pytorch,
    rank_among_experts,
    ranks_with_the_same_experts,
    replace_block,
)
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.parameters import Shard, frozen_tensors, set_shard
from llmtrain.models.routing import Routing
from llmtrain.models.skeleton import DTYPES, materialise
from llmtrain.models.structure.small_copy import probe_copy
from llmtrain.models.transformers_private import with_values
from llmtrain.storage.region import Region, whole

if TYPE_CHECKING:
    from deepspeed.module_inject.auto_ep import AutoEP
    from transformers import PreTrainedModel

_TOKENS = 24
_ROUNDING = 1e-3
"""Tolerance of logits and gradients relative to their spread. Measured: at most 6e-5 if the function is the same, at
least 0.2 if not."""


def prepare_experts(
    hf: PreTrainedModel, blocks: list[ExpertBlock], mix: Mix, section: dict[str, Any], device: torch.device, mesh: Mesh
) -> Routing:
    """Shard the experts, or make them leaf modules of ZeRO 3, and return the watch over their routers. `section`: the
    JSON's `expert_parallel`. Raises ModelError if the experts do not support the run's settings."""
    check_gradients(blocks, mix)
    if mix.degrees.expert > 1:
        shard_experts(hf, find_experts(hf, mix, section), mix, section, device)
        blocks = sharded_blocks(hf)
    elif mix.zero_stage == 3:
        set_leaf_modules(hf, blocks)
    return Routing(blocks, hf.config, mesh.data_and_sequence)


def check_gradients(blocks: list[ExpertBlock], mix: Mix) -> None:
    """Check that each expert's parameters have a gradient on every rank if ZeRO needs it. Raises ModelError."""
    if mix.zero_stage in (1, 2) and mix.degrees.data > 1:
        for block in blocks:
            if block.are_modules:
                raise ModelError(
                    f"model: the experts of {block.name} are modules of their own, and one that gets no token on a "
                    "rank has no gradient there: ZeRO 1 and 2 of DeepSpeed 0.19 then silently add gradients of "
                    "different parameters. Set zero_optimization.stage to 3 or 0."
                )


def describe_experts(mix: Mix, routing: Routing) -> str:
    text = f"{routing.layers} blocks of {routing.experts} experts"
    if mix.degrees.expert > 1:
        text += f", sharded over {mix.degrees.expert} ranks (DeepSpeed's AutoEP)"
    elif mix.zero_stage == 3:
        text += ", each a leaf module of ZeRO 3: gathered completely for any choice of experts"
    if routing.coefficient:
        return f"{text}; load-balancing loss x {routing.coefficient}"
    return f"{text}; no load-balancing loss (the model's output_router_logits is false, or its coefficient 0)"


def sharded_blocks(hf: nn.Module) -> list[ExpertBlock]:
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    return [
        ExpertBlock(
            name=name, module=module, router=module.router.gate, experts=(module.experts,), count=module.num_experts
        )
        for name, module in hf.named_modules()
        if isinstance(module, AutoEPMoELayer)
    ]


def find_experts(hf: PreTrainedModel, mix: Mix, section: dict[str, Any]) -> tuple[AutoEP, list[Any]]:
    """Return DeepSpeed's AutoEP for a transformers model, with the blocks of experts that it has found. Raises
    ModelError: AutoEP does not know this family, its blocks compute another function, or the experts cannot be divided
    evenly."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import (
        parse_autoep_config,
        validate_autoep_config,
        validate_autoep_post_detection,
    )

    degree = mix.degrees.expert
    try:
        config = parse_autoep_config(_filled(hf, section, mix))
        validate_autoep_config(config, mix.degrees.world_size, 1, 1, 1, zero_stage=mix.zero_stage)
        surgeon = AutoEP(hf, config)
        specs = surgeon.ep_parser()
        validate_autoep_post_detection(config, specs)
        if specs:
            _prove_blocks(hf, section, degree)
    except ModelError:
        raise
    except ValueError as error:  # AutoEP's error for everything that it cannot do
        raise _refusal(hf, section, degree, str(error)) from error
    if not specs:
        raise ModelError(
            f"expert_parallel.autoep_size {degree}: {type(hf).__name__} has no experts that DeepSpeed finds. Remove "
            "the section: all ranks then hold all experts (ZeRO 3 partitions them)."
        )
    return surgeon, specs


def shard_experts(
    hf: PreTrainedModel, replaceable: tuple[AutoEP, list[Any]], mix: Mix, section: dict[str, Any], device: torch.device
) -> None:
    """Replace each block of experts by one with only this rank's experts. `replaceable`: result of `find_experts` for
    the model before a pipeline removed layers. Raises ModelError."""
    degree, zero3 = mix.degrees.expert, mix.zero_stage == 3
    rank = rank_among_experts(degree, mix.degrees.pipeline)
    if device.type != "cuda" or mix.precision != "bf16":
        activate_in_pytorch()
    surgeon = replaceable[0]
    paths = {name for name, _ in hf.named_modules()}
    specs = [spec for spec in replaceable[1] if spec.moe_module_name in paths]
    before = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in hf.named_parameters()}
    try:
        for spec in specs:
            frozen = frozen_tensors(hf.get_submodule(spec.moe_module_name))
            with torch.device(device if zero3 else "meta"):
                replace_block(surgeon, spec, degree, rank)
            block = hf.get_submodule(spec.moe_module_name)
            _name_parameters(block, spec, before, rank)
            _name_frozen(block, spec, frozen)
            if zero3:
                _partition(block, hf)
    except ValueError as error:  # AutoEP's error for everything that it cannot do
        raise _refusal(hf, section, degree, str(error)) from error
    if not zero3:
        materialise(hf, device, DTYPES[mix.precision])
    for spec in specs:
        block = hf.get_submodule(spec.moe_module_name)
        block.tokens_per_expert = torch.zeros(spec.num_experts, device=device)
        block.__class__ = TravellingTokens


@with_values()
def _prove_blocks(hf: PreTrainedModel, section: dict[str, Any], degree: int) -> None:
    """Compare AutoEP's blocks with transformers' before any part of the model is replaced. Raises ModelError if they
    compute something else, ValueError if AutoEP cannot handle a small copy."""
    preset = section.get("preset_model")
    try:
        apart = apart_from_transformers(hf, section)
    except ModelError as error:
        raise ModelError(
            f"expert_parallel.autoep_size {degree}: DeepSpeed's blocks of experts are compared with transformers' own "
            f"in a small copy of the model, but none can be made: {error}"
        ) from error
    except ValueError:
        raise
    except Exception as error:  # any error of two libraries about blocks that do not fit
        difference = f"they do not run ({type(error).__name__}: {' '.join(str(error).split())})"
    else:
        if apart <= _ROUNDING:
            return
        difference = f"its logits are off by {apart:.0%} of their spread"
    asked = f"expert_parallel.preset_model {preset!r}" if preset else f"expert_parallel.autoep_size {degree}"
    raise ModelError(
        f"{asked}: DeepSpeed's blocks of experts do not compute what transformers' {hf.config.model_type} does: in a "
        f"small copy of the model on one batch {difference}. {_offer(hf, section)}."
    )


def apart_from_transformers(hf: PreTrainedModel, section: dict[str, Any]) -> float:
    """Return how far a small copy's logits with AutoEP's blocks are from transformers', in their standard deviations
    (for a single logit in its size), or how far the embedding's gradients are, if farther. On the CPU, in fp32.

    Raises ValueError if AutoEP cannot replace the blocks, ModelError if there is no small copy, or any error of a
    forward pass.
    """
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    small = probe_copy(hf)
    draw = torch.Generator().manual_seed(2)
    for tensor in frozen_tensors(small).values():  # if the routers' correction is 0, its loss would not show
        tensor.add_(0.3 * torch.randn(tensor.shape, generator=draw))
    ids = torch.arange(_TOKENS).unsqueeze(0) * 7 % small.config.get_text_config().vocab_size
    expected = _pass(small, ids)
    keys = {key: value for key, value in section.items() if key != "combine_impl"}  # may need a GPU
    if keys.get("top_k") == experts_per_token(hf.config):
        keys.pop("top_k")  # the copy's may differ
    surgeon = AutoEP(small, parse_autoep_config({**keys, "enabled": True, "autoep_size": 1, "use_grouped_mm": False}))
    with torch.random.fork_rng(devices=[]):
        for spec in surgeon.ep_parser():
            replace_block(surgeon, spec, 1, 0)
    computed = _pass(small, ids)
    # A reward model's logit of one row has no spread.
    sizes = [other.std() if other.numel() > 1 else other.abs().max() for other in expected]
    apart = [(mine - other).abs().max() / size for mine, other, size in zip(computed, expected, sizes, strict=True)]
    return float(max(apart))


def _pass(small: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logits, the embedding's gradient of the mean squared logit)."""
    small.zero_grad()
    with torch.enable_grad():
        logits = small(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
    return logits.detach(), small.get_input_embeddings().weight.grad.clone()


def fitting_presets(hf: PreTrainedModel, section: dict[str, Any]) -> list[str]:
    """Return the AutoEP presets whose blocks match transformers' in a small copy."""
    from deepspeed.module_inject.auto_ep_config import available_preset_names

    presets = []
    for name in available_preset_names():
        with contextlib.suppress(Exception):  # it does not fit: AutoEP refuses it, or its forward pass fails
            if apart_from_transformers(hf, {**section, "preset_model": name}) <= _ROUNDING:
                presets.append(name)
    return presets


def _offer(hf: PreTrainedModel, section: dict[str, Any]) -> str:
    around = "remove the section: all ranks then hold all experts (ZeRO 3 partitions them)"
    if fitting := fitting_presets(hf, section):
        named = " or ".join(fitting)
        return f"Set expert_parallel.preset_model to {named}, which does in a small copy, or {around}"
    return f"None of DeepSpeed's presets does, so {around}"


def _refusal(hf: PreTrainedModel, section: dict[str, Any], degree: int, reason: str) -> ModelError:
    begin, family = f"expert_parallel.autoep_size {degree}: ", hf.config.model_type
    if "detection is ambiguous" in reason:
        return ModelError(
            f"{begin}several presets of DeepSpeed fit the experts of a {family} model, and llmtrain has to know which "
            f"one computes as transformers does. {_offer(hf, section)}."
        )
    reason = " ".join(reason.split())
    around = "remove the section: all ranks then hold all experts (ZeRO 3 partitions them)"
    reason = f"{begin}DeepSpeed cannot share the experts of a {family} model ({reason})"
    return ModelError(f"{reason}. To continue, {around}.")


def _filled(hf: PreTrainedModel, section: dict[str, Any], mix: Mix) -> dict[str, Any]:
    """Return the JSON's section, completed with the degree and with the kind of product that these experts support."""
    parts = (part for block in expert_blocks(hf) for part in block.experts)
    grouped = all(fit_grouped_product(part, DTYPES[mix.precision]) for part in parts)
    grouped &= section.get("use_grouped_mm", True)
    return {**section, "use_grouped_mm": grouped, "enabled": True, "autoep_size": mix.degrees.expert}


def _name_parameters(block: Any, spec: Any, before: dict[str, tuple[int, ...]], rank: int) -> None:
    """Record for each new parameter which part of which Hugging Face tensor it is."""
    local_experts = spec.num_experts // block.ep_size
    prefix = spec.moe_module_name
    fused, down = (f"{prefix}.{spec.experts_name}.{name}" for name in (spec.expert_w1_name, spec.expert_w2_name))
    if before.get(fused) != (spec.num_experts, 2 * spec.ffn_hidden_size, spec.hidden_size):
        raise ModelError(
            f"expert_parallel.autoep_size: {fused} is not [experts, gate and up, hidden], so llmtrain does not "
            "know where its parts are in a checkpoint. Remove the section: all ranks then hold all experts."
        )
    half = spec.ffn_hidden_size * spec.hidden_size  # elements of the gate, and of the up projection, of one expert
    for parameter, offset in ((block.experts.w1, 0), (block.experts.w3, half)):
        region = Region(rank * local_experts * 2 * half, local_experts * half, ((offset, half),), 2 * half)
        set_shard(parameter, Shard(name=fused, shape=before[fused], region=region))
    region = Region(rank * local_experts * half, local_experts * half)
    set_shard(block.experts.w2, Shard(name=down, shape=before[down], region=region))
    renamed = (
        (block.router.gate, spec.router_name),
        (block.shared_experts, spec.shared_experts_name),
        (block.shared_experts_gate, spec.shared_experts_gate_name),
    )
    for module, old_name in renamed:
        for name, parameter in [] if module is None else module.named_parameters():
            full = f"{prefix}.{old_name}.{name}"
            set_shard(parameter, Shard(name=full, shape=before[full], region=whole(before[full])))


def _name_frozen(block: Any, spec: Any, frozen: dict[str, Tensor]) -> None:
    """Record the names of frozen tensors: AutoEP keeps the bias of a router's scores under another name."""
    prefix, tensors = spec.moe_module_name, frozen_tensors(block)
    path, renamed = spec.e_score_correction_bias_path, "router.e_score_correction_bias"
    new_names = {name: renamed if name == f"{path}.e_score_correction_bias" else name for name in frozen}
    if lost := sorted(name for name, new in new_names.items() if new not in tensors):
        raise ModelError(
            f"expert_parallel.autoep_size: DeepSpeed's AutoEP would drop {prefix}.{lost[0]}, without which tokens go "
            "to other experts. Remove the section: all ranks then hold all experts."
        )
    for name, new in new_names.items():
        shape = tuple(frozen[name].shape)
        set_shard(tensors[new], Shard(name=f"{prefix}.{name}", shape=shape, region=whole(shape)))


def _partition(block: Any, hf: nn.Module) -> None:
    """Partition the experts for ZeRO 3 over the ranks with the same experts, as the engine's
    _partition_autoep_zero3_experts does."""
    convert = next(p.convert_to_zero_parameters for p in hf.parameters() if hasattr(p, "convert_to_zero_parameters"))
    parameters = list(block.experts.parameters())
    for parameter in parameters:
        group = ranks_with_the_same_experts(parameter.group_name)
        parameter.ds_zero_partition_process_group = group
    convert(param_list=parameters)
