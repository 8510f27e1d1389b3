"""Stand-ins for the parts of a decoder that a rank does not have: transformers' own forward then runs without them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AbsentLayer(nn.Module):
    """In the place of a decoder layer: hands the hidden state on."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self._as_tuple = as_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if self._as_tuple else hidden_states


class AbsentBefore(nn.Module):
    """In the place of what makes the first hidden state (embeddings, their norm, a projection): zeros of its shape."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The first tensor given is [B, T] or [B, T, any]. Returns [B, T, width]."""
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return first.new_zeros((*first.shape[:2], self._width), dtype=self._dtype)


class AbsentAfter(nn.Module):
    """In the place of the final norm or projection: hands the hidden state on."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states
