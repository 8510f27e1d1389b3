"""ZeRO 3's optimizer state that lies in swap files between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import xxhash
from deepspeed import DeepSpeedEngine
from torch import Tensor

from llmtrain.engine.api import StateTensor
from llmtrain.engine.deepspeed.patches import Private
from llmtrain.engine.deepspeed.state import Home, Zero3State
from llmtrain.features.nvme.store import Store
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.pieces import byte_view

PRIVATE = (
    Private(
        "deepspeed.runtime.zero.stage3",
        (
            "optimizer_swapper",
            "_swappable_optimizer_subgroup",
            "_optimizer_states_and_gradient_swap_in",
            "_optimizer_states_and_gradient_swap_out",
            "_reassign_or_swap_out_partitioned_parameters",
        ),
        "swapped sub-groups get their moments before the first step; the forward pass reads what was written to them",
    ),
    Private(
        "deepspeed.runtime.swap_tensor.optimizer_utils",
        ("swap_params_info", "compute_tensor", "swap_path"),
        "where a swapped sub-group lies",
    ),
)


class SwappedState(Zero3State):
    """Optimizer state on NVMe: a tensor's `open` reads its piece from the disk. Sub-groups below 1 MiB stay in host
    memory, where DeepSpeed leaves them."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        self._swapper = self.optimizer.optimizer_swapper
        self._store: Store = self._swapper.aio_handle.store
        flats = self.optimizer.fp32_partitioned_groups_flat
        self._swapped = {
            id(flat): index for index, flat in enumerate(flats) if self.optimizer._swappable_optimizer_subgroup(index)
        }
        for index in self._swapped.values():
            if not self._info(flats[index]).has_state_tensors:
                self.optimizer._optimizer_states_and_gradient_swap_in(index)
                self.moments(flats[index])
                self.optimizer._optimizer_states_and_gradient_swap_out(index)

    def pieces(self, home: Home) -> Iterator[StateTensor]:
        if id(home.flat) not in self._swapped:
            yield from super().pieces(home)
            return
        tensors = self._info(home.flat).tensors
        names = {id(entry.compute_tensor): entry.swap_path for entry in tensors}
        kinds = {kind: names.get(id(value)) for kind, value in self.base.state[home.flat].items()}
        for kind, name in {PARAM: tensors[0].swap_path, **kinds}.items():
            if name is not None:
                piece = home.tensor(kind, home.flat)
                yield replace(piece, open=lambda name=name: self._opened(name, home), on_disk=True)  # type: ignore[misc]

    @contextlib.contextmanager
    def _opened(self, name: str, home: Home) -> Iterator[Tensor]:
        size = home.flat.element_size()
        start = home.offset * size
        values = self._store.part(name, start, start + home.numel * size)
        before = xxhash.xxh3_64_intdigest(byte_view(values))
        yield values.view(home.flat.dtype)
        if xxhash.xxh3_64_intdigest(byte_view(values)) != before:
            self._store.set_part(name, start, values)

    @torch.no_grad()
    def refresh(self) -> None:
        self.part()
        for index, flat in enumerate(self.optimizer.fp32_partitioned_groups_flat):
            if id(flat) in self._swapped:
                size = self._info(flat).numel() * flat.element_size()
                flat.data = self._store.part(self._info(flat).tensors[0].swap_path, 0, size).view(flat.dtype)
            self.optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if id(flat) in self._swapped:
                flat.data = torch.empty(0, dtype=flat.dtype)
        self.gather()

    def _info(self, flat: Tensor) -> Any:
        return self._swapper.swap_params_info[self._swapper.parameter_id(flat)]
