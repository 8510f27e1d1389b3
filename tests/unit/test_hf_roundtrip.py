"""Hugging Face folder -> checkpoint -> Hugging Face folder, byte by byte, for every family that we name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.checkpoint.hf import MARK, export_hf
from llmtrain.checkpoint.hf_import import import_hf

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"intermediate_size": 48, "num_key_value_heads": 2, **SMALL}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
FAMILIES = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 8},
    "mistral": LLAMA,
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {**SMALL, "intermediate_size": 48},
    "gemma2": {**LLAMA, "head_dim": 8},
    "phi3": LLAMA,
    "olmo2": LLAMA,
    "mixtral": {**LLAMA, "num_local_experts": 4},
    "qwen3_moe": {**LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def model_folder(path: Path, family: str, *, tied: bool, dtype: torch.dtype, shard: str) -> Path:
    """A folder as `save_pretrained` writes it, with something that stands for a tokenizer."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **FAMILIES[family], **TOKENS, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text('{"version": "1.0",  "é": 1}')
    (path / "chat_template.jinja").write_text("{{ messages }}\n")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != MARK}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same_folder(tmp_path, family, tied):
    """One shard in bf16, many in fp32; MoE and GPT-NeoX have other names in the file than in the model."""
    for dtype, shard in ((torch.bfloat16, "1GB"), (torch.float32, "20KB")):
        case = tmp_path / str(dtype)
        folder = model_folder(case / "hf", family, tied=tied, dtype=dtype, shard=shard)
        lines = import_hf(folder, case / "run").lines
        assert any(line.startswith("logits") and "agree" in line for line in lines), lines
        export_hf(case / "run" / "checkpoints" / "step-00000000", case / "back")
        assert contents(case / "back") == contents(folder)
        assert len(list(folder.glob("*.safetensors"))) == 1 or shard == "20KB"
    index = json.loads((case / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
