"""Loss, initial weights, checksums and Hugging Face folders, without a process group."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl
from transformers import AutoConfig, Gemma2PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmtrain.base.errors import ModelError, UserError
from llmtrain.config.resolve import resolve
from llmtrain.config.run import DataConfig, ModelConfig, RunConfig, TrainConfig
from llmtrain.models import varlen
from llmtrain.models.language import LanguageModel
from llmtrain.models.parallel.recompute import from_host, to_host
from llmtrain.models.run.check import check_model
from llmtrain.models.skeleton import construct, load_config, restore_buffers, skeleton
from llmtrain.models.source import RandomSource, SafetensorsSource
from llmtrain.models.spec import ModelSpec
from llmtrain.models.varlen import Documents, set_documents
from tests.helpers.compiled import flash_on_cpu
from tests.helpers.families import summed_loss

CPU = torch.device("cpu")
SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "intermediate_size": 48, "num_key_value_heads": 2, **SMALL}
FAMILIES = {
    "llama": LLAMA,
    "llama tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 5.0},
    "mistral": {**LLAMA, "model_type": "mistral"},
    "granite": {**LLAMA, "model_type": "granite", "logits_scaling": 4.0},
    "cohere": {**LLAMA, "model_type": "cohere", "logit_scale": 0.25},
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt_neox": {"model_type": "gpt_neox", "intermediate_size": 48, **SMALL},
    "phi": {"model_type": "phi", "intermediate_size": 48, **SMALL},
    "olmo2": {**LLAMA, "model_type": "olmo2"},
}


def filled(model: ModelConfig):
    """A model with its initial weights."""
    hf = construct(load_config(model), model.attention, torch.float32)
    restore_buffers(hf, skeleton(load_config(model)), CPU)
    built = LanguageModel(hf, model.loss_chunk_tokens)
    source = ModelSpec.of(model).initial_weights(3, CPU)
    with torch.no_grad():
        for name, parameter in built.hf.named_parameters():
            parameter.copy_(source.read(name, 0, parameter.numel()).view_as(parameter))
    return built.eval()


def attention_of(family):
    return "eager" if family == "gemma2" else "sdpa"  # transformers has no SDPA for its capped scores


@torch.no_grad()
@pytest.mark.parametrize("without_mask", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral, window 5"])
def test_isolated_documents_are_as_if_each_were_alone(family, without_mask):
    name, _, window = family.partition(", window ")
    config = {**FAMILIES[name], **({"sliding_window": int(window)} if window else {})}
    attention = "varlen" if without_mask else attention_of(name)
    model = filled(ModelConfig(config=config, loss_chunk_tokens=5, attention=attention))
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.2)  # attention that is far from uniform
    inputs, labels = torch.randint(96, (2, 24)), torch.randint(96, (2, 24))
    lengths = [[24, 0, 0], [7, 1, 16]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    if without_mask:
        alone_by = filled(ModelConfig(config=config, loss_chunk_tokens=5, attention=attention_of(name)))
        alone_by.load_state_dict(model.state_dict())
    else:
        alone_by = model
    alone = 0.0
    for row, sizes in enumerate(lengths):
        for document, answers in zip(inputs[row].split(sizes), labels[row].split(sizes), strict=True):
            if len(document):
                alone += float(summed_loss(alone_by, document[None], answers[None]))
    if without_mask and name == "gemma2":
        with pytest.raises(ModelError, match=r"model.attention varlen"):
            summed_loss(model, inputs, labels, positions)
        return
    set_documents(Documents.of(positions, CPU) if without_mask else None)
    together = float(summed_loss(model, inputs, labels, positions))
    set_documents(None)
    assert abs(together - alone) < 3e-6 * alone  # fp32
    assert abs(together - float(summed_loss(model, inputs, labels))) > 1e-4 * alone


@pytest.mark.parametrize("shares", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_gpus_attention_of_documents_is_the_cpus(monkeypatch, window, shares):
    """The kernel's meaning is written out in `flash_on_cpu`: it computes on a GPU only. Fewer heads of keys and values
    go to it as they are where torch takes them, which torch 2.11 does not."""
    flash_on_cpu()
    if not shares:
        monkeypatch.setattr(varlen, "_shares_heads", lambda: False)
    torch.manual_seed(0)
    heads = [torch.randn(30, count, 8) for count in (4, 2, 2)]
    documents = Documents.of(torch.cat([torch.arange(n) for n in (12, 1, 17)])[None], CPU)
    upstream = torch.randn(30, 4, 8)
    results = []
    for kernels in ((varlen._flash, varlen._flash_backward), (varlen._one_by_one, varlen._one_by_one_backward)):
        monkeypatch.setattr(varlen, "_kernels", lambda device, kernels=kernels: kernels)
        given = [each.clone().requires_grad_() for each in heads]
        out, _ = varlen.within_documents(*given, documents.bounds, documents.sizes, 0.3, window)
        results.append([out.detach(), *torch.autograd.grad(out, given, upstream)])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape and torch.allclose(got, want, atol=2e-6)  # fp32, sums of at most 30


FLASH_3 = """
import torch
library = torch.library.Library("flash_attn_3", "FRAGMENT")
for name in ("fwd", "bwd")[:COUNT]:
    library.define(f"{name}(Tensor q) -> Tensor")
