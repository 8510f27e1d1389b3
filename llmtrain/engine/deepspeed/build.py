"""The optimizer, and the one place where DeepSpeed builds its engine."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime import compiler as ds_compiler
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch import nn

from llmtrain.config.run import OptimConfig, ResolvedRun
from llmtrain.engine.deepspeed.join import apply_group_timeout
from llmtrain.engine.deepspeed.op_builds import op_build_lock
from llmtrain.engine.deepspeed.zero_step import LARGEST_GROUP, shorten_step, zero_1_with_fp32_sums
from llmtrain.engine.malloc import return_freed_memory
from llmtrain.log import warn
from llmtrain.models import compiler
from llmtrain.models.build import decoder_layers
from llmtrain.models.language import LanguageModel
from llmtrain.models.parallel.mesh import Mesh

_MUON = "deepspeed.runtime.zero.muon"


def parameter_groups(model: LanguageModel, optim: OptimConfig, largest: float = math.inf) -> list[dict[str, Any]]:
    """Who decays is `optim.decay`'s choice. With Muon the decoder layers' matrices are groups of their own.

    Each group carries `peak_lr`; the schedule multiplies it. None has more than `largest` elements on this rank, but
    for a tensor that has more: it is alone.
    """
    muon_ids = set()
    if optim.name == "muon":
        muon_ids = {id(p) for p in decoder_layers(model.hf).parameters() if _dim(p) >= 2}
    groups: list[dict[str, Any]] = []
    filling: dict[str, dict[str, Any]] = {}
    elements: Counter[str] = Counter()
    adam = {"lr": optim.lr, "peak_lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    muon = {"lr": optim.muon_lr, "peak_lr": optim.muon_lr, "momentum": optim.muon_momentum}
    for parameter in (held.parameter for held in model.local_parameters() if held.trains):
        is_muon = id(parameter) in muon_ids
        parameter.use_muon = is_muon  # type: ignore[attr-defined]  # DeepSpeed's ZeRO reads this tag
        decays = optim.decay == "all" or _dim(parameter) >= 2
        name = "muon" if is_muon else ("decay" if decays else "no_decay")
        shared = is_moe_param(parameter)
        if shared:  # DeepSpeed finds the ranks that hold the same experts by the name of the group
            name = parameter.group_name  # type: ignore[attr-defined]
        settings = dict(muon if is_muon else adam, weight_decay=optim.weight_decay if decays else 0.0)
        if optim.name == "muon":
            settings["use_muon"] = is_muon
        if shared:
            settings["moe"] = True
        elements[name] += parameter.numel()
        if name not in filling or elements[name] > largest:
            filling[name] = {"name": name, "params": [], **settings}
            groups.append(filling[name])
            elements[name] = parameter.numel()
        filling[name]["params"].append(parameter)
    return groups


def _dim(parameter: torch.Tensor) -> int:
    """Dimensions of the whole tensor; under ZeRO 3 the local one is flat."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def build_optimizer(model: LanguageModel, resolved: ResolvedRun) -> torch.optim.Optimizer:
    """AdamW (fused), DeepSpeed's CPUAdam under offload, or Muon with AdamW for the rest."""
    optim = resolved.run.optim
    device = torch.device(get_accelerator().device_name())
    import_muon(compiled=optim.name == "muon" and device.type != "cpu" and compiler.trouble(device) is None)
    cuts = resolved.zero_stage in (1, 2) and not resolved.offload_optimizer
    parameters = parameter_groups(model, optim, LARGEST_GROUP if cuts else math.inf)
    if optim.name == "muon":
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        _set_newton_schulz_dtype(resolved.precision)
        return MuonWithAuxAdam(parameters, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True})
    if resolved.offload_optimizer:
        with op_build_lock():
            try:
                from deepspeed.ops.adam import DeepSpeedCPUAdam

                return DeepSpeedCPUAdam(parameters, adamw_mode=True)
            except Exception as error:  # no compiler, an unsupported CPU, a broken build: DeepSpeed raises them all
                warn(f"DeepSpeed's CPUAdam cannot be built here, torch's AdamW runs on the CPU instead: {error}")
    return torch.optim.AdamW(parameters, fused=True)


def import_muon(*, compiled: bool) -> None:
    """Import DeepSpeed's Muon, which every engine asks for whatever its optimizer, with torch.compile or without.

    The import of torch.compile's backend takes a second of every start. It asks for a compiler, which not every machine
    has; on a CPU compiling would take 20 s and a folder in /tmp, and gain nothing: the time is in the matrix products.
    """
    original, names = f"{_MUON}.original_muon", (f"{_MUON}.original_muon", f"{_MUON}.muon_optimizer")
    if original in sys.modules and hasattr(sys.modules[original].muon_update, "_torchdynamo_orig_callable") == compiled:
        return
    for name in names:  # of an earlier engine of this process
        sys.modules.pop(name, None)
    theirs = ds_compiler.compile
    if not compiled:
        ds_compiler.compile = lambda: ds_compiler.dummy_decorator
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        ds_compiler.compile = theirs


def _set_newton_schulz_dtype(precision: str) -> None:
    """Muon's Newton-Schulz iteration in fp32 for a run in fp32; else in what DeepSpeed takes, fp16 where there is any.

    DeepSpeed takes fp16 for an fp32 run, too, on GPUs and on processors with AVX512-FP16. That changes the update of a
    matrix by up to 2 % (measured): an fp32 run would depend on the processor, and by rounding to fp16 on its layout.
    """
    from deepspeed.runtime.zero.muon import original_muon

    theirs = inspect.unwrap(original_muon.ns_compute_dtype)  # an earlier engine of this process may have been fp32

    @functools.wraps(theirs)
    def fp32(ns_method: str = "gram") -> torch.dtype:
        return torch.float32

    original_muon.ns_compute_dtype = fp32 if precision == "fp32" else theirs


def build_engine(model: LanguageModel, resolved: ResolvedRun, mesh: Mesh) -> deepspeed.DeepSpeedEngine:
    """The DeepSpeed engine for a model whose parameters have not been given values yet."""
    if resolved.run.model.mlp_tile_tokens is not None and get_accelerator().device_name() == "cpu":
        return_freed_memory()
    optimizer = build_optimizer(model, resolved)
    config = dict(resolved.deepspeed)
    if resolved.zero_stage == 0 and resolved.precision == "fp32":
        # DeepSpeed steps on a NaN here: it neither checks nor reports the gradient norm without a wrapper.
        config["gradient_clipping"] = 0.0
        _guard_step(optimizer, resolved.run.optim.clip_norm or 0.0, mesh)
    elif resolved.zero_stage == 0 and mesh.degrees.tensor > 1:
        _mark_gradients(model)
    if resolved.degrees.sequence > 1:  # what DeepSpeed does when it is told of the sequence-parallel ranks (mesh.py)
        config["communication_data_type"] = config.get("seq_parallel_communication_data_type", "fp32")
    if resolved.degrees.pipeline > 1:
        # Every tensor-parallel rank has the whole hidden state and sends it to its counterpart: DeepSpeed's way to send
        # a share each and gather it costs two more messages and an all-gather for every micro-batch.
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    groups.mpu = None  # DeepSpeed keeps the one of an earlier engine of this process
    with zero_1_with_fp32_sums():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=mesh.mpu, dist_init_required=False
        )
    shorten_step(engine)
    apply_group_timeout(resolved.run.fault.timeout_s)
    for held in model.local_parameters():
        if not held.trains:  # whatever buffer_dtype of the JSON makes of other buffers
            held.parameter.data = held.parameter.data.float()
    for state in getattr(engine.optimizer, "optimizer", engine.optimizer).state.values():
        # DeepSpeed's bf16 ZeRO 0 has taken a step on zero gradients to create this state. Left at 1, AdamW's bias
        # correction would shrink every early update (by 15 % over the first three steps, measured).
        if torch.is_tensor(state.get("step")):
            state["step"].zero_()
    return engine


def _guard_step(optimizer: torch.optim.Optimizer, clip_norm: float, mesh: Mesh) -> None:
    """Make step() clip, publish the norm, and skip when it is not finite, as DeepSpeed's ZeRO optimizers do."""
    plain_step: Callable[..., Any] = optimizer.step

    def step(closure: None = None) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = _total_norm(parameters, mesh)
        optimizer._global_grad_norm = norm  # type: ignore[attr-defined]
        optimizer.overflow = not bool(torch.isfinite(norm))  # type: ignore[attr-defined]
        if optimizer.overflow:  # type: ignore[attr-defined]
            return
        if clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        plain_step()

    optimizer.step = step  # type: ignore[method-assign, assignment]


def _mark_gradients(model: nn.Module) -> None:
    """Let DeepSpeed's bf16 and fp16 optimizers without ZeRO count the shards of all tensor-parallel ranks.

    Their norm (unfused_optimizer.py:214, get_weight_norm) looks for a mark on gradients that only parameters have:
    it was half of the true one with two ranks, and so was the clipped step.
    """

    def mark(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.tensor_model_parallel = True  # type: ignore[attr-defined]

    for parameter in model.parameters():
        if is_model_parallel_parameter(parameter):
            parameter.register_post_accumulate_grad_hook(mark)


def _total_norm(parameters: list[nn.Parameter], mesh: Mesh) -> torch.Tensor:
    """Norm of the whole gradient: shards count on every tensor-parallel rank, what all of them hold on the first."""
    if mesh.degrees.expert > 1:
        return _norm_with_shared_experts([p for p in parameters if p.grad is not None])
    if mesh.degrees.tensor == 1:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    here = [
        p.grad for p in parameters if p.grad is not None and (is_model_parallel_parameter(p) or mesh.place.tensor == 0)
    ]
    square = torch.nn.utils.get_total_norm(here).square()
    dist.all_reduce(square, group=mesh.tensor)
    return square.sqrt()


def _norm_with_shared_experts(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The same where each rank holds some of the experts."""
    own = [p for p in parameters if is_moe_param(p)]
    others = [p for p in parameters if not is_moe_param(p)]
    square, rest = (
        torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]).square() for some in (own, others)
    )
    dist.all_reduce(square, group=groups._get_expert_parallel_group(own[0].group_name))  # type: ignore[attr-defined]
    return (square + rest).sqrt()
