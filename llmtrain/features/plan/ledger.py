"""Counts the storages alive at each operator, by their content."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from deepspeed.runtime import bf16_optimizer, pipe
from deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer
from deepspeed.runtime.zero import (
    muon,
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
    stage3,
    stage_1_and_2,
)
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from llmtrain import features, optim
from llmtrain.base.rank.heartbeat import heart
from llmtrain.config.topology import Mix
from llmtrain.engine import losses
from llmtrain.engine.deepspeed import optimizers, zero_step
from llmtrain.features.plan.held import DISK
from llmtrain.features.plan.torch_private import GROUPED, READ, in_backward
from llmtrain.features.plan.work import Work
from llmtrain.models import distillation, head, loss
from llmtrain.models.transformers_private import (
    OperatorMode,
    is_without_memory,
    storage_of,
    with_values,
)

HOST = " (host)"
"""End of the label of a tensor in host memory."""
MESSAGES = "messages of stages"

_FEATURES = {package: name for name in features.features() if (package := f"{features.__name__}.{name}") != __package__}
_MADE_IN = {
    module.__name__: label
    for label, modules in {
        "gathered parameters": (partition_parameters, partitioned_param_coordinator, parameter_offload),
        "logits and loss": (head, loss, distillation, losses),
        MESSAGES: (pipe,),
        "optimizer": (torch.optim, optim, optimizers, muon),
        "gradients": (stage_1_and_2, stage3, bf16_optimizer, unfused_optimizer, fused_optimizer, zero_step),
    }.items()
    for module in modules
} | _FEATURES
"""Modules, and packages with those in them, whose functions make a tensor, and the label; the innermost frame with one
decides."""
_KINDS = (
    ("norms", r"norm|ln_|layernorm"),
    ("attention", r"attn|attention|mixer|mamba"),
    ("experts", r"experts?$|moe|router|gate$"),
    ("mlp", r"mlp|ffn|feed_forward|dense|fc"),
    ("embedding", r"embed|wte|wpe"),
    ("adapters", r"lora_"),
)
"""Kinds of layers by a part of a module's name; the innermost part with one decides."""
_BUCKETS = re.compile("bucket|reduce|average|gather")
"""Functions of DeepSpeed's optimizers that make buckets and not gradients."""
_SMALL = 512
"""Bytes of a tensor whose origin is not worth a look."""
_LOOKED = 60
"""Frames that are looked at for the origin of a tensor."""


