"""Counts the storages alive at each operator, by what they hold."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor

from llmtrain.base.rank.heartbeat import heart
from llmtrain.models.transformers_private import READ, OperatorMode, has_values, in_backward, storage_of

_GATHERS = ("partition_parameters.py", "partitioned_param_coordinator.py", "parameter_offload.py")
_SHARES = ("stage_1_and_2.py", "stage3.py", "bf16_optimizer.py", "unfused_optimizer.py", "fused_optimizer.py")
"""Files of DeepSpeed that hold the gathered parameters, and the gradients with their buckets."""
_LOOKED = 60
"""Frames that are looked at for the origin of a tensor."""


class Ledger(OperatorMode):
    """Counts bytes of storages made inside the context, and their peak. Numbers read from tensors without memory
    are 1.0 or 0.

    A storage has one label at a time: `mark` gives it another one, the number of bytes in all does not change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []
        """Names of the modules whose forward pass runs, the innermost last."""
        self.bytes: Counter[str] = Counter()
        """Bytes alive by label."""
        self.most, self.at, self.then = 0, "setup", dict[str, int]()
        """The peak in bytes, the part of the step in which it came, and its bytes by label."""
        self.curve: list[tuple[str, int]] = []
        """(part of the step, bytes alive) in the last step, whenever the bytes have changed."""
        self.kept = 0
        """Bytes alive at the beginning of the last step."""
        self._now = 0
        self._held: dict[int, tuple[weakref.ref[Any], str, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is READ and not has_values(args[0]):
            return 1.0 if args[0].dtype.is_floating_point else 0
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._see(tensor)
        return made

    @property
    def phase(self) -> str:
        """The part of a run: that of the heartbeat, or backward in an autograd pass (a recomputed forward, too)."""
        return "backward" if in_backward() else heart.in_phase()

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage_of(tensor), storage.nbytes()
        held = self._held.get(key)
        if held is not None and held[0]() is not None:
            if held[2] != size:
                self._change(held[1], size - held[2])
                self._held[key] = (held[0], held[1], size)
            return
        label = self._label()
        self._held[key] = (weakref.ref(storage, lambda _: self._free(key)), label, size)
        self._change(label, size)

    def _free(self, key: int) -> None:
        _, label, size = self._held.pop(key)
        self._change(label, -size)

    def _change(self, label: str, size: int) -> None:
        self.bytes[label] += size
        self._now += size
        self.curve.append((self.phase, self._now))
        if self._now > self.most:
            self.most, self.at, self.then = self._now, self.phase, dict(self.bytes)

    def begin_step(self) -> None:
        self.kept, self.curve = self._now, []

    def mark(self, label: str, tensors: Iterable[Tensor]) -> None:
        """Give the storages of these tensors another label."""
        for tensor in tensors:
            key = storage_of(tensor)
            if (held := self._held.get(key)) is not None:
                self.bytes[held[1]] -= held[2]
                self.bytes[label] += held[2]
                self._held[key] = (held[0], label, held[2])

    def _label(self) -> str:
        """Name the origin of a tensor by the function that makes it, the innermost that is known."""
        frame: FrameType | None = inspect.currentframe()
        for _ in range(_LOOKED):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if file.endswith(_GATHERS):
                return "gathered parameters" if self.phase != "model" else "weights"
            if file.endswith(_SHARES):
                return "gradients and buckets" if self.phase == "backward" else self.phase
            if file.endswith(("models/head.py", "models/loss.py")):
                return "logits and loss"
            frame = frame.f_back
        if self.phase == "forward":
            return f"activations of {self.modules[-1]}" if self.modules else "activations"
        return self.phase
