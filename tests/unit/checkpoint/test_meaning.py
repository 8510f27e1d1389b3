"""Two configurations of a model: which differences give its weights another meaning."""

from __future__ import annotations

from typing import Any

import pytest

from llmtrain.checkpoint.meaning import other_meaning


def llama(**more: Any) -> dict[str, Any]:
    from transformers import LlamaConfig

    fields: dict[str, Any] = LlamaConfig(hidden_size=64, num_attention_heads=4).to_dict()
    return fields | more


SAME = {
    "ids, types and caches": {"eos_token_id": [5, 6], "pad_token_id": 3, "dtype": "bfloat16", "use_cache": False},
    "training alone": {"attention_dropout": 0.1, "initializer_range": 1.0, "router_aux_loss_coef": 0.5},
    "names and versions": {"_name_or_path": "x", "architectures": None, "transformers_version": "5.17.0"},
    "a whole number": {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
    "the length that positions are made for": {"max_position_embeddings": 99},
    "a field that the class does not know": {"rope_tetha": 5.0},
    "a tuple": {"id2label": {0: "a"}, "layer_types": None},
}
OTHER = {
    "hidden_act": ({"hidden_act": "relu"}, ['hidden_act: "silu" -> "relu"']),
    "a length that scaled positions read": (
        {"max_position_embeddings": 99, "rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
        [
            "max_position_embeddings: 2048 -> 99",
            "rope_parameters.factor: null -> 2.0",
            'rope_parameters.rope_type: "default" -> "dynamic"',
        ],
    ),
}


@pytest.mark.parametrize("fields", SAME.values(), ids=SAME)
def test_what_decides_nothing(fields: dict[str, Any]) -> None:
    assert other_meaning(llama(), llama(**fields)) == [] == other_meaning(llama(**fields), llama())


@pytest.mark.parametrize(("fields", "told"), OTHER.values(), ids=OTHER)
def test_what_decides(fields: dict[str, Any], told: list[str]) -> None:
    assert other_meaning(llama(), llama(**fields)) == told


def test_a_field_that_is_missing_is_the_default_of_the_class_in_any_spelling() -> None:
    old = {key: value for key, value in llama().items() if key not in ("rope_parameters", "mlp_bias", "head_dim")}
    assert other_meaning(old | {"rope_theta": 1e4}, llama()) == []
    assert other_meaning(old | {"rope_theta": 5e5}, llama()) == ["rope_parameters.rope_theta: 500000.0 -> 10000.0"]


def test_a_configuration_within_a_configuration() -> None:
    from transformers import Gemma3Config

    whole = Gemma3Config().to_dict()
    text = whole["text_config"]
    assert other_meaning(whole, whole | {"text_config": text | {"bos_token_id": 9}}) == []
    assert other_meaning(whole, whole | {"text_config": text | {"query_pre_attn_scalar": 8}}) == [
        "text_config.query_pre_attn_scalar: 256 -> 8"
    ]


def test_of_a_family_that_is_not_known_here_what_both_tell_is_compared() -> None:
    assert other_meaning(
        {"model_type": "of tomorrow", "eps": 1}, {"model_type": "of tomorrow", "eps": 2, "more": 3}
    ) == ["eps: 1 -> 2"]
    assert other_meaning(None, llama()) == []
