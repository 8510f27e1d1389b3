"""The one place where DeepSpeed joins the process group and builds its engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import groups, z3_leaf_module
from torch import nn

from llmtrain.base.errors import ConfigError
from llmtrain.base.rank import watch
from llmtrain.config.run import Run
from llmtrain.config.topology import Mix, cores_of_a_rank
from llmtrain.engine import progress
from llmtrain.engine.deepspeed import patches
from llmtrain.engine.deepspeed.engine import ZeroEngine
from llmtrain.engine.deepspeed.optimizers import build_optimizer
from llmtrain.engine.deepspeed.patches import apply_group_timeout
from llmtrain.engine.deepspeed.state import base_optimizer
from llmtrain.engine.deepspeed.zero_step import choosing_optimizers, shorten_step
from llmtrain.engine.process_memory import keep_freed_memory, return_freed_memory
from llmtrain.engine.ranks.device import own_device
from llmtrain.engine.ranks.ranks import ConnectedRanks, Ranks
from llmtrain.engine.ranks.rendezvous import connect_all, meet
from llmtrain.models.experts import shape_of
from llmtrain.models.language import LanguageModel
from llmtrain.models.parallel.mesh import Mesh
from llmtrain.models.parameters import MAGNITUDE, A, B, local_parameter

if TYPE_CHECKING:
    from llmtrain.models.own_settings import OwnSettings


def build_engine(
    model: LanguageModel, run: Run, own: Mapping[str, OwnSettings], ranks: Ranks, mesh: Mesh
) -> ZeroEngine:
    """Make the engine for a model whose parameters have no values yet. `own`: settings of single parameters, by Hugging
    Face name. Raises ConfigError: DeepSpeed or torch lacks a feature or class that the run needs."""
    optim, mix, exact = run.config.optim, run.mix, run.deepspeed
    patches.check()
    if mix.mlp_tiles and get_accelerator().device_name() == "cpu":
        return_freed_memory()
    optimizer = build_optimizer(model, optim, own, mix)
    config = dict(exact)
    if mix.zero_stage == 0 and mix.precision == "fp32":
        # DeepSpeed steps on a NaN here: it neither checks nor reports the gradient norm without a wrapper.
        config["gradient_clipping"] = 0.0
        _guard_step(optimizer, optim.clip_norm, mesh)
    elif mix.zero_stage == 0 and mix.degrees.tensor > 1:
        _mark_gradients(model)
    if mix.degrees.sequence > 1:  # the dtype that DeepSpeed uses if it knows the sequence-parallel ranks (mesh.py)
        config["communication_data_type"] = config.get("seq_parallel_communication_data_type", "fp32")
    if mix.degrees.pipeline > 1:
        # Every tensor-parallel rank has the complete hidden state and sends it to its counterpart. By default DeepSpeed
        # sends shares and gathers them: two more messages and an all-gather for every micro-batch.
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if mix.zero_stage > 0:
        config["zero_optimization"] = {**_room(model, mix), **exact["zero_optimization"]}
    groups.mpu = None  # left by an earlier engine of this process, as is the flag of autocast below
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    with choosing_optimizers():
        try:
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, mpu=mesh.mpu, dist_init_required=False
            )
        except ValueError as error:
            if "lower precision safe module" not in str(error):
                raise
            raise ConfigError(
                f"{run.config.deepspeed}: torch_autocast.lower_precision_safe_modules names a missing class: "
                f'{error}. Correct the name, such as "torch.nn.modules.linear.Linear", or remove it.'
            ) from error
    if note := shorten_step(engine):
        model.notes.append(note)
    for held in model.local_parameters():
        if not isinstance(held.parameter, nn.Parameter):  # fp32 whatever buffer_dtype of the JSON says
            held.parameter.data = held.parameter.data.float()
    for state in base_optimizer(engine).state.values():
        # DeepSpeed's bf16 ZeRO 0 has taken a step on zero gradients to create this state. Left at 1, AdamW's bias
        # correction would shrink every early update (by 15 % over the first three steps, measured).
        if torch.is_tensor(state.get("step")):
            state["step"].zero_()
    if mix.degrees.pipeline > 1:  # only pipelines import it: see models/run/build_for_rank.py
        from llmtrain.engine.deepspeed.pipeline_engine import PipelineZeroEngine

        return PipelineZeroEngine(engine, ranks, mesh, _layout_keys(exact))
    return ZeroEngine(engine, ranks, mesh, _layout_keys(exact))


_MOST_LIVE = 8_000_000_000
"""Elements: 16 GB in bf16, for two layers of 405B. One DeepSeek-V3 layer has 11e9 in its experts and is gathered
alone."""
_MOST_WHOLE = 1_000_000_000
"""Elements: 2 GB in bf16, for an adapter of rank 64 on all linear layers of a 70B model."""


def _room(model: nn.Module, mix: Mix) -> dict[str, int]:
    """Return element counts of zero_optimization that fit this model: DeepSpeed's defaults, changed as follows.

    The reduction bucket is no larger than the gradients: the default allocates 2 GB in fp32 even for an adapter. Under
    ZeRO 3 the next module that is gathered as a whole (a compiled layer, all experts of a layer) arrives while this one
    computes; the defaults have room for only one or two matrices. Adapters stay complete on each rank up to
    `_MOST_WHOLE`: partitioned, they took 3,400 tiny gathers per micro-batch of a 70B model (forward, recomputed and
    backward pass), because every lora_A of a wide model exceeds DeepSpeed's threshold of 100,000 elements.
    """
    fields = DeepSpeedZeroConfig.model_fields
    trained = sum(prod(shape_of(p)) for p in model.parameters() if p.requires_grad)
    room = {"reduce_bucket_size": max(1, min(trained, int(fields["reduce_bucket_size"].default)))}
    if mix.zero_stage < 3:
        return room
    named = ((local_parameter(name, p).name, prod(shape_of(p))) for name, p in model.named_parameters())
    adapters = [size for name, size in named if name.endswith((A, B, MAGNITUDE))]
    if sum(adapters) <= _MOST_WHOLE:
        usual = int(fields["param_persistence_threshold"].default)
        room["stage3_param_persistence_threshold"] = max([usual, *adapters])
    modules = (module for module in model.modules() if z3_leaf_module(module))
    largest = max((sum(prod(shape_of(p)) for p in module.parameters()) for module in modules), default=0)
    if 2 * largest > _MOST_LIVE:
        return room
    needs = {"prefetch_bucket_size": largest, "max_live_parameters": 2 * largest}
    return room | {f"stage3_{name}": max(need, int(fields[name].default)) for name, need in needs.items()}


def _layout_keys(exact: dict[str, Any]) -> tuple[str, ...]:
    """Return "zero_optimization.KEY = VALUE" for each switch that differs from DeepSpeed's default."""
    fields, keys = DeepSpeedZeroConfig.model_fields, []
    for key, value in (exact.get("zero_optimization") or {}).items():
        usual = fields[key].default if key in fields else None
        if isinstance(value, dict) and "device" in value:  # an offload section; its other keys (paths) do not matter
            key, value, usual = f"{key}.device", value["device"], "none"
        if isinstance(value, bool | dict | str) and value != usual:
            keys.append(f"zero_optimization.{key} = {json.dumps(value)}")
    return tuple(keys)


