"""List all tensors that a rank keeps between steps, with labels for what they hold."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from llmtrain.config.topology import Mix
from llmtrain.engine.api import Engine
from llmtrain.engine.deepspeed.engine import ZeroEngine, state_of
from llmtrain.engine.deepspeed.patches import Private
from llmtrain.engine.deepspeed.state import State, Zero3State, Zero12State

PRIVATE = (
    Private("deepspeed.runtime.zero.stage_1_and_2",
            ("temp_grad_buffer_for_gpu_offload", "temp_grad_buffer_for_cpu_offload",
             "param_buffer_of_bit16_for_cpu_offload_groups"), "the buffers of offload"),
    Private("deepspeed.runtime.zero.stage3", ("grad_partitions_flat_buffer", "ipg_buckets"), "gradients and buckets"),
)  # fmt: skip


DISK = " (disk)"
"""End of the label of a tensor that a run keeps on a disk."""


def held(engine: Engine, mix: Mix) -> Iterator[tuple[str, bool, Tensor]]:
    """Yield (weights, masters, moments, gradients or buckets; in host memory; tensor). `mix`: of the run, which may
    keep on a disk what the engine keeps on the host."""
    assert isinstance(engine, ZeroEngine)
    state = state_of(engine.deepspeed)
    for label, on_host, tensor in _by_parameter(state):
        yield label + DISK * (on_host and bool(mix.swaps)), on_host and not mix.swaps, tensor
    optimizer = state.optimizer
    if isinstance(state, Zero3State):
        yield "gradients", optimizer.offload_optimizer, optimizer.grad_partitions_flat_buffer
        for bucket in optimizer.ipg_buckets.values():
            yield "buckets", False, bucket.buffer
        for parameter in state.engine.module.parameters():
            if hasattr(parameter, "ds_tensor"):
                yield "gathered parameters", False, parameter  # empty, or small enough to stay gathered
                away = optimizer.offload_param and not parameter.ds_persist
                on_disk = away and mix.weights_on_disk
                yield "weights" + DISK * on_disk, away and not on_disk, parameter.ds_tensor
    elif isinstance(state, Zero12State) and optimizer.cpu_offload:
        yield "buckets", False, optimizer.temp_grad_buffer_for_gpu_offload
        yield "buckets", True, optimizer.temp_grad_buffer_for_cpu_offload
        for buffer in optimizer.param_buffer_of_bit16_for_cpu_offload_groups:
            yield "weights", True, buffer


def _by_parameter(state: State) -> Iterator[tuple[str, bool, Tensor]]:
    on_host, module = bool(state.engine.zero_cpu_offload()), state.engine.module
    for buffer in module.buffers():
        yield "buffers", False, buffer
    for parameter in module.parameters():
        if not hasattr(parameter, "ds_tensor"):
            yield "weights", False, parameter
    for home in state.homes():
        if home.flat is not home.held.parameter:
            yield "masters", on_host, home.flat
        for moment in state.moments(home.flat).values():
            yield "moments", on_host, moment
        if home.flat.grad is not None:
            yield "gradients", on_host, home.flat.grad
    for piece in state.whole_moments():
        with piece.open() as momentum:
            yield "moments", on_host, momentum
