"""Megatron-LM's command line of pretrain_gpt.py (its arguments of August 2026)."""

from __future__ import annotations

import math
from typing import Any

from llmtrain.features.migrate.arguments import Asked, Stack
from llmtrain.features.migrate.draft import Draft, Given

_SHAPES = {"linear": "polynomial", "cosine": "cosine_with_min_lr", "constant": "constant_with_warmup"}


def _translate(given: Given, draft: Draft, asked: Asked) -> None:
    draft.set("model.config", _model(given, draft), "num_layers, hidden_size and others")
    batch = given.take("global_batch_size", given.need("micro_batch_size", int) * (asked.gpus or 1))
    if samples := given.take("train_samples"):
        draft.set("train.max_steps", math.ceil(samples / batch), "train_samples / global_batch_size")
    else:
        draft.set("train.max_steps", given.need("train_iters", int), "train_iters")
    draft.set("train.global_batch", batch, given.source("global_batch_size"))
    draft.set("train.micro_batch", given.need("micro_batch_size", int), "micro_batch_size")
    _optim(given, draft)
    _schedule(given, draft, batch)
    _data(given, draft, asked)
    _json(given, draft)
    if not given.values.get("wandb_project"):
        draft.set("tracking.wandb", "disabled", "no wandb_project")
    if given.take("tensorboard_dir"):
        draft.set("trackers.tensorboard", None, "tensorboard_dir")
    if folder := given.take("save"):
        draft.set("train.run_dir", folder, "save")
    if (loads := given.take("load")) and loads != folder:
        draft.change("load", loads, "a Megatron checkpoint: convert it to Hugging Face's form for model.pretrained")
    if batches := given.take("eval_iters"):
        draft.set("train.eval_sequences", batches * batch, "eval_iters x global_batch_size")


def _model(given: Given, draft: Draft) -> dict[str, Any]:
    """The fields of a Llama, Mixtral or GPT-2 for Megatron's."""
    width, heads = given.need("hidden_size", int), given.need("num_attention_heads", int)
    norm, gated = given.take("normalization", "LayerNorm"), given.take("swiglu")
    rope = given.take("position_embedding_type", "learned_absolute") == "rope" or given.take(
        "use_rotary_position_embeddings"
    )
    given.take("position_embedding_type"), given.take("no_position_embedding")
    groups = given.take("num_query_groups", 1) if given.take("group_query_attention") else heads
    inner = given.take("ffn_hidden_size", 4 * width)
    biased = not given.take("disable_bias_linear")
    eps = float(given.take("norm_epsilon", given.take("layernorm_epsilon", 1e-5)))
    words = given.take("vocab_size", given.take("padded_vocab_size"))
    if words is None:
        draft.change("vocab_size", None, "write the tokenizer's into model.config.vocab_size")
    common = {
        "vocab_size": words or 50257,
        "initializer_range": float(given.take("init_method_std", 0.02)),
        "tie_word_embeddings": not given.take("untie_embeddings_and_output_weights"),
    }
    dropouts = float(given.take("attention_dropout", 0.1)), float(given.take("hidden_dropout", 0.1))
    given.take("make_vocab_size_divisible_by")
    if rope and gated and norm == "RMSNorm" and given.take("rotary_percent", 1.0) == 1.0:
        fields = {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": given.need("num_layers", int),
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": given.take("kv_channels", width // heads),
            "max_position_embeddings": given.need("max_position_embeddings", int),
            "rope_parameters": {"rope_type": "default", "rope_theta": float(given.take("rotary_base", 10000))},
            "rms_norm_eps": eps,
            "attention_dropout": dropouts[0],
            **common,
        }
        if biased or given.take("add_qkv_bias") or given.take("qk_layernorm"):
            draft.change(
                "disable_bias_linear", not biased, "a Llama without biases and norms of q and k: name another family"
            )
        if dropouts[1]:
            draft.change(
                "hidden_dropout", dropouts[1], "a Llama has no dropout beside attention's (0.1 is the default there)"
            )
        if experts := given.take("num_experts"):
            fields |= {"model_type": "mixtral", "num_local_experts": experts, "output_router_logits": True}
            fields |= {"intermediate_size": given.take("moe_ffn_hidden_size", inner)}
            fields |= {"num_experts_per_tok": given.take("moe_router_topk", 2)}
            fields |= {"router_aux_loss_coef": float(given.take("moe_aux_loss_coeff", 0.0))}
        return fields
    if rope or gated or norm != "LayerNorm" or not biased or groups != heads or given.take("num_experts"):
        draft.change(
            "normalization", norm, "Llama (rope, swiglu, RMSNorm) and GPT-2 are known: write model.config yourself"
        )
    draft.remark(
        "openai_gelu", None, "GPT-2's gelu_new and LayerNorm; Megatron's gelu is exact unless openai_gelu is set"
    )
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_inner": inner,
        "n_layer": given.need("num_layers", int),
        "n_head": heads,
        "n_positions": given.need("max_position_embeddings", int),
        "activation_function": "gelu_new" if given.take("openai_gelu") else "gelu",
        "layer_norm_epsilon": eps,
        "attn_pdrop": dropouts[0],
        "resid_pdrop": dropouts[1],
        "embd_pdrop": dropouts[1],
        **common,
    }