class Ledger(OperatorMode):
    """Counts bytes of storages made inside the context, and their peak. Numbers read from tensors without memory
    are 1.0 or 0; in the steps, tensors computed only from the batch keep real values.

    A storage has one label at a time. `mark` gives it another one: only a move between device and host changes the
    number of bytes.
    """

    def __init__(self, mix: Mix, work: Work, *, one_memory: bool) -> None:
        """`one_memory`: the device is the host, whose tensors count in the peak as well."""
        super().__init__()
        self.work = work
        self.bytes: Counter[str] = Counter()
        """Bytes alive by label."""
        self.highest: Counter[str] = Counter()
        """The most bytes of each label in the last step and after it."""
        self.peaks = {"setup": (0, dict[str, int]())}
        """Part of the run -> (the device's peak in bytes, the bytes by label)."""
        self.host = self.disk = 0
        """The peak of the bytes in host memory; of those on a disk, in the last step and after it."""
        self.curve: list[tuple[str, int]] = []
        """(part of the step, bytes alive) in the last step, whenever the bytes have changed."""
        self.kept = 0
        """Bytes alive at the beginning of the last step."""
        self._mix, self._one_memory = mix, one_memory
        self._in_steps = False
        self._now = self._on_host = self._on_disk = 0
        self._held: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._running: list[str] = []
        """Kinds of the modules whose forward pass runs, the innermost last."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_steps and have_values(args):  # the batch has values, and so has what is computed from it alone
            with with_values():
                made = function(*args, **kwargs)
        elif function is READ and not have_values(args):
            return 1.0 if args[0].dtype.is_floating_point else 0
        elif function is GROUPED and args[0].dtype != torch.bfloat16:
            # torch 2.13 knows the shape of this product for bf16 alone (torch/_meta_registrations.py).
            first, second, *rest = args
            made = function(first.bfloat16(), second.bfloat16(), *rest, **kwargs).to(first.dtype)
        else:
            made = function(*args, **kwargs)
        if self._in_steps:
            self.work.add(function, args, kwargs, made, bool(self._running))
        seen = kwargs.get("out", made)  # without memory, a result may be another tensor than `out`
        for tensor in seen if isinstance(seen, (tuple, list)) else (seen,):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._count_tensor(tensor)
        return made

    @property
    def phase(self) -> str:
        """The part of a run: that of the heartbeat, or backward in an autograd pass (a recomputed forward, too)."""
        if in_backward():
            return "backward"
        return heart.in_phase() if self._in_steps else "setup"

    @property
    def at(self) -> str:
        """The part of the run with the highest peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase][0])

    @property
    def most(self) -> int:
        return self.peaks[self.at][0]

    def begin_step(self) -> None:
        self.work.begin_step()
        self.kept, self.curve, self._in_steps = self._now, [], True
        self.disk = self._on_disk
        self.highest = Counter(self.bytes)
        self.peaks["data"] = self._now, dict(self.bytes)

    def mark(self, held: Iterable[tuple[str, bool, Tensor]]) -> None:
        """Give storages another label, and count those that were made outside: (label, in host memory, tensor)."""
        for label, on_host, tensor in held:
            self._mark(tensor, label + HOST * on_host)

    def watch(self, module: nn.Module) -> Iterator[Any]:
        """Name activations by a model's modules, and gradients by their parameters. Yields the handles of the hooks."""
        kinds = {submodule: _kind(name) for name, submodule in module.named_modules()}

        def begin(submodule: nn.Module, _: Any) -> None:
            self._running.append(kinds.get(submodule, "other layers"))

        def end(*_: Any) -> None:
            self._running.pop()

        def give(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and gradient.untyped_storage().nbytes() == gradient.nbytes:
                self._mark(gradient, "gradients")

        yield register_module_forward_pre_hook(begin)
        yield register_module_forward_hook(end, always_call=True)
        for parameter in module.parameters():
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(give)

    def _count_tensor(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage_of(tensor), storage.nbytes()
        entry = self._held.get(key)
        if entry is not None and entry[0]() is not None:
            if entry[2] != size:
                self._change_bytes(entry[1], size - entry[2])
                self._held[key] = (entry[0], entry[1], size)
            return
        self._add(tensor, self._label() if size > _SMALL else "small tensors")

    def _add(self, tensor: Tensor, label: str) -> None:
        storage, key = tensor.untyped_storage(), storage_of(tensor)
        size = storage.nbytes()
        self._held[key] = (weakref.ref(storage, lambda _: self._count_freed(key)), label, size)
        self._change_bytes(label, size)

    def _count_freed(self, key: int) -> None:
        _, label, size = self._held.pop(key)
        self._change_bytes(label, -size)

    def _mark(self, tensor: Tensor, label: str) -> None:
        entry = self._held.get(storage_of(tensor))
        if entry is None:  # made outside
            self._add(tensor, label)
        elif entry[1] != label:
            self._held[storage_of(tensor)] = (entry[0], label, entry[2])
            self._change_bytes(entry[1], -entry[2])
            self._change_bytes(label, entry[2])

    def _change_bytes(self, label: str, size: int) -> None:
        self.bytes[label] += size
        self.highest[label] = max(self.highest[label], self.bytes[label])
        if label.endswith(DISK):
            self._on_disk += size
            self.disk = max(self.disk, self._on_disk)
            return
        if label.endswith(HOST):
            self._on_host += size
            self.host = max(self.host, self._on_host)
            if not self._one_memory:
                return
        self._now += size
        phase = self.phase
        self.curve.append((phase, self._now))
        if size > 0 and self._now >= self.peaks.get(phase, (0,))[0]:
            self.peaks[phase] = self._now, dict(self.bytes)

    def _label(self) -> str:
        """Name what a new tensor holds by the function that makes it, the innermost that is known."""
        phase, frame = self.phase, inspect.currentframe()
        assert frame is not None
        for _ in range(_LOOKED):
            made_in = _made_in(frame.f_globals.get("__name__", ""))
            # The engine of a pipeline is below all passes of its schedule.
            if made_in is not None and not (made_in == MESSAGES and (self._running or phase == "backward")):
                return self._label_with_place(made_in, phase, frame)
            if frame.f_back is None:
                break
            frame = frame.f_back
        if self._running and phase in ("reference", "forward", "backward", "evaluate"):
            return f"activations of {self._running[-1]}"
        return "gradients of activations" if phase == "backward" else phase

    def _label_with_place(self, label: str, phase: str, frame: FrameType) -> str:
        """The label of a tensor that a module with this label makes in a part of a run."""
        offloaded = (DISK if self._mix.swaps else HOST) * self._mix.offload_optimizer
        if phase == "setup":
            if label == "gathered parameters":
                return "weights" + (DISK if self._mix.weights_on_disk else HOST) * self._mix.offload_param
            return "optimizer" + offloaded if label in ("gradients", "optimizer") else label
        if label == "gradients" and _BUCKETS.search(frame.f_code.co_name):
            return "buckets"
        if label in _FEATURES.values():  # sharded as the masters
            return label + HOST * self._mix.offload_optimizer
        return label + offloaded if label == "optimizer" else label


@functools.cache
def _made_in(module: str) -> str | None:
    return _MADE_IN.get(module) or _MADE_IN.get(module.rpartition(".")[0])


def _kind(name: str) -> str:
    for part in reversed(name.split(".")):
        for kind, pattern in _KINDS:
            if re.search(pattern, part):
                return kind
    return "other layers"


def have_values(args: Sequence[Any]) -> bool:
    """Return True if `args` has tensors and none of them is fake or meta.

    In a rehearsal only the batch, and what is computed from it alone, are such tensors.
    """
    items = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    tensors = [item for item in items if isinstance(item, Tensor)]
    return bool(tensors) and not any(map(is_without_memory, tensors))
