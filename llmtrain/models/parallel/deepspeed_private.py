"""DeepSpeed's private names: all that llmtrain/models/parallel uses. Verified with DeepSpeed 0.19.8.

If a name is missing, importing this file or calling its function raises ImportError or AttributeError with that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import (
    AutoEPMoELayer,
    _AllToAllV,
    apply_scores_before_experts_if_enabled,
    combine_from_routed,
    permute_by_local_expert,
    unpermute_by_local_expert,
)
from deepspeed.moe.ep_experts import EXPERT_ACTIVATIONS
from deepspeed.pipe import PipelineModule
from deepspeed.sequence.layer import _dim_zero_all_to_all
from deepspeed.utils import groups

from llmtrain.models.parallel.mesh import site

_Method = TypeVar("_Method", bound=Callable[..., Any])

all_to_all = _dim_zero_all_to_all
"""sequence.layer._dim_zero_all_to_all(group, [S, ...]): sends piece i to rank i; differentiable. The public
single_all_to_all cuts and joins other dimensions."""


def overrides(base: type) -> Callable[[_Method], _Method]:
    """Mark a method that replaces DeepSpeed's private one of that name. Raises AttributeError if DeepSpeed has none."""

    def checked(method: _Method) -> _Method:
        getattr(base, method.__name__)
        return method

    return checked


def set_bounds(pipeline: PipelineModule, start: int, stop: int) -> None:
    """PipelineModule._set_bounds: set which layers of the chain this rank builds, in a _partition_layers of ours."""
    pipeline._set_bounds(start=start, stop=stop)


def rank_among_experts(degree: int, stages: int) -> int:
    """Return this rank's place among the `degree` ranks of its pipeline stage that share the experts; makes DeepSpeed's
    groups for them.

    groups._get_expert_parallel_group_dict, _get_expert_data_parallel_group_dict, _create_expert_and_data_parallel,
    _get_expert_parallel_rank: the engine calls these for AutoEP, but later than we need the groups. The groups' names
    leave out the pipeline stages, so groups of an earlier engine of this process with other stages are removed.
    """
    name = f"ep_size_{degree}"
    alike, shared = groups._get_expert_data_parallel_group_dict(), groups._get_expert_parallel_group_dict()
    if name in alike and dist.get_world_size(alike[name]) * degree * stages != dist.get_world_size(site()):
        del alike[name], shared[name]
    if name not in shared:
        groups._create_expert_and_data_parallel(degree, mp_size=1, pp_size=stages)
    return groups._get_expert_parallel_rank(name)


def ranks_with_the_same_experts(name: str) -> dist.ProcessGroup:
    """Call groups._get_expert_data_parallel_group. `name`: group_name of a parameter."""
    return groups._get_expert_data_parallel_group(name)


def activate_in_pytorch() -> None:
    """Remove the fused Triton kernels from moe.ep_experts.EXPERT_ACTIVATIONS, for the rest of the process. With a
    grouped product AutoEP uses them on any device, but CPUs cannot run them."""
    for name, form in EXPERT_ACTIVATIONS.items():
        EXPERT_ACTIVATIONS[name] = replace(form, fused_fn=None, packed_fused_fn=None)


class TravellingTokens(AutoEPMoELayer):
    """AutoEPMoELayer that exchanges token counts among ranks, and copies them to the host, while the device works on.

    torch's all-to-all reads these counts on the host. AutoEP waits for them just before it needs them, and then the
    device is idle until the host has queued more kernels; its async_split_plan is only for CUDA, and its shared experts
    come last. Here the copy starts right after the router. Shared experts and the sorting of tokens are queued before
    the host waits, once for each layer and forward pass.
    """

    @overrides(AutoEPMoELayer)
    def _forward(self, hidden_BTH: torch.Tensor) -> Any:
        x_NH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1])
        scores_NK, chosen_NK, counts_E = self.router(x_NH, self.expert_bias)
        came_RL, numbers = self._announce(counts_E, chosen_NK.numel())
        rest = self._finalize_output(torch.zeros_like(hidden_BTH), x_NH, hidden_BTH, x_NH.shape[-1])
        order = torch.argsort(chosen_NK.view(-1), stable=True)
        tokens = apply_scores_before_experts_if_enabled(
            x_NH[order // self.top_k], scores_NK.view(-1)[order], self.score_apply
        )
        sends, receives = numbers()
        tokens = _AllToAllV.apply(self.ep_group, tokens, sends, receives)
        tokens, places, here_L, count = permute_by_local_expert(tokens, came_RL)
        tokens = unpermute_by_local_expert(self.experts(tokens, here_L), places, count)
        tokens = _AllToAllV.apply(self.ep_group, tokens, receives, sends)
        routed_BTH = combine_from_routed(
            tokens, scores_NK, order, self.top_k, self.score_apply, self.combine_impl, tuple(hidden_BTH.shape)
        )
        if isinstance(rest, tuple):  # has the router's scores, too
            return rest[0] + routed_BTH.view_as(rest[0]), *rest[1:]
        return rest + routed_BTH.view_as(rest)

    def _announce(self, counts_E: torch.Tensor, choices: int) -> tuple[torch.Tensor, Callable[[], list[list[int]]]]:
        """Return (numbers of tokens that come to this rank, [ranks, local experts]; a function that waits for the
        numbers of tokens that this rank sends to each rank, and gets from each)."""
        counts_E, came_E = self.exchanged(counts_E, choices)
        came_RL = came_E.view(self.ep_size, -1)
        both = torch.stack([counts_E.view(self.ep_size, -1).sum(1), came_RL.sum(1)])
        on_host = both.to("cpu", non_blocking=True)  # page-locked, and complete when the event is
        copied = torch.cuda.Event() if both.is_cuda else None
        if copied is not None:
            copied.record()

        def numbers() -> list[list[int]]:
            if copied is not None:
                copied.synchronize()
            return on_host.tolist()

        return came_RL, numbers

    def exchanged(self, counts_E: torch.Tensor, choices: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange the ranks' token counts by expert, which add up to `choices`. Returns (this rank's counts, the
        numbers of tokens that come here, [ranks x local experts])."""
        came_E = torch.empty_like(counts_E)
        dist.all_to_all_single(came_E, counts_E, group=self.ep_group)
        return counts_E, came_E


def replace_block(surgeon: Any, spec: Any, degree: int, rank: int) -> None:
    """Call AutoEP._replace_moe_layer_without_retarget, which replaces a block by this rank's experts. The public
    replace_moe_layers also points transformers' recorders of router logits to the new modules, and fails at that with
    transformers 5.23 (auto_ep_presets/base.py 326: _CanRecordRegistry.get takes no default)."""
    surgeon._replace_moe_layer_without_retarget(spec, degree, rank)
