"""Attention within the documents of a row, without a mask: `model.attention: varlen`.

A mask of [B, 1, T, T] takes a byte for each pair of tokens (17 GB for a row of 131,072), and the kernels compute every
pair. torch's variable-length attention takes the documents' bounds and computes only pairs within documents.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.transformers_private import VARLEN, varlen_backward


class _Seen(NamedTuple):
    """Which keys a query sees, and the scale of the scores."""

    bounds: Tensor
    longest: int
    scale: float | None
    window: int | None


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Bounds of the documents of a micro-batch, whose rows are concatenated. The shapes of both tensors are the same
    for all documents, since compiled layers would need a new graph for a new shape."""

    bounds: Tensor
    """int32 [tokens + 1] on the device: the first token of each document, then the number of tokens up to the end."""
    sizes: Tensor
    """int64 [2] in host memory: (number of documents, tokens of the longest)."""

    @classmethod
    def of(cls, positions: Tensor, device: torch.device) -> Documents:
        """Make the bounds from positions [B, T] in host memory, which begin at 0 in each document and row."""
        tokens = positions.numel()
        starts = (positions.flatten() == 0).nonzero().flatten()
        bounds = torch.full((tokens + 1,), tokens, dtype=torch.int32)
        bounds[: len(starts)] = starts
        sizes = torch.stack([torch.tensor(len(starts)), bounds.diff().max().long()])
        if device.type == "cuda":
            bounds = bounds.pin_memory()
        return cls(bounds=bounds.to(device, non_blocking=True), sizes=sizes)

    @classmethod
    def rows(cls, rows: int, length: int, device: torch.device) -> Documents:
        bounds = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
        return cls(bounds=bounds, sizes=torch.tensor([rows, length]))


_current: Documents | None = None


def set_documents(documents: Documents | None) -> None:
    """Set the documents for every layer's attention from now on, also when recomputed. None: each row is one
    document."""
    global _current
    _current = documents


kernel = "documents one by one"
"""Name of the kernel that this process uses for this attention; `choose_kernel` changes it on a GPU."""
_FA3 = "flash_attn_interface"
"""The module of FlashAttention 3 that torch looks for. It is not on PyPI, but built from source."""


def choose_kernel(device: torch.device) -> str:
    """Make torch use FlashAttention 3 in this process (also as sdpa's flash kernel) if the GPU is a Hopper and the
    package is installed; otherwise FlashAttention 2 stays. Returns a line with the choice, and why the faster one
    cannot be used."""
    global kernel
    kernel = "FlashAttention 2"
    usual = f"attention within documents: {kernel}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return usual
    if importlib.util.find_spec(_FA3) is None:
        return f"{usual}; with the package flash_attn_3 (module {_FA3}) it would be FlashAttention 3, made for this GPU"
    try:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
    except Exception as error:  # a library for another build, a torch without support, any error of the package
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"{usual}, as {_FA3} cannot be used: {reason}"
    kernel = "FlashAttention 3"
    return f"attention within documents: {kernel}"


def register() -> None:
    """Register this attention in transformers, with a mask function that makes no mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(VARLEN, attend)
    AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within documents, with transformers' arguments.

    Args:
        query, key, value: [B, heads, T, D]; key and value may have fewer heads than query.
        sliding_window: number of tokens that a token sees, itself included.

    Returns: (output [B, T, heads, D], None instead of weights).

    Raises:
        ModelError: the model's attention changes the scores in a way that this kernel cannot compute.
    """
    odd = [name for name in ("softcap", "s_aux") if more.get(name) is not None]
    if odd or dropout or attention_mask is not None or more.get("is_causal") is False:
        raise ModelError(
            f"model.attention {VARLEN}: {type(module).__name__} needs {' and '.join(odd) or 'dropout or a mask'} in "
            f"its attention, which {VARLEN} cannot compute. Set model.attention to sdpa or eager."
        )
    rows, _, length, _ = query.shape
    documents = _current
    if documents is None or len(documents.bounds) != rows * length + 1:  # transformers' own logits: a text a row
        documents = Documents.rows(rows, length, query.device)
    q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
    out, _ = within_documents(q, k, v, documents.bounds, documents.sizes, scaling, sliding_window)
    return out.unflatten(0, (rows, length)), None


