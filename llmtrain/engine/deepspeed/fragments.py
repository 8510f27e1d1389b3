"""The live optimizer state of this rank as pieces of Hugging Face tensors.

One view for every form that DeepSpeed gives it: whole tensors (ZeRO 0), flat partitions with an address
per parameter (ZeRO 1 and 2), flat sub-groups of parameter partitions (ZeRO 3), on the device or on
the host. What it holds of which tensor is what the model's `local_parameters` say, cut by the partition; the group
that a parameter is partitioned or replicated over is the one that DeepSpeed uses for it. Writing into a fragment's
view changes the optimizer; `refresh` then updates what the forward reads. What does not train (models/frozen.py) has
its values here alone, and the forward reads those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.models.build import DTYPES
from llmtrain.models.parameters import LocalParameter
from llmtrain.tensors.region import Region

PARAM = "param"
"""Kind of a fragment that holds the fp32 master values; the other kinds are the optimizer's names of its moments."""

_ADAM_KINDS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = "momentum_buffer"
_PIECE = 1 << 20  # elements sent at once


@dataclass(frozen=True)
class Fragment:
    """A piece of one tensor that this rank holds."""

    name: str
    """Hugging Face name of the parameter."""
    kind: str
    region: Region
    """Which elements of the flat Hugging Face tensor."""
    view: Tensor
    """[n] live values."""
    own: slice
    """The part of `view` that this rank writes to checkpoints: replicas share the work, every element has one owner."""
    replica: tuple[int, int]
    """(index, of): the pieces with one index, over all ranks, are the whole tensor."""


@dataclass(frozen=True)
class _Home:
    """Where the optimizer keeps a parameter: `flat[offset : offset + numel]` is its local [start, start + numel)."""

    held: LocalParameter
    flat: Tensor
    offset: int
    start: int
    numel: int
    replica: tuple[int, int]

    def fragment(self, kind: str, view: Tensor) -> Fragment:
        """Of `view`, which holds the same elements."""
        region = self.held.region.part(self.start, self.start + self.numel)
        index, of = self.replica
        low, high = (self.held.region.numel * i // of - self.start for i in (index, index + 1))
        own = slice(min(max(low, 0), self.numel), min(max(high, 0), self.numel))
        return Fragment(self.held.name, kind, region, view, own, self.replica)


def whole_shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """Full shape of every parameter of the model, by Hugging Face name; also of those that other ranks hold."""
    return engine.module.shapes()


def fragments(engine: Any) -> list[Fragment]:
    """All of this rank's slices. Optimizer state that DeepSpeed would create at the first step is created now."""
    state = base_optimizer(engine).state
    found = []
    for home in _homes(engine):
        _create_state(engine, home.flat)
        replicated = engine.zero_optimization_stage() == 0
        for kind in (PARAM, *_ADAM_KINDS, *([_MOMENTUM] if replicated or _is_zero3(engine) else [])):
            tensor = home.flat if kind == PARAM else state[home.flat].get(kind)
            if tensor is not None:
                view = tensor.detach().reshape(-1).narrow(0, home.offset, home.numel)
                found.append(home.fragment(kind, view))
    if not _is_zero3(engine) and engine.zero_optimization_stage() > 0:
        found.extend(_zero12_momentum(engine))
    for held in _local_parameters(engine):
        if not held.trains:
            values = held.parameter.detach().reshape(-1)
            home = _Home(held, values, 0, 0, held.region.numel, _replica(engine, held))
            found.append(home.fragment(PARAM, values))
    return found


def owned(fragment: Fragment) -> tuple[Region, Tensor]:
    """(which elements of the flat tensor, values) of the part that this rank writes."""
    return fragment.region.part(fragment.own.start, fragment.own.stop), fragment.view[fragment.own]


@torch.no_grad()
def refresh(engine: Any) -> None:
    """Make the parameters that the forward pass reads equal to the (rounded) fp32 masters."""
    optimizer = engine.optimizer
    if _is_zero3(engine):
        optimizer._partition_all_parameters()  # what is gathered now would be taken for up to date below
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        # Small parameters stay gathered between steps: the partitions alone would leave them as they were.
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif hasattr(optimizer, "update_lp_params"):
        if engine.device.type == "cpu":
            _update_lp_params_in_pieces(optimizer)
        else:
            optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):
        for masters, copies in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for master, copy in zip(masters, copies, strict=True):
                copy.data.copy_(master.data)


