"""Run a rank without the others, by torch's fake process group, in which every collective returns at once."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject import auto_ep
from deepspeed.runtime.zero import partitioned_param_coordinator, stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from llmtrain.engine import progress
from llmtrain.engine.api import Engine
from llmtrain.engine.deepspeed.patches import Private, check
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.plan import held
from llmtrain.models.parallel.deepspeed_private import TravellingTokens
from llmtrain.models.transformers_private import with_values
from llmtrain.optim.optimizers import AdamW, Lion

PRIVATE = (
    Private("deepspeed.module_inject.auto_ep", ("_gate_activation_matches",),
            "a rank without the others computes the probe of the experts' activation with values"),
    Private("deepspeed.runtime.pipe.engine", ("_allocate_or_extend_buffers", "_recv_tensor_meta"),
            "a stage gets no message that says what comes"),
)  # fmt: skip


class RehearsedRanks(Ranks):
    """The other ranks of a job do not exist: collectives assume that they send the same values as this one."""

    def agree(self, weight: int, asks: Sequence[int]) -> Callable[[], tuple[int, list[int]]]:
        total = max(1, weight * self.world_size)  # a rank with weight stands for all
        return lambda: (total, [ask * self.world_size for ask in asks])


@contextlib.contextmanager
def rehearsed_ranks(rank: int, world_size: int, slots: int, imbalance: float = 1.0) -> Iterator[Ranks]:
    """Yield the `Ranks` of a job of which only this process exists.

    `slots`: ranks of a host. `imbalance`: tokens for this rank's experts over the mean of the ranks that share experts.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    check((*PRIVATE, *held.PRIVATE))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank % slots), DS_ACCELERATOR="cpu")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    get_accelerator().is_fp16_supported = lambda: True  # the target's device may have it
    get_accelerator().pin_memory = _pin
    TravellingTokens.exchanged = functools.partialmethod(_exchanged, imbalance)  # type: ignore[method-assign,assignment]
    progress.begin(torch.device("cpu"), lambda *_, **__: None)
    # What ZeRO 3 compares over the ranks are numbers of one rank here.
    auto_ep._gate_activation_matches = with_values()(auto_ep._gate_activation_matches)
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda *_: None
    nn.Module._apply = _apply  # type: ignore[method-assign]
    AllGatherCoalescedHandle.wait = _wait
    stage3.reduce_scatter_coalesced = _reduce_scatter
    AdamW.host_ops = Lion.host_ops = ()  # DeepSpeed's would read memory
    try:
        yield RehearsedRanks(rank=rank, world_size=world_size)
    finally:
        nn.Module._apply = _torchs_apply  # type: ignore[method-assign]
        dist.destroy_process_group()


_sent = TravellingTokens.exchanged


def _exchanged(experts: TravellingTokens, imbalance: float, counts_E: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """Return counts of tokens in place of a router's: `imbalance` times the mean for this rank's experts."""
    _sent(experts, counts_E, choices)
    local, ranks = experts.num_local_experts, experts.ep_size
    mine, share = slice(experts.ep_rank * local, (experts.ep_rank + 1) * local), min(1.0, imbalance / ranks)
    count = counts_E.numel()
    with with_values():
        shares_E = torch.full((count,), (1 - share) / max(1, count - local), dtype=torch.float64)
        shares_E[mine] = share / local
        ends_E = (shares_E.cumsum(0) * choices).round().long()
        counts_E = ends_E.diff(prepend=torch.zeros(1, dtype=torch.int64)).int()
        return counts_E, counts_E[mine].repeat(ranks)


_pinned: list[weakref.ref[torch.UntypedStorage]] = []


def _pin(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    _pinned.append(weakref.ref(tensor.untyped_storage()))
    return tensor


def beyond_pinned() -> int:
    """Bytes of host memory that a GPU's rank takes beyond its tensors: torch gives the page-locked ones, which
    DeepSpeed asks for, blocks of powers of two."""
    sizes = [storage.nbytes() for reference in _pinned if (storage := reference()) is not None]
    return sum((1 << (size - 1).bit_length()) - size for size in sizes if size)


def make_room_for_messages(engine: Engine) -> None:
    """Let a pipeline stage allocate room for the messages of the stage before it, which a rehearsal does not start."""
    if not engine.is_pipeline:
        return
    from llmtrain.engine.deepspeed.pipeline_engine import PipelineZeroEngine

    assert isinstance(engine, PipelineZeroEngine)

    def received(_stage: int) -> Tensor | tuple[Tensor, Tensor]:
        first, width = engine.first, engine.module.config.get_text_config().hidden_size
        room = engine.deepspeed._allocate_or_extend_buffers
        hidden: Tensor = room(0, [*first.inputs.shape, width], engine.forward_dtype)
        return hidden if first.positions is None else (hidden, room(1, [*first.inputs.shape], torch.int64))

    engine.deepspeed._recv_tensor_meta = received


_torchs_apply = nn.Module._apply


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module.to` and its kin: torch swaps tensors without memory for others, which fails for ones that
    are watched."""
    tensors = [*module.parameters(), *module.buffers()]
    if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return _torchs_apply(module, change, recurse)
    with torch.no_grad():
        for tensor in tensors:
            with contextlib.nullcontext() if isinstance(tensor, FakeTensor) else with_values():
                changed = change(tensor)
            if changed is not tensor:
                tensor.data = changed
    return module


# ZeRO 3's own code cuts each gradient, and each gathered parameter, into a piece for every rank: of 70B on 512 ranks
# 0.8 million tensors, and four fifths of the time. Tensors in one piece take as much memory.


def _wait(gathered: AllGatherCoalescedHandle, handle_dependency: bool = True) -> None:
    """Fill the parameters of one message."""
    if gathered.complete:
        return
    gathered.allgather_handle.wait()
    for parameter in gathered.params:
        gathered_values = gathered.partitions[0].as_strided((parameter.ds_numel,), (1,), 0)
        parameter.data = torch.cat([gathered_values]).view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
    gathered.complete = True


def _reduce_scatter(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Average the tensors over the ranks. Returns this rank's part of each."""
    ranks, rank = group.size(), group.rank()
    parts = [-(-tensor.numel() // ranks) for tensor in tensors]
    padding = sum(parts) * ranks - sum(tensor.numel() for tensor in tensors)
    joined = tensors[0].view(-1)
    if len(tensors) > 1 or padding:
        more = torch.empty(padding, dtype=joined.dtype, device=joined.device)
        joined = torch.cat([*(tensor.view(-1) for tensor in tensors), more])
    joined.div_(ranks)
    mine = joined.narrow(0, rank * sum(parts), sum(parts))
    dist.reduce_scatter_tensor(mine, joined, group=group)
    sizes = [max(0, min(part, tensor.numel() - rank * part)) for part, tensor in zip(parts, tensors, strict=True)]
    return [piece[:size] for piece, size in zip(mine.split(parts), sizes, strict=True)]
