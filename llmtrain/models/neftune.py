"""NEFTune (Jain et al., arXiv 2310.05914): uniform noise on the token embeddings, in training only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Neftune:
    """Adds noise of alpha / sqrt(L d) x U(-1, 1) to the d features of each embedded token, where L is the number of
    tokens in its text. The noise is drawn from torch's global generator, as for dropout, and is equal on ranks that
    share an embedding."""

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self._alpha = alpha
        self.lengths_BT: Tensor | None = None
        """L of each token of the next forward pass."""
        embedding.register_forward_hook(self._add_noise)

    def look(self, inputs_BT: Tensor, positions_BT: Tensor | None) -> None:
        self.lengths_BT = text_lengths(inputs_BT, positions_BT)

    def _add_noise(self, embedding: nn.Module, _: object, embedded_BTD: Tensor) -> Tensor:
        if not embedding.training:
            return embedded_BTD
        assert self.lengths_BT is not None
        largest_BT1 = self._alpha * (self.lengths_BT * embedded_BTD.shape[-1]).float().rsqrt().unsqueeze(-1)
        return torch.addcmul(embedded_BTD, drawn(embedded_BTD), largest_BT1.to(embedded_BTD.dtype))


def drawn(embedded: Tensor) -> Tensor:
    return torch.empty_like(embedded).uniform_(-1.0, 1.0)


def text_lengths(inputs_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
    """Return the length of each token's text, int64 [B, T]: its document if `positions` are given, else its row."""
    length = inputs_BT.shape[1]
    if positions_BT is None:
        return torch.full((1, 1), length, device=inputs_BT.device).expand_as(inputs_BT)
    places_T = torch.arange(length, device=inputs_BT.device)
    begins_BT = places_T.where(positions_BT == 0, length)
    later_BT = F.pad(begins_BT[:, 1:], (0, 1), value=length)
    ends_BT = later_BT.flip(1).cummin(1).values.flip(1)
    return ends_BT - places_T + positions_BT
