"""torchtitan's TOML (its job_config.py of February 2026, the last with TOML)."""

from __future__ import annotations

from llmtrain.features.migrate.arguments import Asked, Stack
from llmtrain.features.migrate.draft import Draft, Given


def _translate(given: Given, draft: Draft, asked: Asked) -> None:
    folder = asked.path(str(given.take("model.hf_assets_path", given.take("model.tokenizer_path", "assets"))))
    loads = given.take("checkpoint.initial_load_path")
    if loads and given.take("checkpoint.initial_load_in_hf"):
        draft.set("model.pretrained", asked.path(str(loads)), "checkpoint.initial_load_path")
    else:
        draft.set("model.config", folder, given.source("model.hf_assets_path"))
        names = [given.take("model.name", "llama3"), given.take("model.flavor", "debugmodel")]
        draft.remark("model.flavor", " ".join(names), f"the model is what {folder}/config.json says")
        if loads:
            draft.change(
                "checkpoint.initial_load_path", loads, "weights begin as a Hugging Face folder: model.pretrained"
            )
    _optim(given, draft)
    steps = given.take("training.steps", 10000)
    draft.set("train.max_steps", steps, given.source("training.steps"))
    _schedule(given, draft, steps)
    _batch(given, draft, asked)
    _data(given, draft, folder)
    _json(given, draft)
    _saving(given, draft)


def _optim(given: Given, draft: Draft) -> None:
    if (name := str(given.take("optimizer.name", "AdamW"))) != "AdamW":
        draft.change("optimizer.name", name, "not here: optim.name has adamw, lion and muon")
    draft.set("optim.name", "adamw", given.source("optimizer.name"))
    for field, default in (("lr", 8e-4), ("eps", 1e-8), ("weight_decay", 0.1)):
        option = f"optimizer.{field}"
        draft.set(f"optim.{field}", float(given.take(option, default)), given.source(option))
    betas = [float(given.take("optimizer.beta1", 0.9)), float(given.take("optimizer.beta2", 0.95))]
    draft.set("optim.betas", betas, f"{given.source('optimizer.beta1')}, {given.source('optimizer.beta2')}")
    draft.set("optim.decay", "all", "torchtitan decays every parameter")
    draft.set("optim.clip_norm", float(given.take("training.max_norm", 1.0)), given.source("training.max_norm"))


def _schedule(given: Given, draft: Draft, steps: int) -> None:
    kind, share = given.take("lr_scheduler.decay_type", "linear"), given.take("lr_scheduler.decay_ratio")
    least = float(given.take("lr_scheduler.min_lr_factor", 0.0))
    total = given.take("lr_scheduler.total_steps", steps)
    if total != steps:
        draft.change("lr_scheduler.total_steps", total, "the rates end with the run: training.steps")
    source = given.source("lr_scheduler.decay_type")
    warmup = min(given.take("lr_scheduler.warmup_steps", 200), steps)
    draft.set("schedule.name", "transformers", source)
    draft.set("schedule.shape", "warmup_stable_decay" if warmup < steps else "constant_with_warmup", source)
    draft.set("schedule.decay_type", "1-sqrt" if kind == "sqrt" else kind, source)
    decay = steps - warmup if share is None else min(round(steps * share), steps - warmup)
    if decay:
        draft.set("schedule.decay_steps", decay, given.source("lr_scheduler.decay_ratio"))
    draft.set("schedule.warmup_steps", warmup, given.source("lr_scheduler.warmup_steps"))
    draft.set("schedule.warmup_from_zero", False, "torchtitan's first step has 1 / warmup_steps")
    draft.set("schedule.min_ratio", least, given.source("lr_scheduler.min_lr_factor"))


def _batch(given: Given, draft: Draft, asked: Asked) -> None:
    micro = given.take("training.local_batch_size", 8)
    batch = given.take("training.global_batch_size", -1)
    draft.set("train.micro_batch", micro, given.source("training.local_batch_size"))
    if batch > 0:
        draft.set("train.global_batch", batch, "training.global_batch_size")
    else:
        draft.set("train.accumulation", 1, given.source("training.global_batch_size"))
        draft.batch_of_rank = micro, "training.local_batch_size"
    draft.set("data.sequence_length", given.take("training.seq_len", 2048), given.source("training.seq_len"))