def _guard_step(optimizer: torch.optim.Optimizer, clip_norm: float, mesh: Mesh) -> None:
    """Make the optimizer's `step` clip, set the norm, and skip the update if it is not finite, as DeepSpeed's ZeRO
    does."""
    settings: Any = optimizer
    settings.plain_step, settings.clip_grad = optimizer.step, clip_norm  # as attributes: the engine replaces them

    def step(closure: None = None) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = _total_norm(parameters, mesh)
        settings._global_grad_norm = norm
        settings.overflow = not bool(torch.isfinite(norm))
        if settings.overflow:
            return
        if settings.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, settings.clip_grad, norm)
        settings.plain_step()

    settings.step = step


def _mark_gradients(model: nn.Module) -> None:
    """Make DeepSpeed's bf16 and fp16 optimizers without ZeRO count the shards of all tensor-parallel ranks in the norm:
    get_weight_norm (unfused_optimizer.py:214) expects on gradients a mark that only parameters have; it halved the
    norm."""

    def mark(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.tensor_model_parallel = True  # type: ignore[attr-defined]

    for parameter in model.parameters():
        if is_model_parallel_parameter(parameter) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark)


def _total_norm(parameters: list[nn.Parameter], mesh: Mesh) -> torch.Tensor:
    """Return the norm of the complete gradient: of replicated parameters only the first tensor-parallel rank's
    counts."""
    if mesh.degrees.expert > 1:
        return _norm_with_shared_experts([p for p in parameters if p.grad is not None])
    if mesh.degrees.tensor == 1:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    counted = [
        p.grad for p in parameters if p.grad is not None and (is_model_parallel_parameter(p) or mesh.place.tensor == 0)
    ]
    square = torch.nn.utils.get_total_norm(counted).square().to(parameters[0].device)  # of none: on the host
    dist.all_reduce(square, group=mesh.tensor)
    return square.sqrt()


def _norm_with_shared_experts(parameters: list[nn.Parameter]) -> torch.Tensor:
    moe = [p for p in parameters if is_moe_param(p)]
    if not moe:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    others = [p for p in parameters if not is_moe_param(p)]
    square, rest = (
        torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]).square() for some in (moe, others)
    )
    dist.all_reduce(square, group=groups._get_expert_parallel_group(moe[0].group_name))  # type: ignore[attr-defined]
    return (square + rest).sqrt()


def join_process_group(
    timeout_s: float, *, start_timeout_s: float = 300.0, settings: Mapping[str, Any] | None = None
) -> ConnectedRanks:
    """Join torch.distributed with the launcher's RANK, WORLD_SIZE and LOCAL_RANK; without a launcher as the only rank.
    `timeout_s`: limit of each collective. `settings`: values that must be equal on all ranks. Raises RendezvousError:
    ranks are missing or differ. Raises ConfigError: no device, or no such network interface."""
    for key, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    accelerator = get_accelerator()
    device = own_device()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_of_a_rank())
    if device.type == "cpu":
        # DeepSpeed's shared-memory all-reduce leaves 69 MB a rank in /dev/shm for ever; gloo carries it instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        keep_freed_memory()
    progress.begin(device, watch.tend)
    backend = accelerator.communication_backend_name()
    meeting = meet(device=device, backend=backend, settings=settings or {}, limit_s=start_timeout_s)
    # NCCL connects a group at its first use, through the store: a rank may be late there as in a collective.
    meeting.store.set_timeout(timedelta(seconds=max(timeout_s, start_timeout_s)))
    control = connect_all(meeting, backend, device, start_timeout_s)
    apply_group_timeout(timeout_s)
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)
    return ConnectedRanks(
        rank=dist.get_rank(control),
        world_size=dist.get_world_size(control),
        device=device,
        control=control,
        seats=meeting.seats,
        store=meeting.store,
    )