"""


def test_flash_attention_3_runs_on_a_hopper_that_has_it(monkeypatch, tmp_path):
    """A package that has its operators; the GPU is only said to be one. Nothing is refused where it cannot be."""
    gpu, major = torch.device("cuda", 0), [8]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major[0], 0))
    monkeypatch.syspath_prepend(tmp_path)
    assert varlen.choose_kernel(gpu) == "attention within documents: FlashAttention 2"
    major[0] = 9
    assert "flash_attn_3" in varlen.choose_kernel(gpu) and current_flash_attention_impl() is None
    package = tmp_path / "flash_attn_interface.py"
    try:
        for text, ends in (
            ("raise OSError('undefined symbol: x')", "as flash_attn_interface cannot be used: undefined symbol: x"),
            (FLASH_3.replace("COUNT", "1"), "does not expose FA3 backward kernels"),
        ):
            package.write_text(text)
            importlib.invalidate_caches()
            line = varlen.choose_kernel(gpu)
            assert "FlashAttention 2, as" in line and line.endswith(ends), line
            assert current_flash_attention_impl() is None
            sys.modules.pop("flash_attn_interface", None)
        package.write_text(FLASH_3.replace("COUNT", "2"))
        os.utime(package, (0, 0))  # another file: Python compares the time of its bytecode
        assert varlen.choose_kernel(gpu) == "attention within documents: FlashAttention 3"
        assert current_flash_attention_impl() == "FA3"
    finally:
        restore_flash_attention_impl(_raise_warn=False)
        sys.modules.pop("flash_attn_interface", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_models_own_logits(family):
    """Any head: scaled, capped, biased, tied. fp32; sums of 60 tokens near 4.5 nats, so 1e-4 is 4e-7 relative."""
    model = filled(ModelConfig(config=FAMILIES[family], loss_chunk_tokens=7, attention=attention_of(family)))
    tokens = torch.randint(0, 96, (2, 33), generator=torch.Generator().manual_seed(0))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, :9] = -100
    ours = summed_loss(model, inputs, labels)
    ours.backward()
    gradients = {name: p.grad.clone() for name, p in model.hf.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model.hf(input_ids=inputs).logits
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    theirs.backward()
    assert abs(ours.item() - theirs.item()) < 1e-4
    for name, parameter in model.hf.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(gradients[name], parameter.grad, atol=2e-5, rtol=1e-4), name


def test_random_weights_depend_on_seed_and_name_only():
    def draw(seed: int, names: list[str]) -> dict[str, torch.Tensor]:
        source = RandomSource(skeleton(load_config(ModelConfig(config=LLAMA))), seed, CPU)
        return {name: source.read(name, 0, 10**9) for name in names}

    order = RandomSource(skeleton(load_config(ModelConfig(config=LLAMA))), 0, CPU).order()
    state = torch.get_rng_state()
    a, b, c = draw(0, order), draw(0, order[::-1]), draw(1, order)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a[name], b[name]) for name in order)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    layers = [a[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(3)]
    assert not torch.equal(layers[0], layers[1]) and abs(float(layers[0].std()) - 0.02) < 2e-3
    assert torch.equal(a["model.norm.weight"], torch.ones(32))


def test_facts_count_a_tied_head_once():
    tied, untied = (
        ModelSpec.of(ModelConfig(config=FAMILIES["llama tied"])).facts,
        ModelSpec.of(ModelConfig(config=LLAMA)).facts,
    )
    assert untied.parameters - tied.parameters == 96 * 32
    assert untied.matmul_parameters == tied.matmul_parameters
    assert (tied.layers, tied.attention_width, tied.vocab_size) == (3, 32, 96)


def test_safetensors_source_reads_slices_across_shards(tmp_path):
    tensors = {"a": torch.randn(7, 5), "b": torch.randn(11), "c": torch.randn(3, 2, 4)}
    save_file({"a": tensors["a"]}, tmp_path / "one.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = SafetensorsSource(tmp_path)
    for name, value in tensors.items():
        flat = value.reshape(-1)
        for start, stop in ((0, flat.numel()), (3, 4), (2, flat.numel() - 1)):
            assert torch.equal(source.read(name, start, stop), flat[start:stop])


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 11, 13)])
def test_what_waits_on_the_host_comes_back_in_pieces(shape, monkeypatch):
    monkeypatch.setattr("llmtrain.models.parallel.recompute._PIECE_BYTES", 400)
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    device, size, pieces = to_host(tensor)
    assert all(piece.numel() <= 100 for piece in pieces)
    assert not tensor.numel() or pieces[0].data_ptr() != tensor.data_ptr()
    assert len(pieces) == max(1, -(-tensor.numel() // 100)) and size == tensor.shape
    assert torch.equal(from_host((device, size, pieces)), tensor)
    sliced = torch.randn(4, 6, 9)[:, ::2]
    assert torch.equal(from_host(to_host(sliced)), sliced)


def test_sdpa_is_refused_where_scores_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by transformers 5.17, which takes it and leaves the cap out."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("gemma2", **sizes, **heads)
    with pytest.raises(ModelError, match=r"(?s)model\.attention sdpa.*model\.attention"):
        construct(config, "sdpa", torch.float32)
    config.attn_logit_softcapping = None
    construct(config, "sdpa", torch.float32)


NO_SIZES = {
    "blt": "has no hidden_size, so llmtrain",
    "musicgen": "holds several text models",
    "musicgen_melody": "holds several text models",
}


def told_of(model_type: str) -> str:
    """Return the error text of `config check` for a model type with its default sizes, before it looks at data."""
    config = RunConfig(
        deepspeed="ds_configs/zero1_fp32.json",
        model=ModelConfig(config={"model_type": model_type}),
        data=DataConfig(path="data", sequence_length=32),
        train=TrainConfig(global_batch=2, micro_batch=2, max_steps=1),
    )
    try:
        spec, _ = check_model(resolve(config, 1))
        _ = spec.facts, spec.frozen
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model_type", NO_SIZES)
def test_a_type_whose_configuration_is_of_several_models_is_refused_with_a_sentence(model_type: str) -> None:
    assert NO_SIZES[model_type] in told_of(model_type)


@pytest.mark.slow
def test_no_model_type_of_transformers_makes_a_check_end_in_a_traceback() -> None:
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        told_of(model_type)