def _optim(given: Given, draft: Draft) -> None:
    draft.set("optim.name", "adamw", given.source("optimizer"))
    draft.set("optim.lr", float(given.need("lr", int, float)), "lr")
    betas = [float(given.take("adam_beta1", 0.9)), float(given.take("adam_beta2", 0.999))]
    draft.set("optim.betas", betas, f"{given.source('adam_beta1')}, {given.source('adam_beta2')}")
    for option, key, default in (
        ("adam_eps", "eps", 1e-8),
        ("weight_decay", "weight_decay", 0.01),
        ("clip_grad", "clip_norm", 1.0),
    ):
        draft.set(f"optim.{key}", float(given.take(option, default)), given.source(option))
    draft.set("train.seed", given.take("seed", 1234), given.source("seed"))


def _schedule(given: Given, draft: Draft, batch: int) -> None:
    style, least = given.take("lr_decay_style", "linear"), float(given.take("min_lr", 0.0))
    steps = draft.yaml["train.max_steps"][0]
    if style not in _SHAPES:
        draft.change("lr_decay_style", style, f"not here: {', '.join(_SHAPES)}; schedule.name wsd")
    source = given.source("lr_decay_style")
    draft.set("schedule.name", "transformers", source)
    draft.set("schedule.shape", _SHAPES.get(style, "polynomial"), source)
    if style != "constant":
        draft.set("schedule.min_ratio", least / draft.yaml["optim.lr"][0], "min_lr / lr")
    samples = given.take("lr_decay_samples")
    end = math.ceil(samples / batch) if samples else given.take("lr_decay_iters", steps)
    if end != steps and style != "constant":
        draft.change("lr_decay_iters", end, f"the rates end with the run, at step {steps}")
    warm = given.take("lr_warmup_samples")
    warmup = warm / batch if warm else given.take("lr_warmup_iters", 0)
    if share := given.take("lr_warmup_fraction"):
        warmup = share * end
    draft.set("schedule.warmup_steps", round(warmup), "lr_warmup_iters, lr_warmup_samples or lr_warmup_fraction")


def _data(given: Given, draft: Draft, asked: Asked) -> None:
    mark = len(given.answered)
    paths = given.take("data_path", given.take("train_data_path", []))
    paths = str(paths).split() if not isinstance(paths, list) else [str(path) for path in paths]
    if len(paths) > 1:
        draft.change("data_path", paths, "each is a folder of its own here, and data.mixture has their weights")
        paths = paths[1::2] if paths[0].replace(".", "").isdigit() else paths
    draft.flag("--format", "tokens")
    draft.flag("--source", *[f"{asked.path(path + '.bin').removesuffix('.bin')}.bin" for path in paths])
    if more := given.take("valid_data_path"):
        draft.flag("--validation-source", f"{more}.bin")
    else:
        parts = [float(part) for part in str(given.take("split", "969,30,1")).strip("'\"").split(",")]
        draft.flag("--validation-fraction", f"{sum(parts[1:]) / sum(parts):g}")
    tokenizer = given.take("tokenizer_model")
    if tokenizer is None or given.take("tokenizer_type", "HuggingFaceTokenizer") != "HuggingFaceTokenizer":
        draft.remark("tokenizer_model", tokenizer, "--tokenizer is a Hugging Face folder with the same tokens: name it")
    draft.flag("--tokenizer", asked.path(str(tokenizer or "TOKENIZER")))
    draft.prepare_from = given.answered[mark:]
    draft.set("data.mask_document_starts", False, "Megatron counts each token of a sequence")


def _json(given: Given, draft: Draft) -> None:
    mark = len(given.answered)
    stages = given.take("pipeline_model_parallel_size", 1)
    draft.json = {
        "bf16": {"enabled": bool(given.take("bf16"))},
        "fp16": {"enabled": bool(given.take("fp16"))},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 1 if given.take("use_distributed_optimizer") else 0},
    }
    if stages > 1:
        draft.set_json("pipeline.stages", stages)
    for option, key in (
        ("tensor_model_parallel_size", "tensor_parallel.autotp_size"),
        ("context_parallel_size", "sequence_parallel_size"),
        ("expert_model_parallel_size", "expert_parallel.autoep_size"),
    ):
        if (degree := given.take(option, 1)) > 1:
            draft.set_json(key, degree)
    if given.take("recompute_granularity") == "full":
        draft.json["activation_checkpointing"] = {}
    elif given.take("recompute_activations"):
        draft.set("model.recompute.layers", "all", "recompute_activations")
        draft.set("model.recompute.keep", "attention", "recompute_activations")
    if given.take("fp8_format", given.take("fp8")):
        draft.set("model.fp8", "tensorwise", "fp8_format")
    draft.json_from = given.answered[mark:]


STACK = Stack(name="megatron", title="Megatron-LM", classes=("megatron",), translate=_translate)
