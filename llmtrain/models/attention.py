"""The choice of torch's attention kernels.

torch puts them in order itself, and on Hopper and Blackwell takes cuDNN's first where its version is right (2.11 and
later, ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention). One case is left to us: with a mask
tensor and some lengths, cuDNN's gradient of the queries is NaN (pytorch issue 196678, torch 2.11 to 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from llmtrain.models.build import layer_configs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WINDOWED = ("sliding", "chunked", "compressed", "window")
"""Words in transformers' layer_types of layers with windowed attention."""


def gets_mask(config: PreTrainedConfig, length: int, *, documents: bool) -> bool:
    """True if transformers gives torch's attention a mask tensor, in any layer; without one it is just causal.

    Args:
        config: the model's transformers configuration.
        length: tokens of a row.
        documents: attention stays within the documents of a row.
    """
    return documents or any(_layer_gets_mask(layer, length) for layer in layer_configs(config.get_text_config()))


def _layer_gets_mask(config: PreTrainedConfig, length: int) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    if getattr(config, "alibi", False) or "indexed_attention" in kinds:
        return True
    if kinds and not any(word in kind for word in _WINDOWED for kind in kinds):
        return False
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return any(window is not None and window <= length for window in windows)


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """Leave cuDNN's kernel out of torch's choice."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
