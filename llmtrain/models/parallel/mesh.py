"""The process groups of the degrees of parallelism: also what DeepSpeed calls an mpu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.distributed as dist

from llmtrain.topology import Degrees


@cache
def mesh_of(degrees: Degrees) -> Mesh:
    """The groups for these degrees, made once a process. Every rank of the world has to call it."""
    return Mesh(degrees)


class Mesh:
    """This rank's groups. The `get_` methods are what DeepSpeed asks of an mpu (its utils/groups.py, utils/bwc.py).

    DeepSpeed's "model parallel" ranks are those whose parameters differ while their sequences are the same: the
    tensor-parallel ones here. (A pipeline brings DeepSpeed's own grid, over the same numbering of ranks.)

    There is no get_sequence_parallel_world_size on purpose: DeepSpeed 0.19.8 would let ZeRO 0 to 2 average gradients
    over the data-parallel ranks only (as it says), but ZeRO 3 over the sequence-parallel ones, too, or not, bucket by
    bucket (zero/stage3.py __avg_scatter_grads against __avg_scatter_contiguous_grads): they come out S times too small.
    Without it, every stage averages over all ranks of the group that has data and sequence in its name.
    """

    def __init__(self, degrees: Degrees) -> None:
        assert degrees.world_size == dist.get_world_size(), (degrees, dist.get_world_size())
        self.degrees = degrees
        self.rank = dist.get_rank()
        self.place = degrees.place(self.rank)
        self.tensor = self._group("tensor")
        self.sequence = self._group("sequence")
        self.data = self._group("data")
        self.data_and_sequence = self._group("data", "sequence")
        """Ranks with the same parameters: ZeRO partitions over them, gradients are averaged over them."""

    def _group(self, *along: str) -> Any:
        """Every rank makes all groups, in the same order; it keeps the one that it is in."""
        mine = None
        for ranks in self.degrees.groups(*along):
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mine = group
        return mine

    @property
    def mpu(self) -> Mesh | None:
        """For deepspeed.initialize: None when all ranks work data-parallel, and for a pipeline (it brings its own)."""
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
        return dist.get_process_group_ranks(self.tensor)[0]

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
