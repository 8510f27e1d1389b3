"""Decoders taken apart by structure: what is found is what transformers' own models consist of, and it is proved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3nForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
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

from llmtrain.config.run import ModelConfig
from llmtrain.errors import ModelError
from llmtrain.models.build import construct, load_config, skeleton
from llmtrain.models.structure.absent import AbsentAfter, AbsentBefore, AbsentLayer
from llmtrain.models.structure.anatomy import Anatomy, anatomy_of
from llmtrain.models.structure.probe import Watch, attention_seen, probe_copy, run_copy
from llmtrain.models.structure.projections import Projections, projections
from llmtrain.models.structure.rehearsal import Map, rehearse
from llmtrain.models.structure.shrink import check_same_structure, shrunk_config, without_dropout
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
LLAMA_LIKE = ("model.embed_tokens",), "model.layers", ("model.norm",), ("model.rotary_emb",)
PARTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys((*FAMILIES, *VARIANTS), LLAMA_LIKE),
    "gpt2": (("transformer.wte", "transformer.wpe", "transformer.drop"), "transformer.h", ("transformer.ln_f",), ()),
    "opt": (
        ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        "model.decoder.layers",
        ("model.decoder.final_layer_norm",),
        (),
    ),
    "opt_projected": (
        ("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"),
        "model.decoder.layers",
        ("model.decoder.project_out",),
        (),
    ),
    **dict.fromkeys(
        ("gpt_neox", "gpt_neox_serial"),
        (
            ("gpt_neox.embed_in", "gpt_neox.emb_dropout"),
            "gpt_neox.layers",
            ("gpt_neox.final_layer_norm",),
            ("gpt_neox.rotary_emb",),
        ),
    ),
}
"""(before, list of layers, after, support)"""
SLIDING = {
    "mistral": [True] * 4,
    "qwen2": [False, False, True, True],
    "gemma2": [True, False, True, False],
    "gemma3": [True, False, True, False],
}
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


def meta(fields: dict[str, Any]) -> Any:
    return skeleton(ModelConfig(config=dict(fields)))


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
    before, layers, after, support = PARTS[name]
    assert tuple(part.path for part in anatomy.before) == before
    assert (anatomy.embedding, anatomy.layer_list, anatomy.after, anatomy.support) == (
        before[0],
        layers,
        after,
        support,
    )
    assert (anatomy.head, anatomy.tied) == ("lm_head", tie)
    assert [layer.sliding for layer in anatomy.layers] == SLIDING.get(name, [False] * 4)
    assert anatomy.scales_embedding == name.startswith("gemma")
    assert (anatomy.attention_cap, anatomy.head_form.softcap) == ((10.0, 5.0) if name == "gemma2" else (None, None))

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


@pytest.mark.parametrize(("name", "with_experts"), [("mixtral", [0, 1, 2, 3]), ("qwen3_moe", [0, 2, 3])])
def test_experts(name: str, with_experts: list[int]) -> None:
    anatomy = anatomy_of(meta(FAMILIES[name]))
    assert [i for i, layer in enumerate(anatomy.layers) if layer.experts] == with_experts
    experts = anatomy.layers[2].experts
    assert experts is not None
    assert (experts.block, experts.router) == ("model.layers.2.mlp", "model.layers.2.mlp.gate")
    assert (experts.experts, experts.count, experts.top_k) == ("model.layers.2.mlp.experts", 4, 2)


MAPS: dict[str, dict[str, Any]] = {
    "gpt2": {"attn.c_attn": ("column", (32, 32, 32)), "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"},
    "gpt_neox": {
        "attention.query_key_value": "column",
        "attention.dense": "row",
        "mlp.dense_h_to_4h": "column",
        "mlp.dense_4h_to_h": "row",
    },
    "opt": {
        **{f"self_attn.{k}_proj": "column" for k in "qkv"},
        "self_attn.out_proj": "row",
        "fc1": "column",
        "fc2": "row",
    },
    "phi3": {
        "self_attn.qkv_proj": ("column", (32, 16, 16)),
        "self_attn.o_proj": "row",
        "mlp.gate_up_proj": ("column", (80, 80)),
        "mlp.down_proj": "row",
    },
}
MAPS["gpt_neox_serial"], MAPS["opt_projected"], MAPS["phi3_longrope"] = MAPS["gpt_neox"], MAPS["opt"], MAPS["phi3"]
ATTENTION = {**{f"self_attn.{k}_proj": "column" for k in "qkv"}, "self_attn.o_proj": "row"}
MLP = {"mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row"}
NORMS = {
    "qwen3": "each_head",
    "qwen3_moe": "each_head",
    "gemma3": "each_head",
    "olmo2": "across_heads",
    "stablelm_full": "one_head",
}
NUMBERS = {
    "gpt2": ("split_size",),
    "opt": ("num_heads",),
    "opt_projected": ("num_heads",),
    "phi3": ("num_key_value_heads",),
    "phi3_longrope": ("num_key_value_heads",),
    "stablelm": ("num_heads", "num_key_value_heads"),
    "stablelm_full": ("num_heads", "num_key_value_heads"),
}


def of_layer(found: Projections, layer: str) -> dict[str, Any]:
    return {
        entry.path.removeprefix(f"{layer}."): (kind, entry.sections) if entry.sections else kind
        for entry in found.maps
        if entry.path.startswith(f"{layer}.")
        for kind in ["column" if entry.column else "row"]
    }


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_maps(name: str) -> None:
    fields = {**FAMILIES, **VARIANTS}[name]
    hf = meta(fields)
    anatomy = anatomy_of(hf)
    found = projections(hf, anatomy)
    for layer in anatomy.layers:
        expected = MAPS.get(name, ATTENTION if layer.experts else {**ATTENTION, **MLP})
        assert of_layer(found, layer.path) == expected
    for entry in found.maps:
        assert entry.bias == (getattr(hf.get_submodule(entry.path), "bias", None) is not None)
        assert entry.transposed == (name == "gpt2")
    heads = hf.config.num_attention_heads
    assert (found.heads, found.kv_heads) == (heads, getattr(hf.config, "num_key_value_heads", heads))
    assert {norm.kind for norm in found.norms} == ({NORMS[name]} if name in NORMS else set())
    each = {"stablelm_full": 4 + 2}.get(name, 2) if name in NORMS else 0
    assert len(found.norms) == 4 * each
    assert found.local_numbers == NUMBERS.get(name, ())


def test_shared_experts_are_shared_and_their_gates_are_not() -> None:
    gate_beside = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48, "moe_intermediate_size": 24}
    hf = meta({**FAMILIES["qwen3_moe"], **gate_beside, "mlp_only_layers": []})
    anatomy = anatomy_of(hf)
    assert anatomy.layers[0].experts is not None
    assert anatomy.layers[0].experts.shared == (
        "model.layers.0.mlp.shared_expert",
        "model.layers.0.mlp.shared_expert_gate",
    )
    shared = {path.replace("mlp.", "mlp.shared_expert."): kind for path, kind in MLP.items()}
    assert of_layer(projections(hf, anatomy), "model.layers.0") == {**ATTENTION, **shared}

    gated_attention = {
        "model_type": "afmoe",
        "num_dense_layers": 1,
        "num_shared_experts": 1,
    }  # its router is a linear map
    hf = meta({**FAMILIES["qwen3_moe"], **gated_attention})
    found = of_layer(projections(hf, anatomy_of(hf)), "model.layers.1")
    shared = {path.replace("mlp.", "mlp.shared_experts."): kind for path, kind in MLP.items()}
    assert found == {**ATTENTION, "self_attn.gate_proj": "column", **shared}


def test_a_model_with_other_names() -> None:
    hf = renamed(tie_word_embeddings=True)
    anatomy = anatomy_of(hf)
    assert (anatomy.embedding, anatomy.layer_list, anatomy.after, anatomy.support, anatomy.head) == (
        "body.words",
        "body.steps",
        ("body.last",),
        ("body.turn",),
        "say",
    )
    assert anatomy.tied
    assert not anatomy_of(renamed(tie_word_embeddings=False)).tied
    found = projections(hf, anatomy)
    # Both fused maps keep together what belongs together: shares lie side by side.
    assert of_layer(found, "body.steps.3") == {
        "look.mix": "column",
        "look.back": "row",
        "wide": "column",
        "narrow": "row",
    }
    assert found.attentions == tuple(f"body.steps.{i}.look" for i in range(4))
    assert found.widths == (80,)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("leak", "layer 2 gives something else without the other layers"),
        ("argument", "layer 0 takes more than the hidden state: argument 3 is computed from parameters"),
        ("skip", "layer 1 does not begin with what layer 0 gave"),
        ("between", "layer 1 does not begin with|runs between the layers"),
        ("two_lists", "several lists of layers"),
        ("loose", "loose, which belongs to none of its parts"),
        ("shared_layer", "one parameter in body.steps.0 and in body.steps.1"),
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
LOW_RANK = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FEW_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        (
            T5ForConditionalGeneration,
            T5Config(vocab_size=64, d_model=16, d_ff=32, num_layers=2),
            "an encoder and a deco",
        ),
        (MambaForCausalLM, MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2), "no decoder of attention"),
        (Gemma3ForConditionalGeneration, Gemma3Config(text_config=SMALL, vision_config=VISION), "wraps a text model"),
        (Gemma3nForCausalLM, GEMMA_3N, "several lists of layers"),
        (RecurrentGemmaForCausalLM, RecurrentGemmaConfig(**SMALL, lru_width=32), "its logits are not those of lm_head"),
        (OPTForCausalLM, OPTConfig(hidden_size=48, ffn_dim=32, layerdrop=0.1), "layerdrop 0.1 skips layers at random"),
    ],
)
def test_models_of_other_kinds(kind: Any, config: Any, reason: str) -> None:
    with torch.device("meta"):
        hf = kind(config)
    with pytest.raises(ModelError, match=reason):
        anatomy_of(hf)


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        (
            GptOssForCausalLM,
            GptOssConfig(**SMALL, head_dim=8, num_local_experts=4),
            "sinks, which is part of no linear",
        ),
        (
            DeepseekV3ForCausalLM,
            DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, **LOW_RANK, **FEW_EXPERTS, first_k_dense_replace=1),
            "low-rank attention",
        ),
    ],
)
def test_maps_that_ranks_cannot_share(kind: Any, config: Any, reason: str) -> None:
    with torch.device("meta"):
        hf = kind(config)
    anatomy = anatomy_of(hf)
    with pytest.raises(ModelError, match=reason):
        projections(hf, anatomy)


def test_the_rehearsal_notices_a_wrong_cut() -> None:
    small = probe_copy(meta(FAMILIES["gpt2"]))
    with attention_seen(small), Watch(small, ["transformer.h.1"]) as watch:
        run_copy(small, torch.arange(12).reshape(1, 12))
    right = [
        Map(path="attn.c_attn", column=True, transposed=True, sections=(32, 32, 32), bias=True),
        Map(path="attn.c_proj", column=False, transposed=True, sections=None, bias=True),
    ]
    layer = small.get_submodule("transformer.h.1")
    with attention_seen(small):
        assert rehearse(layer, watch.calls[0], right, [], "attn", heads=4, kv_heads=4) == ("split_size",)
        wrong = [Map(path="attn.c_attn", column=True, transposed=True, sections=None, bias=True), right[1]]
        with pytest.raises(ModelError, match="do not give what one gives"):
            rehearse(layer, watch.calls[0], wrong, [], "attn", heads=4, kv_heads=4)


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
