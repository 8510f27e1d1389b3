"""Mixtures of experts: finds the blocks of experts in a transformers model.

A module is such a block if one child holds matrices of E experts (3-D parameters [E, ., .], or a list of E equal
modules) and another child holds the router's matrix [E, H].
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.transformers_private import loop_over_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertBlock:
    """A module that sends each token to some of its experts."""

    name: str
    module: nn.Module
    router: nn.Module
    """Its forward returns the logits [tokens, E], alone or first in a tuple with the indices of the chosen experts."""
    experts: tuple[nn.Module, ...]
    """The modules that hold the experts' matrices."""
    count: int
    """E, the number of the block's experts on all ranks."""

    @property
    def are_modules(self) -> bool:
        """Return True if the experts are separate modules in a list."""
        return any(isinstance(part, nn.ModuleList) for part in self.experts)


def expert_blocks(hf: nn.Module) -> list[ExpertBlock]:
    """Return the blocks of experts in the order of the layers; empty for a dense model."""
    blocks = []
    for name, module in hf.named_modules():
        counts = {child: _experts_in(child) for child in module.children()}
        count = max(counts.values(), default=0)
        if count < 2:
            continue
        experts = tuple(child for child, number in counts.items() if number == count)
        router = _router(module, experts, count)
        if router is not None:
            blocks.append(ExpertBlock(name=name, module=module, router=router, experts=experts, count=count))
    return blocks


def _experts_in(module: nn.Module) -> int:
    """Return the number of experts in a module, 0 if it holds none."""
    if isinstance(module, nn.ModuleList):
        kinds = {type(child) for child in module}
        return len(module) if len(kinds) == 1 and any(True for _ in module.parameters()) else 0
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        return 0
    sizes = {shape_of(p)[0] for p in module.parameters(recurse=False) if len(shape_of(p)) == 3}
    return sizes.pop() if len(sizes) == 1 else 0


def _router(block: nn.Module, experts: tuple[nn.Module, ...], count: int) -> nn.Module | None:
    inside = {module for part in experts for module in part.modules()}
    for module in block.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                if len(shape_of(parameter)) == 2 and shape_of(parameter)[0] == count:
                    return module
    return None


def avoid_grouped_product(hf: PreTrainedModel, dtype: torch.dtype) -> None:
    """Choose transformers' loop over the experts if its default, torch's grouped product, does not support their
    widths."""
    if not all(fit_grouped_product(module, dtype) for module in hf.modules() if hasattr(module, "is_transposed")):
        loop_over_experts(hf.config)


def fit_grouped_product(experts: nn.Module, dtype: torch.dtype) -> bool:
    """Return True if torch's grouped product supports the experts' matrices: their rows need multiples of 16 bytes,
    which a tensor-parallel shard may not have (its error: "strides should be multiple of 16 bytes")."""
    matrices = [p for p in experts.parameters() if len(shape_of(p)) == 3]
    return not any(size * dtype.itemsize % 16 for matrix in matrices for size in shape_of(matrix)[1:])


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return a parameter's full shape, also under ZeRO 3, where the parameter is empty between uses."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def experts_per_token(config: PreTrainedConfig) -> int | None:
    """Return the number of experts to which a token goes; None if the configuration does not have it."""
    text = config.get_text_config()
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
    return next((int(k) for k in (getattr(text, name, None) for name in names) if isinstance(k, int)), None)


def idle_parameters(hf: nn.Module, config: PreTrainedConfig, among: Collection[Tensor]) -> int:
    """Return the number of elements in expert matrices that a token does not use. `among`: the parameters to count."""
    chosen = experts_per_token(config)
    if chosen is None:
        return 0
    idle = 0
    for block in expert_blocks(hf):
        elements = sum(p.numel() for part in block.experts for p in part.parameters() if p.dim() >= 2 and p in among)
        idle += elements - elements * chosen // block.count
    return idle


def balance_coefficient(config: PreTrainedConfig) -> float:
    """Return the factor of the load-balancing loss, as transformers computes it; 0 without that loss."""
    text = config.get_text_config()
    wanted = bool(getattr(text, "output_router_logits", False))
    return float(getattr(text, "router_aux_loss_coef", None) or 0.0) if wanted else 0.0


def check_stages(config: PreTrainedConfig) -> None:
    """Refuse a pipeline that would silently lose the load-balancing loss. Raises ModelError."""
    if coefficient := balance_coefficient(config):
        raise ModelError(
            f"pipeline.stages: the model's load-balancing loss (output_router_logits is true, router_aux_loss_coef is "
            f"{coefficient}) needs the routers of all layers, but a pipeline stage has only its own. Set "
            "output_router_logits to false in the model's configuration, or use ZeRO 3 or expert_parallel instead."
        )


def set_leaf_modules(hf: nn.Module, blocks: list[ExpertBlock]) -> None:
    """Let ZeRO 3 gather the parameters of all experts of a block at once. Otherwise ranks whose tokens choose different
    experts would wait for each other for ever (DeepSpeed #7461), also with experts in one parameter, whose uses in a
    loop ZeRO 3 counts. JetMoE's attention is left out: it calls only `map` and `reduce` of its block."""
    from deepspeed.utils import set_z3_leaf_module

    for block in blocks:
        for module in (block.module,) if block.are_modules else block.experts:
            set_z3_leaf_module(module, True)
    for module in _holders(hf):
        set_z3_leaf_module(module, True)


def has_experts(hf: nn.Module) -> bool:
    """Return True if the model has experts, also outside of every `ExpertBlock`."""
    return bool(expert_blocks(hf) or _holders(hf))


def _holders(hf: nn.Module) -> list[nn.Module]:
    """Return the modules with experts' matrices, including those that are in no block: LongCat-Flash has more experts
    in one matrix than in the other, and DBRX stacks all experts in 2 dimensions."""
    return [
        module
        for module in hf.modules()
        if sum(len(shape_of(parameter)) == 3 for parameter in module.parameters(recurse=False)) > 1
        or "top_k_index" in inspect.signature(module.forward).parameters
    ]
