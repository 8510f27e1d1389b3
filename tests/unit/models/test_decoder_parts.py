"""Decoders taken apart by structure: what is found is what transformers' own models consist of, and it is proved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3nForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig

from llmtrain.base.errors import ModelError
from llmtrain.config.run import ModelConfig
from llmtrain.models.skeleton import construct, load_config, skeleton
from llmtrain.models.structure.calls import Watch
from llmtrain.models.structure.decoder_parts import AbsentAfter, AbsentBefore, AbsentLayer, Anatomy, anatomy_of
from tests.helpers.families import FAMILIES, VARIANTS, tied
from tests.helpers.renamed import renamed

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA_LIKE = ("model.embed_tokens",), "model.layers", ("model.norm",)
PARTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    **dict.fromkeys((*FAMILIES, *VARIANTS), LLAMA_LIKE),
    "gpt2": (("transformer.wte", "transformer.wpe", "transformer.drop"), "transformer.h", ("transformer.ln_f",)),
    "opt": (
        ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        "model.decoder.layers",
        ("model.decoder.final_layer_norm",),
    ),
    "opt_projected": (
        ("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"),
        "model.decoder.layers",
        ("model.decoder.project_out",),
    ),
    **dict.fromkeys(
        ("gpt_neox", "gpt_neox_serial"),
        (("gpt_neox.embed_in", "gpt_neox.emb_dropout"), "gpt_neox.layers", ("gpt_neox.final_layer_norm",)),
    ),
}
"""(before, list of layers, after)"""
SLIDING = {
    "mistral": [True] * 4,
    "qwen2": [False, False, True, True],
    "gemma2": [True, False, True, False],
    "gemma3": [True, False, True, False],
}


def meta(fields: dict[str, Any]) -> Any:
    return skeleton(load_config(ModelConfig(config=dict(fields))))


def real(fields: dict[str, Any]) -> Any:
    """Real parameters, none of them at its neutral value."""
    hf = construct(load_config(ModelConfig(config=dict(fields))), "eager", torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return hf.eval()


def put(hf: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    hf.get_submodule(parent)._modules[name] = module


def drop(hf: nn.Module, anatomy: Anatomy, layers: range, *, before: bool, after: bool) -> None:
    """Leave a pipeline stage."""
    for index, layer in enumerate(anatomy.layers):
        if index not in layers:
            put(hf, layer.path, AbsentLayer(anatomy.layers_return_tuples))
    for part in () if before else anatomy.before:
        put(hf, part.path, AbsentBefore(part.width, torch.float32))
    for path in () if after else (*anatomy.after, anatomy.head):
        put(hf, path, AbsentAfter())


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
@pytest.mark.parametrize("tie", [False, True])
def test_two_stages_give_the_models_logits(name: str, tie: bool) -> None:
    fields = tied({**FAMILIES, **VARIANTS}[name], tie)
    anatomy = anatomy_of(meta(fields))
    before, layers, after = PARTS[name]
    assert tuple(part.path for part in anatomy.before) == before
    assert (anatomy.embedding, anatomy.layer_list, anatomy.after) == (before[0], layers, after)
    assert (anatomy.head, anatomy.tied) == ("lm_head", tie)
    assert [layer.sliding for layer in anatomy.layers] == SLIDING.get(name, [False] * 4)

    ids = torch.arange(40).reshape(2, 20) * 7 % 512
    whole = real(fields)
    logits = whole(input_ids=ids, use_cache=False).logits
    first, second = real(fields), real(fields)
    drop(first, anatomy, range(3), before=True, after=False)
    drop(second, anatomy, range(3, 4), before=False, after=True)
    with Watch(first, [anatomy.layers[2].path]) as handed:
        first(input_ids=ids, use_cache=False)
    with Watch(second, [anatomy.layers[3].path], replace=handed.calls[0].result):
        assert torch.equal(second(input_ids=ids, use_cache=False).logits, logits)


def test_a_model_with_other_names() -> None:
    hf = renamed(tie_word_embeddings=True)
    anatomy = anatomy_of(hf)
    assert (anatomy.embedding, anatomy.layer_list, anatomy.after, anatomy.head) == (
        "body.words",
        "body.steps",
        ("body.last",),
        "say",
    )
    assert anatomy.tied
    assert not anatomy_of(renamed(tie_word_embeddings=False)).tied


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("leak", "layer 2 gives something else without the other layers"),
        ("argument", "layer 0 takes more than the hidden state: argument 3 is computed from parameters"),
        ("skip", "the input of layer 1 is not the output of layer 0"),
        ("between", "the input of layer 1 is not|runs between the layers"),
        ("two_lists", "several lists of layers"),
        ("loose", "loose, which is in no layer"),
        ("shared_layer", "(?s)body.steps.0.*body.steps.1"),
        ("louder", "its logits are not those of say"),
    ],
)
def test_what_cannot_be_taken_apart(fault: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        anatomy_of(renamed(fault))


GEMMA_3N = Gemma3nTextConfig(
    **{**SMALL, "intermediate_size": [64] * 4},
    head_dim=8,
    num_kv_shared_layers=2,
    layer_types=["full_attention"] * 4,
    vocab_size_per_layer_input=256,
    hidden_size_per_layer_input=8,
    laurel_rank=4,
    activation_sparsity_pattern=[0.0] * 4,
)
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        (
            T5ForConditionalGeneration,
            T5Config(vocab_size=64, d_model=16, d_ff=32, num_layers=2),
            "an encoder and a deco",
        ),
        (
            MambaForCausalLM,
            MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2),
            "state-space models do without heads",
        ),
        (Gemma3ForConditionalGeneration, Gemma3Config(text_config=SMALL, vision_config=VISION), "wraps a text model"),
        (Gemma3nForCausalLM, GEMMA_3N, "several lists of layers"),
        (RecurrentGemmaForCausalLM, RecurrentGemmaConfig(**SMALL, lru_width=32), "lm_head"),
        (OPTForCausalLM, OPTConfig(hidden_size=48, ffn_dim=32, layerdrop=0.1), "layerdrop 0.1 skips layers at random"),
    ],
)
def test_models_of_other_kinds(kind: Any, config: Any, reason: str) -> None:
    with torch.device("meta"):
        hf = kind(config)
    with pytest.raises(ModelError, match=reason):
        anatomy_of(hf)
