"""The live optimizer state of this rank as pieces of Hugging Face tensors.

There is one class for each layout in DeepSpeed: complete tensors at ZeRO 0, flat partitions on the device or the host
at ZeRO 1 to 3. A rank holds the model's `local_parameters`, cut by the partition; each parameter is partitioned or
replicated over the process group that DeepSpeed has for it. The values of frozen parameters (models/parameters.py) are
only in the module.
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
from llmtrain.engine.deepspeed.optimizers import MOMENTUM, moments_of
from llmtrain.models.parameters import LocalParameter, Packed
from llmtrain.optim.optimizers import PARAM


@dataclass(frozen=True)
class Home:
    """Where a parameter is in the optimizer: `flat[offset : offset + numel]` has its local elements [start, start +
    numel)."""

    held: LocalParameter
    flat: Tensor
    offset: int
    start: int
    numel: int
    replica: tuple[int, int]

    def tensor(self, kind: str, view: Tensor, *, writes: bool = True) -> StateTensor:
        """Return state of this kind, with values in `view`, [numel]. `writes`: this rank saves its share of the
        replica."""
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
    """Return the torch optimizer inside DeepSpeed's wrapper, or DeepSpeed's optimizer if there is no wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


class State(ABC):
    partitions_parameters = False

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.optimizer: Any = engine.optimizer
        """DeepSpeed's wrapper."""
        self.base = base_optimizer(engine)
        """The torch optimizer inside the wrapper."""

    @abstractmethod
    def homes(self) -> Iterator[Home]:
        """Yield where the masters lie that this rank trains."""

    @abstractmethod
    def refresh(self) -> None:
        """Copy the (rounded) fp32 masters into the parameters of the forward pass."""

    def local_parameters(self) -> list[LocalParameter]:
        """Return this rank's part of each tensor of the model."""
        found: list[LocalParameter] = self.engine.module.local_parameters()
        for held in found:
            here = getattr(held.parameter, "ds_numel", held.parameter.numel())
            assert held.packed is not None or here == held.region.numel, (held.name, here, held.region)
        return found

    def tensors(self) -> list[StateTensor]:
        """Return all pieces; state that the optimizer would create at its first step is created."""
        found: list[StateTensor] = []
        for home in self.homes():
            found.extend(self.pieces(home))
        found.extend(self.whole_moments())
        for held in self.local_parameters():
            if held.packed is not None:
                found.append(self._packed(held, held.packed))
            elif not held.trains:
                home = self.untrained(held)
                found.append(home.tensor(PARAM, home.flat.narrow(0, home.offset, home.numel)))
        return found

    def pieces(self, home: Home) -> Iterator[StateTensor]:
        """Yield a trained parameter's master and moments."""
        for kind, tensor in {PARAM: home.flat, **self.moments(home.flat)}.items():
            yield home.tensor(kind, tensor.detach().reshape(-1).narrow(0, home.offset, home.numel))

    def _packed(self, held: LocalParameter, packed: Packed) -> StateTensor:
        """Return the piece of a frozen quantized parameter: `open` unpacks the values, `write` packs new ones."""
        home = Home(held, held.parameter, 0, 0, held.region.numel, self.replica(held))
        made = home.tensor(PARAM, held.parameter.detach())
        return replace(made, dtype=packed.dtype, open=lambda: nullcontext(held.values()), write=packed.write)

    def untrained(self, held: LocalParameter) -> Home:
        return Home(held, held.parameter.detach().reshape(-1), 0, 0, held.region.numel, self.replica(held))

    def moments(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the moments of a tensor in the optimizer by kind, in the order of its elements."""
        return moments_of(self.base, flat, self.settings(flat))

    def settings(self, flat: Tensor) -> dict[str, Any]:
        """Return the parameter group that contains a tensor of the optimizer."""
        group: dict[str, Any] = next(g for g in self.base.param_groups if any(p is flat for p in g["params"]))
        return group

    def whole_moments(self) -> Iterator[StateTensor]:
        """Yield moments that are complete although the masters are partitioned."""
        return iter(())

    def replica(self, held: LocalParameter) -> tuple[int, int]:
        """Return (index, number) of this rank's copy among the ranks with the same elements; for unpartitioned
        parameters."""
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
        for held in self.local_parameters():
            if held.packed is None:
                yield self.copy(held)

    @contextmanager
    def reading_instead(self, names: Collection[str], values: Callable[[ForwardCopy], Tensor]) -> Iterator[None]:
        """Let the forward pass use other values. After an error inside they stay: gathering is a collective."""
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
        """Release gathered parameters, before `copies` are written."""

    def gather(self) -> None:  # noqa: B027
        """Gather again the parameters that stay gathered between steps, after `copies` were written."""

    def copy(self, held: LocalParameter) -> ForwardCopy:
        return ForwardCopy(
            name=held.name, region=held.region, values=held.values(), replica=self.replica(held), partition=False
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
    """ZeRO 0 in bf16 or fp16: the optimizer has a master for each parameter of the module."""

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


# ZeRO 1 and 2: the masters are flat partitions, with the parameters in DeepSpeed's order.


_PIECE = 1 << 20  # elements sent at once


class Zero12State(State):
    def homes(self) -> Iterator[Home]:
        here = {id(held.parameter): held for held in self.local_parameters()}
        for index, flat in enumerate(self.optimizer.single_partition_of_fp32_groups):
            for parameter, offset, start, numel in self._partition(index):
                held = here[id(parameter)]
                yield Home(held, flat, offset, start, numel, held.copy)

    def _partition(self, index: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield (parameter, offset in this rank's partition, first element, number of elements) for a group. The places
        come from the flat buffer's table, because the addresses in `_hp_mapping` are wrong with
        round_robin_gradients."""
        optimizer = self.optimizer
        size = int(optimizer.partition_size[index])
        begin = size * dist.get_rank(optimizer.real_dp_process_group[index])
        laid_out = (optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index])
        for parameter, place in zip(*laid_out, strict=True):
            low, high = max(place, begin), min(place + parameter.numel(), begin + size)
            if low < high:
                yield parameter, low - begin, low - place, high - low

    def moments(self, flat: Tensor) -> dict[str, Tensor]:
        """Return no moments for Muon, whose momentum comes from `whole_moments`."""
        return {} if self.settings(flat).get("use_muon") else super().moments(flat)

    def whole_moments(self) -> Iterator[StateTensor]:
        """Yield Muon's complete momentum of every parameter that lies at least partly in this rank's partition."""
        optimizer = self.optimizer
        here = {id(held.parameter): held for held in self.local_parameters()}
        for index, group in enumerate(self.base.param_groups):
            parameters = optimizer.params_in_partition[index]
            if not group.get("use_muon") or not parameters:  # a small group may lie only in other ranks' partitions
                continue
            flat = group["params"][0]
            state = self.base.state[flat]
            # Two ranks may hold a momentum: the one with the parameter's first element writes it to checkpoints.
            writers = {id(parameter) for parameter, _, start, _ in self._partition(index) if start == 0}
            if MOMENTUM not in state:
                total = sum(p.numel() for p in parameters)
                dtype = torch.float32 if optimizer.use_grad_accum_attribute else parameters[0].dtype
                state[MOMENTUM] = torch.zeros(total, dtype=dtype, device=flat.device)
            offset = 0
            for parameter in parameters:
                view = state[MOMENTUM].narrow(0, offset, parameter.numel())
                offset += parameter.numel()
                held = here[id(parameter)]
                home = Home(held, flat, 0, 0, held.region.numel, held.copy)
                yield home.tensor(MOMENTUM, view, writes=id(parameter) in writers)

    @torch.no_grad()
    def refresh(self) -> None:
        if self.engine.device.type == "cpu":
            self._send_in_pieces()
        else:
            self.optimizer.update_lp_params()

    def _send_in_pieces(self) -> None:
        """DeepSpeed's update_lp_params for gloo, whose all-gather would need a second copy of all parameters."""
        partitioned = self.optimizer.parallel_partitioned_bit16_groups
        masters, groups = self.optimizer.single_partition_of_fp32_groups, self.optimizer.real_dp_process_group
        for partitions, master, group in zip(partitioned, masters, groups, strict=True):
            partitions[dist.get_rank(group)].data.copy_(master.data)
            for owner, partition in enumerate(partitions):
                for piece in partition.data.split(_PIECE):
                    dist.broadcast(piece, group=group, group_src=owner)


