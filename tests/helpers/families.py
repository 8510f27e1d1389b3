"""Tiny models of the families that every form of training must work with: 4 layers, 4 heads, 512 tokens, no dropout."""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GATED: dict[str, Any] = {**_SMALL, "intermediate_size": 80, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {**_GATED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GATED},
    "mistral": {"model_type": "mistral", **_GATED, "sliding_window": 8},
    "qwen2": {
        "model_type": "qwen2",
        **_GATED,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", **_GATED, "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        **_GEMMA,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 10.0,
    },
    "gemma3": {"model_type": "gemma3_text", **_GEMMA, "sliding_window_pattern": 2},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 512,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "gpt_neox": {"model_type": "gpt_neox", **_SMALL, "intermediate_size": 128},
    "opt": {
        "model_type": "opt",
        **_SMALL,
        "pad_token_id": 1,
        "ffn_dim": 128,
        "dropout": 0.0,
        "word_embed_proj_dim": 32,
    },
    "phi3": {"model_type": "phi3", **_GATED},
    "olmo2": {"model_type": "olmo2", **_GATED},
    "stablelm": {"model_type": "stablelm", **_GATED},
    "mixtral": {
        "model_type": "mixtral",
        **_GATED,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_GATED,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
"""By short name: fields of a transformers config, `tie_word_embeddings` left to the family."""

_ROUTED: dict[str, Any] = {
    **_GATED,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
LOW_RANK: dict[str, Any] = {
    "model_type": "deepseek_v2",
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
"""Queries, keys and values are made by two maps each, and all heads have a part of their keys in common."""

FROZEN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LOW_RANK, "model_type": "deepseek_v3"},
    "glm4_moe": {"model_type": "glm4_moe", **_ROUTED, "head_dim": 16},
    "dots1": {"model_type": "dots1", **_ROUTED, "head_dim": 16, "sliding_window": 8},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        **_GATED,
        "moe_intermediate_size": 24,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
    },
    "afmoe": {
        "model_type": "afmoe",
        **_GATED,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "sliding_window": 8,
    },
    "laguna": {
        "model_type": "laguna",
        **_GATED,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 24,
        "sliding_window": 8,
    },
}
"""Those whose routers have a bias that does not train: a buffer in the first three, a parameter without a gradient."""

EXPERTS = ("mixtral", "qwen3_moe")
"""Those of FAMILIES with experts."""

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    **_GATED,
    "head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Three layers of a recurrent kind, one of attention."""

VARIANTS: dict[str, dict[str, Any]] = {
    "llama_biases": {**FAMILIES["llama"], "attention_bias": True, "mlp_bias": True},
    "llama_rope": {
        **FAMILIES["llama"],
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "gpt_neox_serial": {**FAMILIES["gpt_neox"], "use_parallel_residual": False},
    "opt_projected": {**FAMILIES["opt"], "word_embed_proj_dim": 40, "do_layer_norm_before": False},
    "phi3_longrope": {
        **FAMILIES["phi3"],
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 32,
        },
    },
    "stablelm_full": {
        **FAMILIES["stablelm"],
        "use_parallel_residual": True,
        "use_qkv_bias": True,
        "qk_layernorm": True,
    },
    "gqa_uneven": {
        **FAMILIES["llama"],
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "vocab_size": 517,
    },
}
"""The same families with other structure: biases, rotary kinds, projections, uneven heads, an odd vocabulary."""


def tied(fields: dict[str, Any], yes: bool = True) -> dict[str, Any]:
    """The same model with head and embedding in one tensor, or (`yes` False) in two."""
    return {**fields, "tie_word_embeddings": yes}


def summed_loss(model: Any, inputs: Any, labels: Any, positions: Any = None) -> Any:
    """The next-token loss of a LanguageModel (nats), which its head computes."""
    return model(inputs, lambda head, hidden: head.nll_sum(hidden, labels), positions)
