"""Tiny Hugging Face folders and checkpoints of the same models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.checkpoint.output import Contents, build_checkpoint

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"intermediate_size": 48, "num_key_value_heads": 2, **SMALL}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
FAMILIES: dict[str, dict[str, Any]] = {
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


def new_model(family: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model as transformers initialises it. `fields` go over the family's."""
    torch.manual_seed(3)
    settings = {**FAMILIES[family], **TOKENS, "tie_word_embeddings": tied, **fields}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=dtype)


def model_folder(path: Path, model: Any, shard: str = "1GB") -> Path:
    """A folder as `save_pretrained` writes it, with something that stands for a tokenizer."""
    model.save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text('{"version": "1.0",  "é": 1}')
    (path / "chat_template.jinja").write_text("{{ messages }}\n")
    return path


def checkpoint_of(model: Any, run: Path, /, precision: str = "bf16", step: int = 7, **trainer: Any) -> Path:
    """A checkpoint of the model's parameters, as a run leaves it. `trainer`: other values of trainer.json."""
    values = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    config = json.loads(json.dumps({**model.config.to_dict(), "use_cache": False}))
    contents = Contents(
        step=step,
        shapes={name: tuple(value.shape) for name, value in values.items()},
        read=lambda _, name, start, stop: values[name].reshape(-1)[start:stop],
        trainer={
            "step": step,
            "tokens": 100,
            "run_id": run.name,
            "model_config": config,
            "separator_id": 1,
            "tokenizer_dir": "/nonexistent",
            **trainer,
        },
        layout={"world_size": 1, "zero_stage": 0, "precision": precision},
    )
    return build_checkpoint(run / "checkpoints" / f"step-{step:08d}", contents, plan={})