def _update_lp_params_in_pieces(optimizer: Any) -> None:
    """DeepSpeed's update_lp_params for gloo, whose all-gather takes the memory of all parameters a second time."""
    partitioned, masters = optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
    for partitions, master, group in zip(partitioned, masters, optimizer.real_dp_process_group, strict=True):
        partitions[dist.get_rank(group)].data.copy_(master.data)
        for owner, partition in enumerate(partitions):
            for piece in partition.data.split(_PIECE):
                dist.broadcast(piece, dist.get_global_rank(group, owner), group=group)


def optimizer_step(engine: Any) -> int:
    """Applied optimizer steps (skipped ones do not count), as the optimizer's bias correction knows them."""
    for state in base_optimizer(engine).state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def set_optimizer_step(engine: Any, step: int) -> None:
    """Set every step counter of the optimizer."""
    for state in base_optimizer(engine).state.values():
        if torch.is_tensor(state.get("step")):
            state["step"].fill_(step)
        elif "step" in state:
            state["step"] = step


def loss_scale_state(engine: Any) -> dict[str, float]:
    """The dynamic loss scaler's numbers (fp16); empty in other precisions."""
    scaler = _scaler(engine)
    return {} if scaler is None else {key: getattr(scaler, key) for key in _SCALER_KEYS if hasattr(scaler, key)}


def set_loss_scale_state(engine: Any, numbers: dict[str, float]) -> None:
    """Restore what `loss_scale_state` gave."""
    scaler = _scaler(engine)
    if scaler is not None:
        for key, value in numbers.items():
            setattr(scaler, key, value)


_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _scaler(engine: Any) -> Any:
    if not engine.fp16_enabled():
        return None
    return engine.optimizer.loss_scaler


def base_optimizer(engine: Any) -> Any:
    """The torch optimizer inside DeepSpeed's wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def forward_dtype(engine: Any) -> torch.dtype:
    """The precision that the JSON gives the forward pass; the parameters themselves might have another by mistake."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


@dataclass(frozen=True)
class ForwardCopy:
    """A parameter that the forward pass reads on this rank, or its partition (ZeRO 3)."""

    name: str
    region: Region
    values: Tensor
    """[n]."""
    replica: tuple[int, int]
    """As of a fragment."""
    partition: bool


def forward_copies(engine: Any) -> Iterator[ForwardCopy]:
    """What the forward pass reads on this rank."""
    for held in _local_parameters(engine):
        parameter: Any = held.parameter
        name, region = held.name, held.region
        if _is_zero3(engine) and held.trains:
            partition = parameter.ds_tensor.detach().reshape(-1)
            start, numel = _zero3_slice(parameter)
            yield ForwardCopy(name, region.part(start, start + numel), partition[:numel], held.copy, True)
            if parameter.data.numel() != parameter.ds_numel:
                continue
        yield ForwardCopy(name, region, parameter.detach().reshape(-1), _replica(engine, held), False)


def frozen_names(engine: Any) -> set[str]:
    """What does not train, of the tensors that this rank holds."""
    return {held.name for held in _local_parameters(engine) if not held.trains}


def _local_parameters(engine: Any) -> list[LocalParameter]:
    found: list[LocalParameter] = engine.module.local_parameters()
    for held in found:
        here = getattr(held.parameter, "ds_numel", held.parameter.numel())
        assert here == held.region.numel, (held.name, here, held.region)
    return found


def _replica(engine: Any, held: LocalParameter) -> tuple[int, int]:
    """(index, of) among all ranks that hold the same elements, where nothing is partitioned."""
    parameter: Any = held.parameter
    if hasattr(parameter, "ds_process_group"):
        group = parameter.ds_process_group
    elif getattr(parameter, "allreduce", True):
        group = engine.seq_data_parallel_group
    else:  # an expert: DeepSpeed's mark, moe/utils.py is_moe_param
        group = engine.expert_data_parallel_group[parameter.group_name]
    size = dist.get_world_size(group)
    return held.copy[0] * size + dist.get_rank(group), held.copy[1] * size


def _is_zero3(engine: Any) -> bool:
    return engine.zero_optimization_stage() == 3


