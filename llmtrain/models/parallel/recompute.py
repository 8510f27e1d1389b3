"""Recomputation in the backward pass, with a choice of which tensors are kept and where; MLPs over slices.

transformers' own code can only recompute all layers or none.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmtrain.models.transformers_private import ATTENTION_KERNELS, OperatorMode
from llmtrain.models.varlen import within_documents  # noqa: F401  (defines the operator)

ATTENTION = (*ATTENTION_KERNELS, torch.ops.llmtrain.within_documents.default)
"""Operators whose results `keep: attention` keeps: the output [B, T, heads x size] and the sums of the softmax.
Attention is the only part of a layer whose time grows with the square of the sequence length. On a GPU torch chooses
among these kernels by shape and mask."""


def recompute(layers: Iterable[nn.Module], *, keep_attention: bool, on_host: bool, compiled: bool) -> None:
    """Make each of these layers run again in the backward pass. Call this before compilation.

    Args:
        keep_attention: keep the results of attention (`ATTENTION`) instead of computing it again.
        on_host: kept tensors wait in host memory.
        compiled: the layers will be compiled; torch.compile supports only torch's own way to keep tensors.
    """
    run_again: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False)
    if keep_attention:
        policy = functools.partial(create_selective_checkpoint_contexts, _policy)
        contexts = policy if compiled else functools.partial(_contexts, on_host)
        run_again = functools.partial(run_again, context_fn=contexts)
    if on_host:
        # DeepSpeed's own function for this loses the gathered weights of ZeRO 3 in the recomputation.
        run_again = functools.partial(_with_inputs_on_host, run_again)

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(type(layer).forward, layer, **kwargs)
        return run_again(plain, *args) if layer.training else plain(*args)

    for layer in layers:
        layer.forward = MethodType(forward, layer)  # one function, so that compiled layers of one kind share a graph


def _with_inputs_on_host(run_again: Callable[..., Any], function: Any, *args: Any) -> Any:
    with saved_tensors_hooks(to_host, from_host):
        return run_again(function, *args)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


class _Keep(OperatorMode):
    """Keeps the results of attention in a layer's forward pass, and the random state after it, with which the
    recomputation continues after attention's dropout.

    torch's own mode counts all operators, and fails if the recomputation runs others: under ZeRO 3 a weight may be
    gathered ahead in one pass and inside the layer in the other.
    """

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.kept: deque[Any] = deque()
        self._pack = pack

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator in ATTENTION:
            # Detached: else `result` and the graph that recomputes its layer would hold each other.
            packed = [self._pack(x.detach()) if isinstance(x, Tensor) else x for x in result]
            self.kept.append((packed, result[0].device, random_state(result[0].device)))
        return result


class _Give(OperatorMode):
    """Returns the kept results in the recomputation instead of running attention."""

    def __init__(self, results: deque[Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self._kept, self._unpack = results, unpack

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator not in ATTENTION:
            return operator(*args, **(kwargs or {}))
        packed, device, state = self._kept.popleft()
        set_random_state(device, state)
        return tuple(self._unpack(x) if isinstance(x, (Tensor, OnHost)) else x for x in packed)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the random state of the host and the device, without waiting for the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


def _contexts(on_host: bool) -> tuple[_Keep, _Give]:
    keep = _Keep(to_host if on_host else _itself)
    return keep, _Give(keep.kept, from_host if on_host else _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


_PIECE_BYTES = 2**26


class OnHost(tuple[torch.device, torch.Size, list[Tensor]]):
    """A copy of a tensor in host memory: (device, shape, elements in pieces)."""


def to_host(tensor: Tensor) -> OnHost:
    """Copy to host memory in pieces of 64 MiB. torch rounds each request for pinned memory up to a power of two: it
    would take 4.3 GB for the 3.3 GB that an 8B layer keeps for 400,000 tokens."""
    pieces = []
    for part in tensor.detach().reshape(-1).split(_PIECE_BYTES // tensor.element_size()):
        piece = torch.empty(part.shape, dtype=part.dtype, pin_memory=tensor.is_cuda)
        pieces.append(piece.copy_(part, non_blocking=True))  # no wait, as the host never reads it
    return OnHost((tensor.device, tensor.shape, pieces))


def from_host(on_host: OnHost) -> Tensor:
    device, shape, pieces = on_host
    flat = torch.empty(shape.numel(), dtype=pieces[0].dtype, device=device)
    for piece, room in zip(pieces, flat.split(max(1, pieces[0].numel())), strict=True):
        room.copy_(piece, non_blocking=True)
    return flat.view(shape)


# MLPs that compute slices of the sequence one after another, and keep one slice's tensors for the backward pass. An
# MLP's inner width is three to four times the hidden size, and it holds several tensors of that width: with recomputed
# layers it needs most of a long sequence's memory. It treats each token separately, so slices can be computed one by
# one, and again in the backward pass (ALST, arXiv 2506.13996). DeepSpeed's TiledMLP sums a weight's gradient over the
# slices in the parameter's own dtype, and has to tell ZeRO which slice is the last. Ours sums in fp32 and returns each
# gradient once, in every ZeRO stage.


class _Tiled(torch.autograd.Function):
    """Runs an MLP on [N, H] tokens, `tile` at a time, and keeps only its input for the backward pass."""

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
    """Return a forward that runs the MLP on `tile` tokens at a time: [B, T, H] -> [B, T, H]."""
    forward_of_mlp = mlp.forward
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in mlp.modules())

    def run(tokens_NH: Tensor) -> Tensor:
        return forward_of_mlp(tokens_NH.unsqueeze(0)).squeeze(0)

    def forward(hidden_BTH: Tensor) -> Tensor:
        flat_NH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1])
        if len(flat_NH) <= tile:
            return forward_of_mlp(hidden_BTH)
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
    """A context with the random state of the forward pass, so that recomputed dropout draws the same mask. `state`
    None: nothing changes."""
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        set_random_state(device, state)
        yield


def tile_mlps(mlps: Iterable[nn.Module], tile: int) -> None:
    """Make these MLPs compute `tile` tokens at a time. Call this before the DeepSpeed engine is built."""
    for mlp in mlps:
        mlp.forward = tiled(mlp, tile)
        set_z3_leaf_module(mlp, True)  # ZeRO 3: its weights are gathered once for all slices, not for each
