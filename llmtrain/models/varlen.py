"""Attention within the documents of a row, without a mask: `model.attention: varlen`.

A mask of [B, 1, T, T] costs a byte for each pair of tokens (17 GB for a row of 131,072), and the kernels compute every
pair. torch's variable-length attention takes the bounds of the documents instead and computes what lies within them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.errors import ModelError
from llmtrain.models.patches import VARLEN


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Where the documents of a micro-batch lie, its rows one after another."""

    bounds: Tensor
    """int32 [documents + 1] on the device: the first token of each, and the number of tokens."""
    lengths: list[int]
    """Tokens of each document."""

    @classmethod
    def of(cls, positions: Tensor, device: torch.device) -> Documents:
        """From positions [B, T] in host memory, which begin at 0 with each document and each row."""
        starts = (positions.flatten() == 0).nonzero().flatten().to(torch.int32)
        bounds = torch.cat([starts, torch.tensor([positions.numel()], dtype=torch.int32)])
        lengths = bounds.diff().tolist()
        if device.type == "cuda":
            bounds = bounds.pin_memory()
        return cls(bounds=bounds.to(device, non_blocking=True), lengths=lengths)


_current: Documents | None = None


def set_documents(documents: Documents | None) -> None:
    """For the attention of every layer from now on, recomputation in the backward pass included.

    None: each row is one document.
    """
    global _current
    _current = documents


def register() -> None:
    """Let transformers know the name. Its models then ask for no mask and call `attend`."""
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
    """Causal attention within documents, as transformers calls it.

    Args:
        query, key, value: [B, heads, T, D]; keys and values may have fewer heads, which several share.
        attention_mask: None: `register` sees to it.
        sliding_window: a token sees so many tokens, itself included.

    Returns:
        [B, T, heads, D], and no weights.

    Raises:
        ModelError: the model's attention does something to the scores that no such kernel computes.
    """
    odd = [name for name in ("softcap", "s_aux") if more.get(name) is not None]
    if odd or dropout or attention_mask is not None or more.get("is_causal") is False:
        raise ModelError(
            f"model.attention {VARLEN}: {type(module).__name__} needs {' and '.join(odd) or 'dropout or a mask'} in "
            "its attention, which it cannot compute. Set model.attention to sdpa or eager."
        )
    rows, _, length, _ = query.shape
    documents = _current
    if documents is None or sum(documents.lengths) != rows * length:  # transformers' own logits: rows are texts
        bounds = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
        documents = Documents(bounds=bounds, lengths=[length] * rows)
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    kernel = _on_cuda if query.is_cuda else _one_by_one
    out = kernel(q, k, v, documents, scaling, sliding_window)
    return out.unflatten(0, (rows, length)), None


def _on_cuda(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None, window: int | None
) -> Tensor:
    """[tokens, heads, D] each. Flash attention, in bf16 and fp16; torch makes an error of other precisions."""
    from torch.nn.attention.varlen import varlen_attn

    shared = query.shape[1] // key.shape[1]
    if shared > 1:  # torch 2.11 takes equally many heads only
        key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
    longest = max(documents.lengths)
    left = -1 if window is None else window - 1
    bounds = documents.bounds
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0))
    assert isinstance(out, Tensor)  # no more was asked for
    return out


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None, window: int | None
) -> Tensor:
    """The same for a device without such a kernel."""
    parts, start = [], 0
    for length in documents.lengths:
        q, k, v = (each[start : start + length].transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        mask = None
        if window is not None and window < length:
            at = torch.arange(length, device=query.device)
            mask = (at[:, None] >= at) & (at[:, None] - at < window)
        grouped = query.shape[1] != key.shape[1]
        part = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
        parts.append(part.squeeze(0).transpose(0, 1))
        start += length
    return torch.cat(parts)