def _data(given: Given, draft: Draft, tokenizer: str) -> None:
    mark = len(given.answered)
    name, path = given.take("training.dataset", "c4_test"), given.take("training.dataset_path")
    known = {"c4": "hf:allenai/c4/en/c4-train.*"}
    source = path or known.get(name)
    if source is None:
        draft.change("training.dataset", name, "give the files of this set to `llmtrain prepare --source`")
    draft.flag("--format", "auto")
    draft.flag("--source", source or name)
    validates = given.take("validation.enable")
    if validates and (file := given.take("validation.dataset_path")):
        draft.flag("--validation-source", file)
    draft.flag("--tokenizer", tokenizer)
    draft.prepare_from = given.answered[mark:]
    draft.set("data.mask_document_starts", False, "torchtitan counts each token of a sequence")
    every = given.take("validation.freq", 10)
    if validates:
        draft.set("train.eval_every", every, given.source("validation.freq"))


def _json(given: Given, draft: Draft) -> None:
    mark = len(given.answered)
    sharded = given.take("parallelism.data_parallel_shard_degree", -1)
    draft.json = {
        "bf16": {"enabled": given.take("training.mixed_precision_param", "bfloat16") == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 0 if sharded == 1 else 3},
    }
    if given.take("training.enable_cpu_offload"):
        draft.set_json("zero_optimization.offload_optimizer", {"device": "cpu"})
        draft.set_json("zero_optimization.offload_param", {"device": "cpu"})
    mode = given.take("activation_checkpoint.mode", "selective")
    if mode == "full":
        draft.json["activation_checkpointing"] = {}
    elif mode != "none":
        draft.set("model.recompute.layers", "all", given.source("activation_checkpoint.mode"))
        draft.set("model.recompute.keep", "attention", given.source("activation_checkpoint.mode"))
    for option, key in (
        ("tensor_parallel_degree", "tensor_parallel.autotp_size"),
        ("pipeline_parallel_degree", "pipeline.stages"),
        ("context_parallel_degree", "sequence_parallel_size"),
        ("expert_parallel_degree", "expert_parallel.autoep_size"),
    ):
        if (degree := given.take(f"parallelism.{option}", 1)) > 1:
            draft.set_json(key, degree)
    if "pipeline" in draft.json and sharded != 1:
        draft.set_json("zero_optimization.stage", 1)
        draft.remark(
            "parallelism.data_parallel_shard_degree", sharded, "ZeRO 1 beside a pipeline: it shards the optimizer"
        )
    draft.json_from = given.answered[mark:]
    for option in [option for option in given.left if option.split(".")[0] in ("quantize", "float8", "mx")]:
        draft.remark(option, given.take(option), "model.fp8 multiplies all linear maps of the decoder layers in 8 bits")
    if any("float8" in str(name) for name in given.take("model.converters", [])):
        draft.set("model.fp8", "tensorwise", "model.converters")


def _saving(given: Given, draft: Draft) -> None:
    saves, every = given.take("checkpoint.enable"), given.take("checkpoint.interval", 500)
    keep, mode = given.take("checkpoint.keep_latest_k", 10), given.take("checkpoint.async_mode", "disabled")
    if saves:
        draft.set("checkpoint.every_steps", every, given.source("checkpoint.interval"))
        draft.set("checkpoint.mode", "sync" if mode == "disabled" else "async", given.source("checkpoint.async_mode"))
    if saves and keep:
        draft.set("checkpoint.keep", keep, given.source("checkpoint.keep_latest_k"))
    if not given.take("metrics.enable_wandb"):
        draft.set("tracking.wandb", "disabled", given.source("metrics.enable_wandb"))
    if given.take("metrics.enable_tensorboard"):
        draft.set("trackers.tensorboard", None, "metrics.enable_tensorboard")


STACK = Stack(name="torchtitan", title="torchtitan", classes=("torchtitan",), translate=_translate)
