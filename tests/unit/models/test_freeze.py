"""Which parameters a run freezes, and what that does to its figures. Training itself: tests/ranks/test_freeze.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmtrain.base.errors import ConfigError, ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.models.spec import ModelFacts, ModelSpec
from llmtrain.models.transformers_private import loop_over_experts
from llmtrain.parity.small import patterns_here
from tests.helpers.training import LLAMA

TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}


def spec(fields: dict[str, Any] = LLAMA, **patterns: list[str]) -> ModelSpec:
    return ModelSpec.of(ModelConfig(config=dict(fields), attention="eager", **patterns))


def test_freeze_and_train_only_are_opposites():
    names = [name for name, _ in spec().skeleton.named_parameters()]
    patterns = ["model.layers.[01].*", "*norm.weight"]
    frozen, rest = spec(freeze=patterns).frozen, spec(train_only=patterns).frozen
    assert frozen | rest == set(names) and not frozen & rest
    assert frozen == {n for n in names if re.match(r"model\.layers\.[01]\.", n) or n.endswith("norm.weight")}
    assert not spec().frozen


def test_a_tied_parameter_is_frozen_by_all_of_its_names():
    assert spec(TIED, freeze=["model.embed_tokens.*", "lm_head.*"]).frozen == {"model.embed_tokens.weight"}
    assert "model.embed_tokens.weight" not in spec(TIED, train_only=["*embed_tokens*", "lm_head*"]).frozen


@pytest.mark.parametrize(
    ("fields", "patterns", "says"),
    [
        (TIED, {"freeze": ["model.embed_tokens.*"]}, ("one tied tensor", "name lm_head.weight too")),
        (TIED, {"train_only": ["lm_head.weight"]}, ("model.train_only", "name model.embed_tokens.weight too")),
    ],
)
def test_what_is_wrong_with_patterns_is_told(fields, patterns, says):
    with pytest.raises(ConfigError) as caught:
        _ = spec(fields, **patterns).frozen
    for words in says:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"freeze": ["model.embed_tokens.*", "model.layers.0.*", "model.layers.2.self_attn.o_proj.weight"]},
        {"freeze": ["model.layers.0.*", "lm_head.*"]},
        {"train_only": ["model.layers.[23].*"]},
    ],
)
@pytest.mark.parametrize("fields", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_flops_are_those_that_torch_counts(fields, patterns):
    from transformers import AutoModelForCausalLM

    some = spec(fields, **patterns)
    sizes = some.facts
    hf = AutoModelForCausalLM.from_config(some.config, attn_implementation="eager", dtype=torch.float32)
    loop_over_experts(hf.config)  # whose products torch counts
    for name in some.frozen:
        hf.get_parameter(name).requires_grad_(False)
    assert sizes.trained == sum(p.numel() for p in hf.parameters() if p.requires_grad)
    with FlopCounterMode(display=False) as counter:
        hf(input_ids=torch.arange(32).unsqueeze(0), use_cache=False).logits.sum().backward()
    assert 32 * sizes.flops(32).noncausal == counter.get_total_flops()


# (matmul weights, layers, heads * head size): from the models' config.json.
LLAMA_8B = (7_504_658_432, 32, 4096)
LLAMA_1B = (1_235_746_816, 16, 2048)
QWEN_05B = (493_961_216, 24, 896)


def published(weights: int, layers: int, width: int) -> ModelFacts:
    return ModelFacts(
        parameters=weights,
        matmul_parameters=weights,
        frozen_matmul_parameters=0,
        trained=weights,
        forward_matmul_parameters=0,
        layers=layers,
        forward_layers=0,
        attention_width=width,
        vocab_size=1,
    )


@pytest.mark.parametrize(
    ("model", "weights_gf", "causal_attention_gf"),
    [(LLAMA_8B, 45.0, 3.22), (LLAMA_1B, 7.41, 0.81), (QWEN_05B, 2.96, 0.53)],
)
def test_flops_per_token_at_4096(model, weights_gf, causal_attention_gf):
    flops = published(*model).flops(4096)
    assert flops.causal / 1e9 == pytest.approx(weights_gf + causal_attention_gf, rel=2e-3)
    assert flops.noncausal / 1e9 == pytest.approx(weights_gf + 2 * causal_attention_gf, rel=2e-3)


def test_llama_8b_at_8192_matches_both_published_conventions():
    # torchtitan prints 57.9 GFLOP per token (all of the square), Megatron-Bridge 51.5 (causal half).
    flops = published(*LLAMA_8B).flops(8192)
    assert flops.noncausal / 1e9 == pytest.approx(57.9, abs=0.05)
    assert flops.causal / 1e9 == pytest.approx(51.5, abs=0.05)


def test_a_parity_check_takes_the_patterns_that_its_small_copy_has():
    model = ModelConfig(config=dict(LLAMA), freeze=["model.layers.2.*", "model.layers.30.*"])
    assert patterns_here(dict(LLAMA), model) == {"freeze": ["model.layers.2.*"], "train_only": []}
    with pytest.raises(ModelError, match=r"--model\.train_only"):
        patterns_here(dict(LLAMA), ModelConfig(config=dict(LLAMA), train_only=["model.layers.31.*"]))
