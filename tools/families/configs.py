"""A tiny model of each of transformers' causal language models: the fields that a user would write."""

from __future__ import annotations

import functools
from typing import Any

_LAYERS = 2
# Field names of all families for the same few sizes; what a family does not have is left out.
_SIZES: dict[str, int] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "d_inner", "n_inner", "feed_forward_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), _LAYERS
    ),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_token", "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("hidden_size_per_layer_input", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    "query_pre_attn_scalar": 16,
    "first_k_dense_replace": 1,
    "index_n_heads": 2,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
}


@functools.cache
def families() -> tuple[str, ...]:
    """Model types of transformers' causal language models, in its order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(family: str) -> dict[str, Any]:
    """Fields of `model.config`, model_type among them."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[family](**_REQUIRED.get(family, {}))
    return {"model_type": family, **_merged(_small_fields(default), OVERRIDES.get(family, {}))}


def _merged(fields: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The fields with the others', section by section."""
    both = {
        key: _merged(fields[key], value)
        for key, value in others.items()
        if isinstance(value, dict) and isinstance(fields.get(key), dict)
    }
    return {**fields, **others, **both}


def _small_fields(config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    given = config.to_dict()
    kinds = len(set(given.get("layer_types") or ()))
    for key, value in given.items():
        sub = vars(config).get(key)  # getattr raises for what differs from layer to layer
        if isinstance(value, dict) and hasattr(sub, "model_type"):
            fields[key] = _small_fields(sub)
        elif type(value) is int and _SIZES.get(key) == _LAYERS and kinds > 1 and "layer" in key:
            fields[key] = min(value, 2 * _LAYERS)
        elif type(value) is int and key in _SIZES:
            fields[key] = min(value, _SIZES[key])
        elif key.endswith("token_id") and type(value) is int and value >= _SIZES["vocab_size"]:
            fields[key] = _SIZES["vocab_size"] - 1
    if "qk_rope_head_dim" in fields:  # low-rank attention: all heads have keys of their own
        changes = {"head_dim": fields["qk_rope_head_dim"], "num_key_value_heads": fields["num_attention_heads"]}
        fields |= {key: value for key, value in changes.items() if key in fields}
    return fields


_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ZAMBA = {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "hybrid"] * 2,
    "mamba_d_state": 8,
    "num_key_value_heads": 4,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
_GEMMA4 = {"head_dim": 16, "global_head_dim": 16, "num_global_key_value_heads": 2}
_DOTS3 = {"head_dim": 16, "per_layer_config": {}, "shared_experts_intermediate_size": 24}
_QWEN4_EXP = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 16,
    "ngram_vocab_size_base": 512,
    "heads_per_ngram": 2,
    "split_ngram_parts": 4,
}
_DECODER = {"is_decoder": True}  # without it a BERT reads its labels
_DECODERS = [
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
]
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "num_experts_per_tok": 2},
    "bamba": _MAMBA,
    "blt": {"vocab_size": 512},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE),
    },
    "cpmant": {"dim_ff": 64, "dim_head": 8},
    "dbrx": {
        "num_key_value_heads": 2,
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},  # the one expert's weight would be 1, whatever the router says
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "downsample_hidden_size": 8,
        },
    },
    "dots3_note_text": _DOTS3,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "intermediate_size": 64,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": None,
    },
    "gemma4_assistant": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_assistant": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _MAMBA,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": _QWEN4_EXP,
    "reformer": {
        "is_decoder": True,
        "vocab_size": 512,
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 8,
    },
    "roc_bert": {
        "shape_vocab_size": 16,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": 16,
        "pronunciation_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_ZAMBA, "mamba_dt_rank": 4},
    "zamba2": {
        **_ZAMBA,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
        "use_mem_eff_path": False,
    },
}
_REQUIRED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    }
}
"""What a configuration class does not accept the absence of."""
OVERRIDES: dict[str, dict[str, Any]] = {
    family: {**(_DECODER if family in _DECODERS else {}), **_OWN.get(family, {})} for family in {*_DECODERS, *_OWN}
}
"""What a family needs besides."""


def has_experts(model: dict[str, Any]) -> bool:
    """Whether a tiny model of this family is a mixture of experts."""
    return any(
        model.get(key, 0) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )
