"""Parameter groups and the construction of optimizers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime import compiler as ds_compiler
from torch import Tensor

from llmtrain.base import units
from llmtrain.base.errors import ConfigError
from llmtrain.base.files import lock_file
from llmtrain.base.log import warn
from llmtrain.config.plugins import is_of_plugin
from llmtrain.config.topology import Mix
from llmtrain.engine.deepspeed.zero_step import LARGEST_GROUP
from llmtrain.engine.ranks.plugin_code import called
from llmtrain.models import compiler
from llmtrain.models.language import LanguageModel
from llmtrain.optim.optimizers import Group, Optimizer

if TYPE_CHECKING:
    from llmtrain.models.own_settings import OwnSettings

MOMENTUM = "momentum_buffer"
MOMENTS = "moments"
"""Key of a parameter group, for a dict: kind of the optimizer's moments -> their dtype."""
_CHUNK = 1 << 24  # elements whose moments are widened to fp32 at once: 128 MiB with AdamW


def moments_of(optimizer: Any, flat: Tensor, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return the moments of a tensor in the optimizer: kind -> values, as many as the tensor has. State that the
    optimizer would create at its first step is created, with the step counter at 0."""
    state = optimizer.state[flat]
    kinds: dict[str, torch.dtype] = settings[MOMENTS]
    if not settings.get("use_muon") and "step" not in state:
        on_host = hasattr(optimizer, "fp32_optimizer_states")  # DeepSpeed's CPU optimizers, which count in Python
        device = flat.device if optimizer.defaults.get("fused", True) else torch.device("cpu")
        state["step"] = 0 if on_host else torch.zeros((), dtype=torch.float32, device=device)
    for kind, dtype in kinds.items():
        if kind not in state:
            state[kind] = torch.zeros_like(flat, dtype=dtype, requires_grad=False)
    return {kind: state[kind] for kind in kinds}


class Bf16Moments(torch.optim.Optimizer):
    """Wraps an elementwise optimizer and keeps its moments in bf16 between steps, as for DeepSeek-V3 (arXiv 2412.19437,
    3.3.3). DeepSpeed offers that only with bf16 masters, which lose updates below 2^-9 of a weight."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        """`inner`: AdamW or Lion over groups with `MOMENTS`; its own `state` is not used."""
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                moments = moments_of(self, parameter, group)
                for low in range(0, parameter.numel(), _CHUNK):
                    self._step(group, parameter, moments, slice(low, low + _CHUNK))
                self.state[parameter]["step"] += 1

    def _step(self, group: dict[str, Any], parameter: Tensor, kept: dict[str, Tensor], part: slice) -> None:
        assert parameter.grad is not None
        piece = parameter.detach().view(-1)[part]
        piece.grad = parameter.grad.view(-1)[part].to(piece.dtype)
        wide = {kind: moment.view(-1)[part].float() for kind, moment in kept.items()}
        self._inner.param_groups = [{**group, "params": [piece]}]
        self._inner.state = {piece: {"step": self.state[parameter]["step"].clone(), **wide}}  # type: ignore[assignment]
        self._inner.step()
        for kind, moment in kept.items():
            moment.view(-1)[part].copy_(wide[kind])


# Only one build of DeepSpeed's ops at a time; the locks of killed builds are removed.


@contextlib.contextmanager
def op_build_lock() -> Iterator[None]:
    """Hold a lock on op builds in torch's extensions folder, on all hosts that share the folder. A killed process
    leaves torch's own lock file behind, for which every later run would silently wait; the kernel releases this
    lock."""
    from torch.utils.cpp_extension import _get_build_directory

    from llmtrain.base.rank.op_builds import BUILD_LOCK, users_of

    folder = Path(_get_build_directory("cpu_adam", verbose=False))
    handle = lock_file(folder.parent / BUILD_LOCK)
    try:
        stale = folder / "lock"
        with contextlib.suppress(FileNotFoundError):  # the build that had the lock has ended
            if users := users_of(str(stale)):
                warn(f"waiting for the build of process {users[0]}, which has the lock {stale}")
            else:
                stale.unlink()
                warn(f"removed {stale}: a killed process left it behind")
        yield
    finally:
        os.close(handle)


_MUON = "deepspeed.runtime.zero.muon"


def _groups_of(optim: Optimizer, model: LanguageModel) -> list[Group]:
    return called(optim, f"optim.name {optim.name}", "groups", lambda: list(optim.groups(model)))


def parameter_groups(
    model: LanguageModel,
    optim: Optimizer,
    own: Mapping[str, OwnSettings],
    largest: float = math.inf,
    moments: torch.dtype = torch.float32,
) -> list[dict[str, Any]]:
    """Return parameter groups, one for each combination of settings; parameters of `optim.groups` are in separate
    groups.

    Each group has `peak_lr`, which the schedule multiplies, and its kinds of `MOMENTS`. optim.decay selects the
    parameters with weight decay.

    Args:
        own: settings of single parameters, by Hugging Face name.
        largest: most elements of a group on this rank; a larger tensor is a group of its own.
        moments: dtype of the moments.
    """
    state = tuple(kind for kind in optim.state if kind not in optim.state_of_groups)
    usual = Group(name="", parameters=(), settings=optim.group(), state=state)
    special = {id(parameter): group for group in _groups_of(optim, model) for parameter in group.parameters}
    groups: list[dict[str, Any]] = []
    filling: dict[tuple[Any, ...], dict[str, Any]] = {}
    elements: Counter[tuple[Any, ...]] = Counter()
    for held in (held for held in model.local_parameters() if held.trains):
        parameter, (factor, decay) = held.parameter, own[held.name] if own else (1.0, None)
        group = special.get(id(parameter), usual)
        # DeepSpeed's ZeRO reads this tag.
        parameter.use_muon = group.settings.get("use_muon", False)  # type: ignore[attr-defined]
        decays = optim.decay == "all" or len(getattr(parameter, "ds_shape", parameter.shape)) >= 2  # unpartitioned
        name = group.name or ("decay" if decays else "no_decay")
        if decay is None:
            decay = optim.weight_decay if decays else 0.0
        settings = {**group.settings, MOMENTS: dict.fromkeys(group.state or state, moments)}
        settings["weight_decay"] = decay / group.scale  # the learning rate, which has `scale`, multiplies it
        settings["lr"] = settings["peak_lr"] = group.settings["lr"] * factor * group.scale
        if is_moe_param(parameter):  # DeepSpeed finds the ranks that hold the same experts by the name of the group
            name, settings["moe"] = parameter.group_name, True  # type: ignore[attr-defined]
        alike = (name, group.name, factor, decay, group.scale)
        elements[alike] += parameter.numel()
        if alike not in filling or elements[alike] > largest:
            filling[alike] = {"name": name, "params": [], **settings}
            groups.append(filling[alike])
            elements[alike] = parameter.numel()
        filling[alike]["params"].append(parameter)
    return groups


def build_optimizer(
    model: LanguageModel, optim: Optimizer, own: Mapping[str, OwnSettings], mix: Mix
) -> torch.optim.Optimizer:
    device = torch.device(get_accelerator().device_name())
    steps_matrices = optim.whole_gradients  # Muon and plugins derived from it
    import_muon(compiled=steps_matrices and device.type != "cpu" and compiler.trouble(device) is None)
    cuts = mix.zero_stage in (1, 2) and not mix.offload_optimizer
    dtype = torch.bfloat16 if mix.bf16_moments else torch.float32
    groups = parameter_groups(model, optim, own, LARGEST_GROUP if cuts else math.inf, dtype)
    if steps_matrices:
        _set_newton_schulz_dtype(mix.precision)
    if is_of_plugin(optim) or not optim.counts_steps:
        return build_guarded(optim, groups)
    if mix.offload_optimizer and optim.host_ops and not mix.swaps:  # with state on a disk, the disk is the bottleneck
        with op_build_lock():
            try:
                return optim.build_on_host(groups)
            except Exception as error:  # DeepSpeed raises many kinds: no compiler, an unsupported CPU, a broken build
                op = " and ".join(optim.host_ops)
                warn(f"DeepSpeed's {op} cannot be built here, so torch's slower optimizer runs on the CPU: {error}")
    optimizer = optim.build(groups)
    return Bf16Moments(optimizer) if mix.bf16_moments else optimizer


# Optimizers of plugins: torch optimizers that update each element independently, which is proved before the run.


_ROWS, _COLUMNS, _STEPS = 6, 4, 3
_CLOSE = {"rtol": 1e-5, "atol": 1e-7}
"""Tolerance for fp32 rounding: kernels for lists of tensors may sum in another order."""


def build_guarded(optim: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the torch optimizer from the engine's groups, with a step counter for each tensor. Raises ConfigError."""
    optimizer = _built(optim, groups)
    optimizer.defaults.setdefault("fused", None)  # so `moments_of` puts the counter on the host
    optimizer.state.clear()  # the engine will replace its tensors
    _guard(optim, optimizer)
    return optimizer


def prove_by_element(optim: Optimizer) -> None:
    """Prove that the optimizer updates each element independently, from moments that begin at zero: then partitions
    train like complete tensors, and checkpoints can hold the moments. Raises ConfigError, with the reason."""
    key = f"optim.name {optim.name}"
    if optim.whole_gradients:
        raise ConfigError(
            f"{key}: it inherits from an optimizer that steps matrices as a whole, but ZeRO partitions "
            "the matrices. Derive the class from Optimizer, AdamW or Lion"
        )
    numbers = torch.Generator().manual_seed(0)
    begin = torch.randn(_ROWS, _COLUMNS, generator=numbers)
    gradients = [torch.randn(_ROWS, _COLUMNS, generator=numbers) for _ in range(_STEPS)]
    whole = begin.clone().requires_grad_()
    optimizer = _built(optim, [_group(optim, [whole])])
    for gradient in gradients:
        whole.grad = gradient.clone()
        _step(optim, optimizer.step)
    kept = {kind: value for kind, value in optimizer.state[whole].items() if kind != "step" and value is not None}
    odd = {kind: value for kind, value in kept.items() if not isinstance(value, Tensor) or value.shape != whole.shape}
    if odd:
        raise ConfigError(
            f"{key}: {_listed(odd)} in the optimizer's state is no tensor of the parameter's shape, so another number "
            "of ranks could not load a checkpoint. Keep one number for each element of the parameter"
        )
    if set(kept) != set(optim.state):
        raise ConfigError(
            f"{key}: the optimizer keeps {_listed(kept) or 'nothing'} for each parameter, but its class says state "
            f"= {optim.state}. Write state = {tuple(kept)}"
        )
    flat = [piece.clone().requires_grad_() for piece in begin.flatten().split(_ROWS * _COLUMNS // 2)]
    parted = build_guarded(optim, [_group(optim, flat)])
    for piece in flat:
        moments_of(parted, piece, parted.param_groups[0])
    for gradient in gradients:
        for piece, part in zip(flat, gradient.flatten().split(len(flat[0])), strict=True):
            piece.grad = part.clone()
        parted.step()
    if not torch.allclose(torch.cat(flat).view_as(whole), whole, **_CLOSE):  # type: ignore[arg-type]
        raise ConfigError(
            f"{key}: two halves of a flat tensor, with moments of 0, do not step like the whole tensor. "
            "ZeRO partitions the tensors: the update of an element may depend only on the gradients and moments of "
            "that element, and the moments must begin at 0"
        )


def _group(optim: Optimizer, parameters: list[Tensor]) -> dict[str, Any]:
    kinds = dict.fromkeys(optim.state, torch.float32)
    settings = {**optim.group(), "weight_decay": optim.weight_decay, MOMENTS: kinds}
    return {"name": "decay", "params": parameters, **settings}


def _listed(kinds: dict[str, Any]) -> str:
    return ", ".join(map(str, kinds))


def _built(optim: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    with torch.random.fork_rng(devices=[]):
        made = called(optim, f"optim.name {optim.name}", "build", lambda: optim.build(groups))
    kind, head = type(made).__name__, f"optim.name {optim.name}: build"
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{head} returns {kind}, which is no torch.optim.Optimizer. Return one over the groups")
    if len(made.param_groups) != len(groups):
        has = units.counted(len(made.param_groups), "parameter group")
        raise ConfigError(f"{head} returns {kind} with {has}, but it gets {len(groups)}. Pass all of them to {kind}")
    return made


def _step(optim: Optimizer, step: Callable[[], Any]) -> None:
    called(optim, f"optim.name {optim.name}", "step", step)


def _guard(optim: Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's `step` name the plugin in an error or a hang, and count steps if the plugin does not."""
    plain = optimizer.step

    @functools.wraps(plain)
    def step(closure: Callable[[], float] | None = None) -> None:
        assert closure is None
        states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        before = [float(state["step"]) for state in states]  # the counters are on the host, so this waits for no device
        _step(optim, plain)
        for state, number in zip(states, before, strict=True):
            if float(state["step"]) == number:
                state["step"] += 1

    optimizer.step = step  # type: ignore[method-assign, assignment]


def import_muon(*, compiled: bool) -> None:
    """Import DeepSpeed's Muon, which DeepSpeed's engine needs whatever the optimizer, with torch.compile or without.
    Loading torch.compile's backend takes a second of each start and needs a C compiler; on a CPU it then compiles for
    20 s without making Muon faster."""
    original, names = f"{_MUON}.original_muon", (f"{_MUON}.original_muon", f"{_MUON}.muon_optimizer")
    if original in sys.modules and hasattr(sys.modules[original].muon_update, "_torchdynamo_orig_callable") == compiled:
        return
    for name in names:  # imported for an earlier engine of this process
        sys.modules.pop(name, None)
    compile_of_deepspeed = ds_compiler.compile
    if not compiled:
        ds_compiler.compile = lambda: ds_compiler.dummy_decorator
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        ds_compiler.compile = compile_of_deepspeed


def _set_newton_schulz_dtype(precision: str) -> None:
    """Run Muon's Newton-Schulz iteration in fp32 in an fp32 run. DeepSpeed uses fp16 on GPUs and processors with
    AVX512-FP16, which changes the update of a matrix by up to 2 % (measured), depending on the layout."""
    from deepspeed.runtime.zero.muon import original_muon

    original = inspect.unwrap(original_muon.ns_compute_dtype)  # an earlier engine of this process may have been fp32

    @functools.wraps(original)
    def fp32(ns_method: str = "gram") -> torch.dtype:
        return torch.float32

    original_muon.ns_compute_dtype = fp32 if precision == "fp32" else original