# An operator, since torch.compile does not look into these: the kernel needs the number of documents and the longest as
# Python numbers, each of which would be another graph (8 in 3 steps, then no layer is compiled).
@torch.library.custom_op("llmtrain::within_documents", mutates_args=())
def within_documents(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, sizes: Tensor, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents (see `Documents`). Query, key and value: [tokens, heads, D]. Returns: the
    output for the queries, and sums for each head and token that the backward pass needs."""
    forward, _ = _kernels(query.device)
    out, sums = forward(query, key, value, _seen_by(bounds, sizes, scale, window))
    return out.contiguous(), sums


@within_documents.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("llmtrain::within_documents_backward", mutates_args=())
def _within_documents_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    sizes: Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _, backward = _kernels(query.device)
    of_q, of_k, of_v = backward((gradient, query, key, value, out, sums), _seen_by(bounds, sizes, scale, window))
    return of_q.contiguous(), of_k.contiguous(), of_v.contiguous()


@_within_documents_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return of_q, of_k, of_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, bounds, sizes, out, sums = ctx.saved_tensors
    arguments = (gradient.contiguous(), query, key, value, out, sums, bounds, sizes, ctx.scale, ctx.window)
    return (*_within_documents_backward(*arguments), None, None, None, None)


within_documents.register_autograd(_gradients, setup_context=_keep)


def _seen_by(bounds: Tensor, sizes: Tensor, scale: float | None, window: int | None) -> _Seen:
    """Cut the bounds to [documents + 1], without repeated ones at the end, and read the longest document's length."""
    documents, longest = sizes.tolist()
    return _Seen(bounds[: documents + 1], longest, scale, window)


def _kernels(device: torch.device) -> tuple[Any, Any]:
    return (_flash, _flash_backward) if device.type == "cuda" else (_one_by_one, _one_by_one_backward)


def _window(window: int | None) -> tuple[int, int]:
    """Return torch's form of a window: (tokens to the left, tokens to the right)."""
    return (-1 if window is None else window - 1, 0)


@cache
def _shares_heads() -> bool:
    """Return True if keys may have fewer heads than queries; torch 2.11 needs equal numbers."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _flash(query: Tensor, key: Tensor, value: Tensor, seen: _Seen) -> tuple[Tensor, Tensor]:
    """Run flash attention, in bf16 or fp16; torch raises an error for other precisions."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    more: dict[str, Any] = {}
    if (shared := query.shape[1] // key.shape[1]) > 1:
        if _shares_heads():
            more["enable_gqa"] = True
        else:
            key, value = (heads.repeat_interleave(shared, 1) for heads in (key, value))
    more |= {"return_aux": AuxRequest(lse=True), "scale": seen.scale, "window_size": _window(seen.window)}
    out, sums = varlen_attn(query, key, value, seen.bounds, seen.bounds, seen.longest, seen.longest, **more)
    return out, sums


def _flash_backward(tensors: tuple[Tensor, ...], seen: _Seen) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, key, value, out, sums = tensors
    shared = query.shape[1] // key.shape[1]
    repeated = shared > 1 and not _shares_heads()
    if repeated:
        key, value = (heads.repeat_interleave(shared, 1) for heads in (key, value))
    tensors = (gradient, query, key, value, out, sums)
    of_q, of_k, of_v = varlen_backward(
        tensors, seen.bounds, seen.longest, scale=seen.scale, window=_window(seen.window)
    )
    if repeated:
        of_k, of_v = (gradient_of.unflatten(1, (-1, shared)).sum(2) for gradient_of in (of_k, of_v))
    return of_q, of_k, of_v


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, seen: _Seen) -> tuple[Tensor, Tensor]:
    """Compute each document separately, on a device without a kernel for several."""
    bounds, _, scale, window = seen
    out, grouped = torch.empty_like(query), query.shape[1] != key.shape[1]
    for at in _slices(bounds):
        q, k, v = (tensor[at].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        mask = None if window is None or window >= q.shape[2] else _seen(q.shape[2], window, q.device)
        part = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
        out[at] = part.squeeze(0).transpose(0, 1)
    return out, query.new_zeros((query.shape[1], len(query)), dtype=torch.float32)


def _one_by_one_backward(tensors: tuple[Tensor, ...], seen: _Seen) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients by definition, in fp32, because autograd does not see inside an operator. [shared heads, T,
    T] at a time."""
    gradient, query, key, value, out, _ = tensors
    bounds, _, scale, window = seen
    of_q, of_k, of_v = (torch.empty_like(tensor) for tensor in (query, key, value))
    shared, scale = query.shape[1] // key.shape[1], query.shape[2] ** -0.5 if scale is None else scale
    for at in _slices(bounds):
        hidden = ~_seen(at.stop - at.start, window, query.device)
        for head in range(key.shape[1]):
            heads = slice(head * shared, (head + 1) * shared)
            q, o, g = (tensor[at, heads].transpose(0, 1).float() for tensor in (query, out, gradient))
            k, v = key[at, head].float(), value[at, head].float()
            chosen = (q @ k.T * scale).masked_fill(hidden, -torch.inf).softmax(-1)
            of_scores = chosen * (g @ v.T - (g * o).sum(-1, keepdim=True)) * scale
            of_q[at, heads] = (of_scores @ k).transpose(0, 1).to(query.dtype)
            of_k[at, head] = (of_scores.mT @ q).sum(0).to(key.dtype)
            of_v[at, head] = (chosen.mT @ g).sum(0).to(value.dtype)
    return of_q, of_k, of_v


def _slices(bounds: Tensor) -> list[slice]:
    return [slice(first, end) for first, end in itertools.pairwise(bounds.tolist())]


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the attention mask of one document, True where a token sees another: bool [length, length]."""
    at = torch.arange(length, device=device)
    behind = at[:, None] - at
    return (behind >= 0) & (behind < (length if window is None else window))