def _homes(engine: Any) -> Iterator[_Home]:
    here = {id(held.parameter): held for held in _local_parameters(engine) if held.trains}
    optimizer = engine.optimizer
    if _is_zero3(engine):
        for held in here.values():
            group, offset, _ = optimizer.grad_position[optimizer.get_param_id(held.parameter)]
            start, numel = _zero3_slice(held.parameter)
            flat = optimizer.fp32_partitioned_groups_flat[group]
            yield _Home(held, flat, offset, start, numel, held.copy)
    elif engine.zero_optimization_stage() > 0:
        for parameters, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            for parameter in parameters:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    lp, hp = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                    held = here[id(parameter)]
                    yield _Home(held, flat, hp.start, lp.start, lp.numel, held.copy)
    elif hasattr(optimizer, "fp32_groups"):
        for masters, copies in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for master, copy in zip(masters, copies, strict=True):
                held = here[id(copy)]
                yield _Home(held, master, 0, 0, master.numel(), _replica(engine, held))
    else:
        for held in here.values():
            yield _Home(held, held.parameter, 0, 0, held.region.numel, _replica(engine, held))


def _zero3_slice(parameter: Any) -> tuple[int, int]:
    """(start, elements without padding) of this rank's partition."""
    size = parameter.partition_numel()
    start = size * dist.get_rank(group=parameter.ds_process_group)
    return start, max(0, min(size, parameter.ds_numel - start))


def _create_state(engine: Any, flat: Tensor) -> None:
    """What the optimizer itself creates lazily for one tensor at its first step, with the step counter at 0."""
    optimizer = base_optimizer(engine)
    state = optimizer.state[flat]
    group = next((g for g in optimizer.param_groups if any(p is flat for p in g["params"])), None)
    is_muon = _muon_group(engine, flat, group)
    if is_muon:
        if (engine.zero_optimization_stage() == 0 or _is_zero3(engine)) and _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(flat, requires_grad=False)
        return
    if "exp_avg" in state:
        return
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":
        dtype = torch.float32 if optimizer.fp32_optimizer_states else flat.dtype
        state["step"] = 0
    else:
        dtype = flat.dtype
        device = flat.device if optimizer.defaults.get("fused", True) else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    for kind in _ADAM_KINDS:
        state[kind] = torch.zeros_like(flat, dtype=dtype, requires_grad=False)


def _muon_group(engine: Any, flat: Tensor, group: dict[str, Any] | None) -> bool:
    if group is not None:
        return bool(group.get("use_muon", False))
    optimizer = engine.optimizer  # ZeRO 3 takes the flat tensors out of the groups between steps
    if not getattr(optimizer, "use_muon", False):
        return False
    index = next(i for i, other in enumerate(optimizer.fp32_partitioned_groups_flat) if other is flat)
    return bool(optimizer.sub_groups_using_muon[index])


def _zero12_momentum(engine: Any) -> Iterator[Fragment]:
    """Muon under ZeRO 1 and 2: the momentum of every parameter that touches this rank's partition, in full."""
    optimizer = engine.optimizer
    here = {id(held.parameter): held for held in _local_parameters(engine)}
    for index, group in enumerate(base_optimizer(engine).param_groups):
        parameters = optimizer.params_in_partition[index]
        if not group.get("use_muon") or not parameters:  # a small group may lie in other ranks' partitions alone
            continue
        flat = group["params"][0]
        state = base_optimizer(engine).state[flat]
        if _MOMENTUM not in state:
            total = sum(p.numel() for p in parameters)
            dtype = DTYPES["fp32"] if optimizer.use_grad_accum_attribute else parameters[0].dtype
            state[_MOMENTUM] = torch.zeros(total, dtype=dtype, device=flat.device)
        offset = 0
        for parameter in parameters:
            view = state[_MOMENTUM].narrow(0, offset, parameter.numel())
            offset += parameter.numel()
            mapping = parameter._hp_mapping
            # Two ranks may hold it: the one with the parameter's first element writes it.
            writes = mapping is not None and mapping.lp_fragment_address.start == 0
            held = here[id(parameter)]
            whole = _Home(held, flat, 0, 0, held.region.numel, held.copy).fragment(_MOMENTUM, view)
            yield whole if writes else replace(whole, own=slice(0, 0))
