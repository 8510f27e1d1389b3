"""DeepSpeed's private names: all that llmtrain/models/parallel uses of them. Verified with DeepSpeed 0.19.8.

Where a name is gone, importing this file or calling the entry raises ImportError or AttributeError with that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed.moe.ep_experts import EXPERT_ACTIVATIONS
from deepspeed.pipe import PipelineModule
from deepspeed.sequence.layer import _dim_zero_all_to_all
from deepspeed.utils import groups

_Method = TypeVar("_Method", bound=Callable[..., Any])

all_to_all = _dim_zero_all_to_all
"""sequence.layer._dim_zero_all_to_all(group, [S, ...]): piece i goes to rank i; differentiable. The public
single_all_to_all cuts and joins dimensions that are not ours."""


def overrides(base: type) -> Callable[[_Method], _Method]:
    """A method that stands for DeepSpeed's private one of the same name: if that is gone, nobody would call ours."""

    def checked(method: _Method) -> _Method:
        getattr(base, method.__name__)
        return method

    return checked


def set_bounds(pipeline: PipelineModule, start: int, stop: int) -> None:
    """PipelineModule._set_bounds: which layers of the chain this rank builds, for a _partition_layers of our own."""
    pipeline._set_bounds(start=start, stop=stop)


def rank_among_experts(degree: int) -> int:
    """This rank's place among `degree` ranks that share the experts; makes DeepSpeed's groups of them at first.

    groups._get_expert_parallel_group_dict, _create_expert_and_data_parallel, _get_expert_parallel_rank: what the engine
    itself calls for AutoEP, later than we need them.
    """
    name = f"ep_size_{degree}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(degree, mp_size=1, pp_size=1)
    return groups._get_expert_parallel_rank(name)


def ranks_with_the_same_experts(name: str) -> dist.ProcessGroup:
    """groups._get_expert_data_parallel_group; `name`: a parameter's group_name."""
    return groups._get_expert_data_parallel_group(name)


def activate_in_pytorch() -> None:
    """moe.ep_experts.EXPERT_ACTIVATIONS: without the fused kernels, which are Triton's. Beside a grouped product AutoEP
    takes them on any device, and no CPU runs them. For the whole process."""
    for name, form in EXPERT_ACTIVATIONS.items():
        EXPERT_ACTIVATIONS[name] = replace(form, fused_fn=None, packed_fused_fn=None)


def replace_block(surgeon: Any, spec: Any, degree: int, rank: int) -> None:
    """AutoEP._replace_moe_layer_without_retarget: put this rank's experts into the place of a block.

    Not its public replace_moe_layers: that also turns transformers' recorders of router logits to the new modules, and
    fails with transformers 5.23 (auto_ep_presets/base.py 326: _CanRecordRegistry.get takes no default).
    """
    surgeon._replace_moe_layer_without_retarget(spec, degree, rank)
