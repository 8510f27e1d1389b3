"""ZeRO 3: partitions of the parameters, of the masters flat sub-groups of them, on the device or on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.engine.api import ForwardCopy
from llmtrain.engine.deepspeed.state import Home, State
from llmtrain.models.parameters import LocalParameter


class Zero3State(State):
    """The state of DeepSpeed's optimizer of ZeRO 3."""

    partitions_parameters = True

    def homes(self) -> Iterator[Home]:
        optimizer = self.optimizer
        for held in self.local_parameters():
            if held.trains:
                group, offset, _ = optimizer.grad_position[optimizer.get_param_id(held.parameter)]
                start, numel = _partition(held.parameter)
                yield Home(held, optimizer.fp32_partitioned_groups_flat[group], offset, start, numel, held.copy)

    def untrained(self, held: LocalParameter) -> Home:
        """A parameter is partitioned, a buffer whole."""
        parameter: Any = held.parameter
        if not hasattr(parameter, "ds_tensor"):
            return super().untrained(held)
        start, numel = _partition(parameter)
        return Home(held, parameter.ds_tensor.detach().reshape(-1), 0, start, numel, held.copy)

    def settings(self, flat: Tensor) -> dict[str, Any]:
        """DeepSpeed takes the flat tensors out of the groups between steps, and knows where each belongs."""
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
        """Partition the gathered parameters again: DeepSpeed would take a gathered one for up to date."""
        self.optimizer._partition_all_parameters()

    def gather(self) -> None:
        """Small parameters stay gathered between steps: the partitions alone would leave them as they were."""
        persistent = self.optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)
        self.optimizer.invalidate_secondary_tensor()  # hpZ's copies of what the partitions held before

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
    """(start, elements without padding) of this rank's partition."""
    size = parameter.partition_numel()
    start = size * dist.get_rank(group=parameter.ds_process_group)
    return start, max(0, min(size, parameter.ds_numel - start))
