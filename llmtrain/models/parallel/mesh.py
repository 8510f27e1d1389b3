"""The process groups for each kind of parallelism; `Mesh` is also DeepSpeed's mpu."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from llmtrain.config.topology import Degrees


def site() -> Any:
    """Return the group of all ranks of one DeepSpeed engine: torch's world, which DeepSpeed always uses."""
    return dist.group.WORLD


def make_groups(groups: list[list[int]], rank: int) -> Any:
    """Make the process group of `rank`. `groups` hold each rank of the world once. All ranks must call this.

    With NCCL this is one collective (ncclCommSplit) for all groups. torch's new_group would need one for each group,
    also on the ranks outside of it (distributed_c10d.py perform_nocolor_split): 1,024 of them on 512 ranks. With gloo a
    rank outside of a group does nothing.
    """
    mine = next(index for index, ranks in enumerate(groups) if rank in ranks)
    if site().bound_device_id is not None:
        return dist.split_group(split_ranks=groups)
    if len(groups[mine]) == 1:
        return dist.new_group(groups[mine], use_local_synchronization=True)
    return [dist.new_group(ranks) for ranks in groups][mine]


def host_group(ranks: Sequence[int] | None, limit_s: float) -> Any:
    """Make a gloo group for computations on the host; `ranks` None: all ranks of the world. All ranks must call this.

    With NCCL, whatever the backend of the new group, torch makes the ranks outside of it split the world's communicator
    (distributed_c10d.py _new_process_group_helper). That is a collective of all ranks, but the members of a gloo group
    never enter it, so the others would wait for ever. Therefore the world looks unbound in the meantime.
    (`use_local_synchronization` avoids this as well, but hangs if ranks have made different numbers of groups, because
    the number is part of the name.)

    Args:
        limit_s: time limit of the group's collectives.
    """
    limit = timedelta(seconds=limit_s)
    if ranks is None:
        return dist.new_group(backend="gloo", timeout=limit)
    world = site()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(list(ranks), backend="gloo", timeout=limit)
    finally:
        world.bound_device_id = bound


@cache
def mesh_of(degrees: Degrees) -> Mesh:
    """Return the mesh, made once for a process group. All ranks of the world must call this."""
    return Mesh(degrees)


class Mesh:
    """This rank's groups. The `get_` methods are DeepSpeed's mpu interface (its utils/groups.py, utils/bwc.py); its
    "model parallel" ranks are the tensor-parallel ones. There is no get_sequence_parallel_world_size: with that method
    ZeRO of DeepSpeed 0.19.8 averages gradients over different groups by stage and bucket (zero/stage3.py
    __avg_scatter_grads against __avg_scatter_contiguous_grads), S times too small. Without it every ZeRO stage averages
    over all data- and sequence-parallel ranks."""

    def __init__(self, degrees: Degrees) -> None:
        self.site = site()
        assert degrees.world_size == dist.get_world_size(self.site), (degrees, dist.get_world_size(self.site))
        self.degrees = degrees
        self.rank = dist.get_rank(self.site)
        self.place = degrees.place(self.rank)
        self._made: dict[tuple[int, ...], Any] = {}
        self.sequence = self._group("sequence") if degrees.sequence > 1 else None
        """Ranks that share each row; None without sequence parallelism."""
        # DeepSpeed sums over the mpu's tensor-parallel group, where None would mean all ranks.
        self.tensor = self._group("tensor") if degrees.tensor > 1 or self.mpu is not None else None
        """Ranks that share each matrix; None without tensor parallelism and without an mpu."""
        self.data = self._group("data")
        self.data_and_sequence = self._group("data", "sequence")
        """Ranks with the same parameters: ZeRO partitions over them, and gradients are averaged over them."""

    def _group(self, *along: str) -> Any:
        """Return the group of ranks along these axes that contains this rank. Equal sets of ranks share one group."""
        groups = self.degrees.groups(*along)
        mine = tuple(next(ranks for ranks in groups if self.rank in ranks))
        if len(groups) == 1:
            return self.site
        if mine not in self._made:
            self._made[mine] = make_groups(groups, self.rank)
        return self._made[mine]

    @property
    def mpu(self) -> Mesh | None:
        """Return the mpu for deepspeed.initialize; None if all ranks are data-parallel, or for a pipeline, which has
        its own."""
        plain = self.degrees.tensor == self.degrees.sequence == 1
        return None if plain or self.degrees.pipeline > 1 else self

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return self.place.tensor

    def get_model_parallel_world_size(self) -> int:
        return self.degrees.tensor

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self.rank - self.place.tensor  # neighbours, as the tensor index varies fastest (topology.Degrees)

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_pipeline_model_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return self.place.data

    def get_data_parallel_world_size(self) -> int:
        return self.degrees.data

    def get_data_parallel_group_ranks(self) -> Sequence[int]:
        return dist.get_process_group_ranks(self.data)

    def get_sequence_parallel_group(self) -> Any:
        return self.sequence

    def get_sequence_parallel_rank(self) -> int:
        return self.place.sequence

    def get_sequence_data_parallel_group(self) -> Any:
        return self.data_and_sequence

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data_and_sequence)

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.degrees.data * self.degrees.sequence
