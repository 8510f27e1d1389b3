"""Which kernels of torch's attention may run: none of cuDNN where transformers gives it a mask tensor."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmtrain.config.run import ModelConfig
from llmtrain.data.batches import MicroBatch
from llmtrain.engine.deepspeed.engine import ZeroEngine, gets_mask
from llmtrain.models.language import documents_in_rows
from llmtrain.models.skeleton import construct, load_config

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "window": {"model_type": "mistral", **SMALL, "sliding_window": 8},
    "window in some layers": {
        "model_type": "gemma3_text",
        **SMALL,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "window that no layer uses": {
        "model_type": "gemma3_text",
        **SMALL,
        "sliding_window": 8,
        "layer_types": ["full_attention", "full_attention"],
    },
    "chunks": {
        "model_type": "llama4_text",
        **SMALL,
        "intermediate_size_mlp": 32,
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
    },
    "alibi": {"model_type": "falcon", **SMALL, "alibi": True, "new_decoder_architecture": False},
}
del FAMILIES["alibi"]["head_dim"]  # Falcon has none to set


@functools.cache
def model_of(family: str) -> Any:
    hf = construct(load_config(ModelConfig(config=dict(FAMILIES[family]))), "sdpa", torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.fill_(0.01)
    return hf.eval()


@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("length", [7, 8, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_foreseen(monkeypatch, family, length, documents):
    """Against what reaches torch's attention in a forward pass."""
    masks = []
    plain = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        masks.append(kwargs.get("attn_mask", args[3] if len(args) > 3 else None))
        return plain(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    hf, ids = model_of(family), torch.arange(length).unsqueeze(0)
    positions = ids % 5 if documents else None
    with torch.no_grad(), documents_in_rows(positions):
        hf.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    assert masks
    assert gets_mask(hf.config, length, documents=documents) == any(mask is not None for mask in masks)


def kernels(device: str, family: str, *, documents: bool) -> tuple[bool, bool, list[int]]:
    """(cuDNN allowed, flash allowed, order) inside a step on such a device."""
    engine: Any = object.__new__(ZeroEngine)
    engine._ranks = SimpleNamespace(device=torch.device(device))
    engine.module = SimpleNamespace(config=load_config(ModelConfig(config=FAMILIES[family])))
    tokens = torch.zeros(1, 12, dtype=torch.long)
    micro = MicroBatch(inputs=tokens, labels=tokens, sequences=[], positions=tokens if documents else None)
    with engine._attention([micro]):
        order: list[int] = torch._C._get_sdp_priority_order()
        return torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled(), order


def test_cudnn_leaves_torchs_choice_for_masks_alone():
    order = torch._C._get_sdp_priority_order()
    assert kernels("cuda", "llama", documents=False) == (True, True, order)
    assert kernels("cuda", "llama", documents=True) == (False, True, order)
    assert kernels("cuda", "window", documents=False) == (False, True, order)
    assert torch.backends.cuda.cudnn_sdp_enabled()
