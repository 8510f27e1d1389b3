"""Rotary positions that change in a model are those of a model that was built with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.models.rope import refuse, set_rope

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0}


def model_of(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **fields})).eval()


@pytest.mark.parametrize(
    ("kind", "given", "length"),
    [
        ("llama", {"rope_theta": 500.0}, 32),
        ("llama", YARN, 128),
        ("qwen3", {"rope_type": "linear", "factor": 2.0}, 64),
        ("gemma3_text", {"sliding_attention": {"rope_theta": 99.0}}, 64),
    ],
)
def test_the_logits_are_those_of_a_model_built_so(kind: str, given: dict[str, Any], length: int) -> None:
    """And so are the fields of config.json, from which a server builds it."""
    model = model_of(kind)
    before = copy.deepcopy(model)
    set_rope(model, given, length)
    fields = model.config.to_dict()
    assert fields["max_position_embeddings"] == max(32, length)
    if given is YARN:
        assert fields["rope_parameters"]["original_max_position_embeddings"] == 32
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    built.load_state_dict(model.state_dict())
    tokens = torch.arange(2 * length).remainder(61).view(2, length)
    with torch.no_grad():
        want, got, old = (each(tokens).logits for each in (built, model, before))
    assert torch.equal(got, want) and float((got - old).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("gpt2", {"rope_theta": 1.0}, "no rotary positions"),
        ("llama", {"rope_type": "longest"}, "LlamaRotaryEmbedding cannot be made with these fields"),
        ("llama", {"rope_type": "yarn"}, "factor"),
        ("llama", {"type": "yarn", "factor": 4.0}, "write rope_type: yarn"),
        ("llama", {"rope_theta": -5.0}, "computes rotations from these fields that are not finite"),
        ("llama", {"theta": 1e6}, "Unrecognized keys in `rope_parameters` for 'rope_type'='default': {'theta'}"),
        ("llama", {"factor": 4.0}, "Unrecognized keys"),  # without a rope_type it does nothing
        ("llama", {**YARN, "factor": "four"}, "factor"),
        ("llama", {**YARN, "factor": 0.5}, "factor field must be a float or int >= 1"),
        ("gemma3_text", {"rope_theta": 1.0}, "give the fields below"),
    ],
)
def test_what_a_family_cannot_have_is_refused(kind: str, given: dict[str, Any], says: str) -> None:
    model = (
        model_of(kind)
        if kind != "gpt2"
        else AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64)
        )
    )
    fields = model.config.to_dict()
    assert says in (refuse(model, given, 64) or "")
    assert model.config.to_dict() == fields


def test_a_field_of_a_stage_before_may_be_without_effect() -> None:
    """After yarn's factor, the default type, which knows none."""
    assert refuse(model_of("llama"), {**YARN, "rope_type": "default"}, 64, {"rope_type": "default"}) is None
