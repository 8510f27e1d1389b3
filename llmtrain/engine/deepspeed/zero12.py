"""ZeRO 1 and 2: flat partitions of the masters, in the order in which DeepSpeed has laid the parameters out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.engine.api import StateTensor
from llmtrain.engine.deepspeed.moments import MOMENTUM
from llmtrain.engine.deepspeed.state import Home, State

_PIECE = 1 << 20  # elements sent at once


class Zero12State(State):
    """The state of DeepSpeed's optimizer of ZeRO 1 and 2."""

    def homes(self) -> Iterator[Home]:
        here = {id(held.parameter): held for held in self.local_parameters()}
        for index, flat in enumerate(self.optimizer.single_partition_of_fp32_groups):
            for parameter, offset, start, numel in self._partition(index):
                held = here[id(parameter)]
                yield Home(held, flat, offset, start, numel, held.copy)

    def _partition(self, index: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """(parameter, offset in this rank's partition, first element, elements) of what lies in it, of a group.

        Read off the flat buffer's own table. The addresses that parameters carry (`_hp_mapping`) are made from the
        group's first order: with round_robin_gradients, which lays parameters out in another, they are wrong.
        """
        optimizer = self.optimizer
        size = int(optimizer.partition_size[index])
        begin = size * dist.get_rank(optimizer.real_dp_process_group[index])
        laid_out = (optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index])
        for parameter, place in zip(*laid_out, strict=True):
            low, high = max(place, begin), min(place + parameter.numel(), begin + size)
            if low < high:
                yield parameter, low - begin, low - place, high - low

    def moments(self, flat: Tensor) -> dict[str, Tensor]:
        """Muon's momentum is kept otherwise: see `whole_moments`."""
        return {} if self.settings(flat).get("use_muon") else super().moments(flat)

    def whole_moments(self) -> Iterator[StateTensor]:
        """Muon's momentum of every parameter that touches this rank's partition, in full."""
        optimizer = self.optimizer
        here = {id(held.parameter): held for held in self.local_parameters()}
        for index, group in enumerate(self.base.param_groups):
            parameters = optimizer.params_in_partition[index]
            if not group.get("use_muon") or not parameters:  # a small group may lie in other ranks' partitions alone
                continue
            flat = group["params"][0]
            state = self.base.state[flat]
            # Two ranks may hold it: the one with the parameter's first element writes it.
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
        """DeepSpeed's update_lp_params for gloo, whose all-gather takes the memory of all parameters a second time."""
        partitioned = self.optimizer.parallel_partitioned_bit16_groups
        masters, groups = self.optimizer.single_partition_of_fp32_groups, self.optimizer.real_dp_process_group
        for partitions, master, group in zip(partitioned, masters, groups, strict=True):
            partitions[dist.get_rank(group)].data.copy_(master.data)
            for owner, partition in enumerate(partitions):
                for piece in partition.data.split(_PIECE):
                    dist.broadcast(piece, group=group, group_src=owner)
