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
"""Key of a parameter group: kind of the optimizer's moments -> their dtype."""
_CHUNK = 1 << 24  # elements that have fp32 moments at once: 128 MiB with AdamW


def moments_of(optimizer: Any, flat: Tensor, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return the moments of an optimizer's tensor by kind, each as long as the tensor.

    State that the optimizer would create at its first step is created, with the step counter at 0.
    """
    state = optimizer.state[flat]
    kinds: dict[str, torch.dtype] = settings[MOMENTS]
    if not settings.get("use_muon") and "step" not in state:
        on_host = hasattr(optimizer, "fp32_optimizer_states")  # DeepSpeed's own, which count in Python
        device = flat.device if optimizer.defaults.get("fused", True) else torch.device("cpu")
        state["step"] = 0 if on_host else torch.zeros((), dtype=torch.float32, device=device)
    for kind, dtype in kinds.items():
        if kind not in state:
            state[kind] = torch.zeros_like(flat, dtype=dtype, requires_grad=False)
    return {kind: state[kind] for kind in kinds}


class Bf16Moments(torch.optim.Optimizer):
    """An elementwise optimizer with moments in bf16 between steps, as in the training of DeepSeek-V3 (arXiv 2412.19437,
    3.3.3). DeepSpeed has them with bf16 masters only, which lose updates below 2^-9 of a weight."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        """`inner`: AdamW or Lion over groups with `MOMENTS`; the state inside is not used."""
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


# One build of DeepSpeed's ops at a time, and none that waits for the dead.


@contextlib.contextmanager
def op_build_lock() -> Iterator[None]:
    """Hold a lock on op builds in torch's folder of extensions, on all hosts that share the folder. A killed process
    leaves torch's lock file, and every later run silently waits for ever; our lock ends with its process."""
    from torch.utils.cpp_extension import _get_build_directory

    from llmtrain.base.rank.op_builds import BUILD_LOCK, users_of

    folder = Path(_get_build_directory("cpu_adam", verbose=False))
    handle = lock_file(folder.parent / BUILD_LOCK)
    try:
        stale = folder / "lock"
        with contextlib.suppress(FileNotFoundError):  # the other build is done
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
    """Return parameter groups by equal settings: optim.decay selects the parameters with weight decay, `own` has
    settings of single parameters by Hugging Face name. Those of `optim.groups` are separate groups.

    A group carries `peak_lr`, which the schedule multiplies, and its kinds of `moments`. It has at most `largest`
    elements on this rank; a larger tensor is alone.
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
        decays = optim.decay == "all" or len(getattr(parameter, "ds_shape", parameter.shape)) >= 2  # in full
        name = group.name or ("decay" if decays else "no_decay")
        if decay is None:
            decay = optim.weight_decay if decays else 0.0
        settings = {**group.settings, MOMENTS: dict.fromkeys(group.state or state, moments)}
        settings["weight_decay"] = decay / group.scale  # which the rate multiplies
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
    steps_matrices = optim.whole_gradients  # as Muon does
    import_muon(compiled=steps_matrices and device.type != "cpu" and compiler.trouble(device) is None)
    cuts = mix.zero_stage in (1, 2) and not mix.offload_optimizer
    dtype = torch.bfloat16 if mix.bf16_moments else torch.float32
    groups = parameter_groups(model, optim, own, LARGEST_GROUP if cuts else math.inf, dtype)
    if steps_matrices:
        _set_newton_schulz_dtype(mix.precision)
    if is_of_plugin(optim) or not optim.counts_steps:
        return build_guarded(optim, groups)
    if mix.offload_optimizer and optim.host_ops and not mix.swaps:  # the disk sets the pace, and torch's code is exact
        with op_build_lock():
            try:
                return optim.build_on_host(groups)
            except Exception as error:  # no compiler, an unsupported CPU, a broken build: DeepSpeed raises them all
                op = " and ".join(optim.host_ops)
                warn(f"DeepSpeed's {op} cannot be built here, torch's code runs on the CPU instead: {error}")
    optimizer = optim.build(groups)
    return Bf16Moments(optimizer) if mix.bf16_moments else optimizer


# A plugin's: a torch optimizer that steps each element by itself, proved before it trains.


_ROWS, _COLUMNS, _STEPS = 6, 4, 3
_CLOSE = {"rtol": 1e-5, "atol": 1e-7}
"""fp32 rounding: kernels for lists of tensors may sum in another order."""


def build_guarded(optim: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the torch optimizer of a class from the engine's groups, with a step counter for each tensor.

    Raises: ConfigError.
    """
    optimizer = _built(optim, groups)
    optimizer.defaults.setdefault("fused", None)  # `moments_of`: the counter is on the host
    optimizer.state.clear()  # of tensors that the engine will have replaced
    _guard(optim, optimizer)
    return optimizer


def prove_by_element(optim: Optimizer) -> None:
    """Prove that the optimizer steps each element independently, with moments that begin at zero: then partitions train
    like complete tensors, and checkpoints can hold the moments. Raises ConfigError, with the reason."""
    key = f"optim.name {optim.name}"
    if optim.whole_gradients:
        raise ConfigError(
            f"{key}: it inherits from an optimizer that steps matrices as a whole, and ZeRO partitions "
            "what it trains. Derive the class from Optimizer, AdamW or Lion"
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
            "of ranks could not load a checkpoint. Keep one number for each element"
        )
    if set(kept) != set(optim.state):
        raise ConfigError(
            f"{key}: it keeps {_listed(kept) or 'nothing'} for each parameter, but its class says state "
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
            "ZeRO partitions what it trains: a step may depend on an element's own gradients and "
            "moments alone, and these begin at 0"
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
    if not isinstance(made, torch.optim.Optimizer) or len(made.param_groups) != len(groups):
        raise ConfigError(
            f"optim.name {optim.name}: build returns {type(made).__name__}; it must return a "
            "torch.optim.Optimizer of all its groups"
        )
    return made


def _step(optim: Optimizer, step: Callable[[], Any]) -> None:
    called(optim, f"optim.name {optim.name}", "step", step)


def _guard(optim: Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Make the step name the plugin in an error or a hang, and count steps if the plugin does not."""
    plain = optimizer.step

    @functools.wraps(plain)
    def step(closure: Callable[[], float] | None = None) -> None:
        assert closure is None
        states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        before = [float(state["step"]) for state in states]  # on the host: no device is waited for
        _step(optim, plain)
        for state, number in zip(states, before, strict=True):
            if float(state["step"]) == number:
                state["step"] += 1

    optimizer.step = step  # type: ignore[method-assign, assignment]


def import_muon(*, compiled: bool) -> None:
    """Import DeepSpeed's Muon, which every engine needs whatever its optimizer, with torch.compile or without.

    torch.compile's backend takes a second of each start and needs a compiler; on a CPU it compiles 20 s for no gain.
    """
    original, names = f"{_MUON}.original_muon", (f"{_MUON}.original_muon", f"{_MUON}.muon_optimizer")
    if original in sys.modules and hasattr(sys.modules[original].muon_update, "_torchdynamo_orig_callable") == compiled:
        return
    for name in names:  # of an earlier engine of this process
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
    """Use fp32 in Muon's Newton-Schulz iteration for a run in fp32. DeepSpeed uses fp16 on GPUs and processors with
    AVX512-FP16, which changes the update of a matrix by up to 2 % (measured), depending on the layout."""
    from deepspeed.runtime.zero.muon import original_muon

    original = inspect.unwrap(original_muon.ns_compute_dtype)  # an earlier engine of this process may have been fp32

    @functools.wraps(original)
    def fp32(ns_method: str = "gram") -> torch.dtype:
        return torch.float32

    original_muon.ns_compute_dtype = fp32 if precision == "fp32" else original
