"""ZeRO 1 and 2: flat partitions of the masters, with an address for each parameter that has elements in one."""

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
        flats = self.optimizer.single_partition_of_fp32_groups
        for parameters, flat in zip(self.optimizer.bit16_groups, flats, strict=True):
            for parameter in parameters:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    lp, hp = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                    held = here[id(parameter)]
                    yield Home(held, flat, hp.start, lp.start, lp.numel, held.copy)

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
            if MOMENTUM not in state:
                total = sum(p.numel() for p in parameters)
                dtype = torch.float32 if optimizer.use_grad_accum_attribute else parameters[0].dtype
                state[MOMENTUM] = torch.zeros(total, dtype=dtype, device=flat.device)
            offset = 0
            for parameter in parameters:
                view = state[MOMENTUM].narrow(0, offset, parameter.numel())
                offset += parameter.numel()
                mapping = parameter._hp_mapping
                # Two ranks may hold it: the one with the parameter's first element writes it.
                writes = mapping is not None and mapping.lp_fragment_address.start == 0
                held = here[id(parameter)]
                yield Home(held, flat, 0, 0, held.region.numel, held.copy).tensor(MOMENTUM, view, writes=writes)

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