# ZeRO 3: parameters are partitioned one by one; the masters are flat sub-groups of the partitions, maybe on the host.


class Zero3State(State):
    partitions_parameters = True

    def homes(self) -> Iterator[Home]:
        optimizer = self.optimizer
        for held in self.local_parameters():
            if held.trains:
                group, offset, _ = optimizer.grad_position[optimizer.get_param_id(held.parameter)]
                start, numel = _partition(held.parameter)
                yield Home(held, optimizer.fp32_partitioned_groups_flat[group], offset, start, numel, held.copy)

    def untrained(self, held: LocalParameter) -> Home:
        parameter: Any = held.parameter
        if not hasattr(parameter, "ds_tensor"):
            return super().untrained(held)
        start, numel = _partition(parameter)
        return Home(held, parameter.ds_tensor.detach().reshape(-1), 0, start, numel, held.copy)

    def settings(self, flat: Tensor) -> dict[str, Any]:
        """Return the parameter group by DeepSpeed's index: between steps the groups do not contain the flat tensors."""
        optimizer = self.optimizer
        index = next(i for i, other in enumerate(optimizer.fp32_partitioned_groups_flat) if other is flat)
        group: dict[str, Any] = self.base.param_groups[optimizer.sub_group_to_group_id[index]]
        return group

    @torch.no_grad()
    def refresh(self) -> None:
        self.part()
        for index in range(len(self.optimizer.fp32_partitioned_groups_flat)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(index)
        self.gather()

    def part(self) -> None:
        """Partition gathered parameters again: DeepSpeed would not gather new values of a parameter that is
        gathered."""
        self.optimizer._partition_all_parameters()

    def gather(self) -> None:
        """Gather the small parameters that stay gathered between steps: the gathered values are still the old ones."""
        persistent = self.optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)
        self.optimizer.invalidate_secondary_tensor()  # hpZ's copies of the old partitions

    def copies(self) -> Iterator[ForwardCopy]:
        for held in self.local_parameters():
            parameter: Any = held.parameter
            if hasattr(parameter, "ds_tensor"):
                start, numel = _partition(parameter)
                yield ForwardCopy(
                    name=held.name,
                    region=held.region.part(start, start + numel),
                    values=parameter.ds_tensor.detach().reshape(-1)[:numel],
                    replica=held.copy,
                    partition=True,
                )
                if parameter.data.numel() != parameter.ds_numel:
                    continue
            yield self.copy(held)


def _partition(parameter: Any) -> tuple[int, int]:
    """Return (first element, number of elements without padding) of this rank's partition."""
    size = parameter.partition_numel()
    start = size * dist.get_rank(group=parameter.ds_process_group)
    return start, max(0, min(size, parameter.ds_numel - start))
