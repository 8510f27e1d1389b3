"""The live optimizer state of this rank as pieces of Hugging Face tensors, and the ways of keeping it without ZeRO.

One class for each way that DeepSpeed keeps it: whole tensors here, flat partitions in zero12.py and zero3.py, on the
device or on the host. What a rank holds of which tensor is what the model's `local_parameters` say, cut by the
partition; the group that a parameter is partitioned or replicated over is the one that DeepSpeed uses for it. What does
not train (models/frozen.py) has its values in the module alone, and the forward pass reads those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor

from llmtrain.engine.api import ForwardCopy, StateTensor
from llmtrain.engine.deepspeed.moments import moments_of
from llmtrain.models.parameters import LocalParameter, Packed
from llmtrain.optim.optimizers import PARAM


@dataclass(frozen=True)
class Home:
    """Where the optimizer keeps a parameter: `flat[offset : offset + numel]` is its local [start, start + numel)."""

    held: LocalParameter
    flat: Tensor
    offset: int
    start: int
    numel: int
    replica: tuple[int, int]

    def tensor(self, kind: str, view: Tensor, *, writes: bool = True) -> StateTensor:
        """State of this kind, [numel] in `view`. `writes`: this rank owns its share of the replica's elements."""
        index, of = self.replica
        low, high = (self.held.region.numel * i // of - self.start for i in (index, index + 1))
        own = slice(min(max(low, 0), self.numel), min(max(high, 0), self.numel)) if writes else slice(0, 0)
        return StateTensor(
            name=self.held.name,
            kind=kind,
            region=self.held.region.part(self.start, self.start + self.numel),
            own=own,
            replica=self.replica,
            dtype=view.dtype,
            device=view.device,
            open=lambda: nullcontext(view),
        )


def base_optimizer(engine: DeepSpeedEngine) -> Any:
    """The torch optimizer inside DeepSpeed's wrapper, or DeepSpeed's optimizer itself."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


class State(ABC):
    """The state of one engine; a class for each way that DeepSpeed keeps it."""

    partitions_parameters = False

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.optimizer: Any = engine.optimizer
        """DeepSpeed's wrapper."""
        self.base = base_optimizer(engine)
        """The torch optimizer in it."""

    @abstractmethod
    def homes(self) -> Iterator[Home]:
        """Where the masters of what this rank trains lie."""

    @abstractmethod
    def refresh(self) -> None:
        """Make the parameters that the forward pass reads equal to the (rounded) fp32 masters."""

    def local_parameters(self) -> list[LocalParameter]:
        """What this rank holds of each tensor of the model."""
        found: list[LocalParameter] = self.engine.module.local_parameters()
        for held in found:
            here = getattr(held.parameter, "ds_numel", held.parameter.numel())
            assert held.packed is not None or here == held.region.numel, (held.name, here, held.region)
        return found

    def tensors(self) -> list[StateTensor]:
        """All pieces. State that the optimizer would create at its first step is created now."""
        found = []
        for home in self.homes():
            moments = self.moments(home.flat)
            for kind, tensor in {PARAM: home.flat, **moments}.items():
                view = tensor.detach().reshape(-1).narrow(0, home.offset, home.numel)
                found.append(home.tensor(kind, view))
        found.extend(self.whole_moments())
        for held in self.local_parameters():
            if held.packed is not None:
                found.append(self._packed(held, held.packed))
            elif not held.trains:
                home = self.untrained(held)
                found.append(home.tensor(PARAM, home.flat.narrow(0, home.offset, home.numel)))
        return found

    def _packed(self, held: LocalParameter, packed: Packed) -> StateTensor:
        """Return a frozen quantized parameter: opening it unpacks the values, and it is written as a whole."""
        home = Home(held, held.parameter, 0, 0, held.region.numel, self.replica(held))
        made = home.tensor(PARAM, held.parameter.detach())
        return replace(made, dtype=packed.dtype, open=lambda: nullcontext(held.values()), write=packed.write)

    def untrained(self, held: LocalParameter) -> Home:
        """Where the only values of what does not train lie: in the module."""
        return Home(held, held.parameter.detach().reshape(-1), 0, 0, held.region.numel, self.replica(held))

    def moments(self, flat: Tensor) -> dict[str, Tensor]:
        """The moments of a tensor that the optimizer steps, by kind; they lie as its elements do."""
        return moments_of(self.base, flat, self.settings(flat))

    def settings(self, flat: Tensor) -> dict[str, Any]:
        """The parameter group of a tensor that the optimizer steps."""
        group: dict[str, Any] = next(g for g in self.base.param_groups if any(p is flat for p in g["params"]))
        return group

    def whole_moments(self) -> Iterator[StateTensor]:
        """Moments that are kept for a whole parameter although its master is partitioned."""
        return iter(())

    def replica(self, held: LocalParameter) -> tuple[int, int]:
        """(index, of) among all ranks that hold the same elements, where nothing is partitioned."""
        parameter: Any = held.parameter
        if hasattr(parameter, "ds_process_group"):
            group = parameter.ds_process_group
        elif getattr(parameter, "allreduce", True):
            group = self.engine.seq_data_parallel_group
        else:  # an expert: DeepSpeed's mark, moe/utils.py is_moe_param
            group = self.engine.expert_data_parallel_group[parameter.group_name]
        size = dist.get_world_size(group)
        return held.copy[0] * size + dist.get_rank(group), held.copy[1] * size

    def copies(self) -> Iterator[ForwardCopy]:
        """What the forward pass reads on this rank."""
        for held in self.local_parameters():
            if held.packed is None:
                yield self.copy(held)

    @contextmanager
    def reading_instead(self, names: Collection[str], values: Callable[[ForwardCopy], Tensor]) -> Iterator[None]:
        """In which the forward pass reads other values of these parameters.

        Not put back after an error: gathering is a collective, and the others may be elsewhere.
        """
        self.part()
        here = [copy for copy in self.copies() if copy.name in names]
        trained = [copy.values.clone() for copy in here]
        for copy in here:
            copy.values.copy_(values(copy))
        self.gather()
        yield
        self.part()
        for copy, own in zip(here, trained, strict=True):
            copy.values.copy_(own)
        self.gather()

    def part(self) -> None:  # noqa: B027  # nothing to do where nothing is gathered
        """Before `copies` are written: let go of what the forward pass has gathered of them."""

    def gather(self) -> None:  # noqa: B027
        """After they were written: gather what is to be there between the steps."""

    def copy(self, held: LocalParameter) -> ForwardCopy:
        """A parameter as the forward pass reads it, whole."""
        return ForwardCopy(
            name=held.name,
            region=held.region,
            values=held.values(),
            replica=self.replica(held),
            partition=False,
        )


class PlainState(State):
    """ZeRO 0 in fp32: the module's parameters are the masters."""

    def homes(self) -> Iterator[Home]:
        for held in self.local_parameters():
            if held.trains:
                yield Home(held, held.parameter, 0, 0, held.region.numel, self.replica(held))

    def refresh(self) -> None:
        """Nothing to do: the forward pass reads the masters."""


class HalfState(State):
    """ZeRO 0 in bf16 or fp16: a master for each parameter of the module."""

    def homes(self) -> Iterator[Home]:
        here = {id(held.parameter): held for held in self.local_parameters()}
        for masters, copies in zip(self.optimizer.fp32_groups, self.optimizer.fp16_groups, strict=True):
            for master, copy in zip(masters, copies, strict=True):
                held = here[id(copy)]
                yield Home(held, master, 0, 0, master.numel(), self.replica(held))

    @torch.no_grad()
    def refresh(self) -> None:
        for masters, copies in zip(self.optimizer.fp32_groups, self.optimizer.fp16_groups, strict=True):
            for master, copy in zip(masters, copies, strict=True):
                copy.data.copy_(master.data)
