"""A small copy of a model has its structure: the same kinds of layers, ratios of heads and parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtrain.config.run import ModelConfig
from llmtrain.models.skeleton import load_config
from llmtrain.models.structure.decoder_parts import anatomy_of
from llmtrain.models.structure.projections import projections
from llmtrain.models.structure.small_copy import check_same_structure, shrunk_config, without_dropout
from tests.unit.models.test_decoder_parts import meta

BIG: dict[str, dict[str, Any]] = {
    "llama-70b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "gemma3-27b": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "num_hidden_layers": 2, "decoder_sparse_step": 2},
}
"""Real sizes, on the meta device."""


@pytest.mark.parametrize("name", BIG)
def test_small_copies_of_large_models(name: str) -> None:
    before = torch.get_rng_state()
    hf = meta(BIG[name])
    config = shrunk_config(hf.config)
    small = meta(config.to_dict())  # as a run's model.config
    check_same_structure(hf, small)
    assert sum(p.numel() for p in small.parameters()) < 5_000_000
    full, few = hf.config, config
    kv = (getattr(c, "num_key_value_heads", c.num_attention_heads) for c in (full, few))
    assert full.num_attention_heads // next(kv) == few.num_attention_heads // next(kv)
    assert full.vocab_size % 64 == few.vocab_size % 64
    if hasattr(full, "layer_types"):
        assert set(full.layer_types) == set(few.layer_types)
    anatomy = anatomy_of(hf)
    assert len(anatomy.layers) == full.num_hidden_layers
    assert projections(hf, anatomy).heads == full.num_attention_heads
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_taken_out() -> None:
    config = load_config(ModelConfig(config={"model_type": "gpt2"}))
    calm = without_dropout(config)
    assert (config.attn_pdrop, calm.attn_pdrop, calm.resid_pdrop, calm.embd_pdrop) == (0.1, 0.0, 0.0, 0.0)
