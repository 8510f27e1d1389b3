"""The computation of decoder layers, with and without a pipeline: tiled MLPs, recomputation, torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from llmtrain.config.run import ModelConfig
from llmtrain.config.topology import Mix
from llmtrain.models.recompute import random_state, recompute, set_random_state

# The MLPs of a decoder over slices of the sequence: what they keep for the backward pass is one slice's.
#
# An MLP's inner width is three to four times the hidden size, and it holds several tensors of it: with recomputed
# layers it is what a long sequence needs most memory for. Each token goes through it alone, so slices of the
# sequence can go one after another, and again in the backward pass (ALST, arXiv 2506.13996).
#
# DeepSpeed's TiledMLP sums a weight's gradient over the slices in the parameter's own dtype and needs ZeRO to be
# told when the last one is in. Ours sums in fp32 and hands each gradient over once: the same for every ZeRO stage.


class _Tiled(torch.autograd.Function):
    """An MLP on [N, H] tokens, `tile` at a time; keeps its input only."""

    @staticmethod
    def forward(ctx, run, tile, drops, tokens_NH, *parameters):
        ctx.run, ctx.tile, ctx.parameters = run, tile, parameters
        ctx.random = random_state(tokens_NH.device) if drops else None
        ctx.save_for_backward(tokens_NH)
        return _in_tiles(run, tile, tokens_NH)

    @staticmethod
    def backward(ctx, grad_output):
        (tokens_NH,) = ctx.saved_tensors
        grad_tokens_NH = torch.empty_like(tokens_NH)
        wanted = [p for p in ctx.parameters if p.requires_grad]
        # In bf16 the share of one slice among a hundred would be rounded away.
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in wanted]
        with _random_numbers(tokens_NH.device, ctx.random):
            for low in range(0, tokens_NH.shape[0], ctx.tile):
                rows = slice(low, low + ctx.tile)
                with torch.enable_grad():
                    part = tokens_NH[rows].detach().requires_grad_()
                    output = ctx.run(part)
                grad_part, *grads = torch.autograd.grad(output, [part, *wanted], grad_output[rows], allow_unused=True)
                grad_tokens_NH[rows] = grad_part
                for total, grad in zip(sums, grads, strict=True):
                    if grad is not None:
                        total += grad
        done = iter(total.to(p.dtype) for total, p in zip(sums, wanted, strict=True))
        return None, None, None, grad_tokens_NH, *(next(done) if p.requires_grad else None for p in ctx.parameters)


def tiled(mlp: nn.Module, tile: int) -> Callable[[Tensor], Tensor]:
    """The forward of `mlp` over `tile` tokens at a time. In and out: [B, T, H]."""
    own = mlp.forward
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in mlp.modules())

    def run(tokens_NH: Tensor) -> Tensor:
        return own(tokens_NH.unsqueeze(0)).squeeze(0)

    def forward(hidden_BTH: Tensor) -> Tensor:
        flat_NH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1])
        if len(flat_NH) <= tile:
            return own(hidden_BTH)
        if torch.is_grad_enabled():
            output_NH = _Tiled.apply(run, tile, drops and mlp.training, flat_NH, *mlp.parameters())
        else:
            output_NH = _in_tiles(run, tile, flat_NH)
        return output_NH.view_as(hidden_BTH)

    return forward


def _in_tiles(run: Callable[[Tensor], Tensor], tile: int, tokens_NH: Tensor) -> Tensor:
    output_NH = torch.empty_like(tokens_NH)
    for low in range(0, tokens_NH.shape[0], tile):
        output_NH[low : low + tile] = run(tokens_NH[low : low + tile])
    return output_NH


@contextlib.contextmanager
def _random_numbers(device: torch.device, state: tuple[Tensor, Tensor | None] | None) -> Iterator[None]:
    """Dropout with the forward pass's random numbers."""
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        set_random_state(device, state)
        yield


def tile_mlps(mlps: Iterable[nn.Module], tile: int) -> None:
    """Let each of these MLPs work on `tile` tokens at a time. Call it before DeepSpeed takes the model."""
    for mlp in mlps:
        mlp.forward = tiled(mlp, tile)
        set_z3_leaf_module(mlp, True)  # ZeRO 3: its weights are gathered once for all slices, not for each


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def set_up_layers(hf: PreTrainedModel, layers: Sequence[nn.Module], model: ModelConfig, mix: Mix) -> None:
    """Let the decoder `layers` of `hf` that are here compute as the model section of the run says."""
    if model.mlp_tile_tokens is not None:  # it takes the model apart: 1,000 lines that other runs do not load
        from llmtrain.models.parallel.layers import tile_mlps
        from llmtrain.models.structure.projections import dense_mlps

        tile_mlps(dense_mlps(hf), model.mlp_tile_tokens)
    if mix.recomputes:
        # The first ones: the backward pass begins with the last, which are gone when a recomputed layer needs room.
        asked = model.recompute.layers
        again = layers[:asked] if isinstance(asked, int) else layers
        recompute(again, keep_attention=mix.keep_attention, on_host=mix.layer_inputs_on_host,
                  compiled=bool(model.compile_layers))  # fmt: skip
    if model.compile_layers:
        for layer in layers:
            # Not layer.compile(), which takes the layer's hooks in: ZeRO 3 gathers and lets go in them. A run has one
            # shape, and static kernels are faster.
            layer.forward = torch.compile(layer.forward, dynamic=False)
            layer.register_forward_pre_hook(_ask_for_a_gradient, with_kwargs=True)
            if mix.zero_stage == 3:  # as a whole: the hooks of what is in it would break the graph
                set_z3_leaf_module(layer, True)


def _ask_for_a_gradient(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the hidden state that enters a trained layer have a gradient, also behind frozen embeddings: all trained
    layers are then one graph, and ZeRO 3 lets a layer's weights go after its backward pass instead of before."""
    if torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()):
        given = (*args, *kwargs.values())
        hidden = next(t for t in given if isinstance(t, Tensor) and t.is_floating_point())
        hidden.requires_grad_()
