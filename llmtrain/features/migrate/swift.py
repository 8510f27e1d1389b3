"""ms-swift's `swift pt`, `sft` and `rlhf` (its arguments of August 2026)."""

from __future__ import annotations

import json
import math

from llmtrain.features.migrate import templates
from llmtrain.features.migrate.adapters import lora, without_lora
from llmtrain.features.migrate.arguments import Asked, Stack, translate, unpacked
from llmtrain.features.migrate.draft import Draft, Given

_OBJECTIVES = {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "simpo", "rm": "reward"}
_FORMATS = {"kto": "unpaired", "dpo": "preference", "orpo": "preference", "simpo": "preference", "reward": "preference"}
_COUNTS = {"default": None, "last_round": "last", "all": "all"}


def _translate(given: Given, draft: Draft, asked: Asked) -> None:
    model = asked.path(str(given.need("model")))
    draft.set("model.pretrained", model, "model")
    length = given.take("max_length", 2048)
    if "max_length" not in given:
        draft.remark(
            "max_length", None, "ms-swift takes the model's greatest length: write what your records need here"
        )
    draft.set("data.sequence_length", length, given.source("max_length"))
    adapts = given.take("tuner_type", given.take("train_type", "lora"))
    _objective(given, draft, adapts == "lora")
    mark = len(given.answered)
    _data(given, draft, model, length, asked)
    draft.prepare_from = given.answered[mark:]
    if adapts == "lora":
        lora(given, draft, {"r": 8, "alpha": 32, "dropout": 0.05, "targets": ["all-linear"]})
        if given.take("quant_method", "bnb") == "bnb" and given.values.get("quant_bits") == 4:
            draft.set("adapter.quantize", "nf4", f"quant_bits: {given.take('quant_bits')}")
    elif adapts == "full":
        without_lora(given, draft)
    else:
        draft.change("tuner_type", adapts, "not here: lora and full")
    if (bits := given.take("quant_bits")) is not None:
        draft.change("quant_bits", bits, "not here: adapter.quantize has nf4, 4 bits")
    if adapts == "full" and "learning_rate" not in given:
        given.left["learning_rate"] = 1e-5
    translate(given, draft, asked)
    if "gradient_accumulation_steps" not in given:  # as many as a batch of 16 needs
        ranks = draft.yaml["train.micro_batch"][0] * (asked.gpus or 1)
        draft.yaml.pop("train.accumulation")
        draft.set("train.global_batch", ranks * max(1, math.ceil(16 / ranks)), "default of gradient_accumulation_steps")
        draft.batch_of_rank = None


def _objective(given: Given, draft: Draft, adapts: bool) -> None:
    kind, share = given.take("rlhf_type"), given.take("rpo_alpha")
    if kind is None:
        given.take("beta")
    elif kind not in _OBJECTIVES:
        draft.change("rlhf_type", kind, "not here: no objective draws answers from the model while it trains")
    else:
        name = "rpo" if kind == "dpo" and share else _OBJECTIVES[kind]
        draft.set("objective.name", name, "rlhf_type")
        if name == "rpo":
            draft.set("objective.alpha", float(share), "rpo_alpha")
            draft.change(
                "rpo_alpha", share, "a mean over the tokens of all chosen answers there, over each answer's mean here"
            )
        if name != "reward":
            draft.set(
                "objective.beta", float(given.take("beta", 2.0 if name == "simpo" else 0.1)), given.source("beta")
            )
        if name == "simpo" and given.take("cpo_alpha", 1.0):
            draft.change(
                "cpo_alpha", given.values.get("cpo_alpha"), "adds the chosen answer's likelihood; simpo here does not"
            )
        if adapts and draft.refers_to_start():
            draft.set("objective.reference", "online", "tuner_type lora: the base is the reference")


def _data(given: Given, draft: Draft, model: str, length: int, asked: Asked) -> None:
    objective = draft.yaml.get("objective.name", ("",))[0]
    draft.flag("--format", "preference" if objective == "rpo" else _FORMATS.get(objective, "chat"))
    draft.flag("--source", *[_source(name, draft, asked) for name in _listed(given.need("dataset", str, list))])
    if validation := _listed(given.take("val_dataset")):
        draft.flag("--validation-source", *[_source(name, draft, asked) for name in validation])
    else:
        draft.flag("--validation-fraction", f"{given.take('split_dataset_ratio', 0.0):g}")
    draft.flag("--tokenizer", model)
    draft.flag("--max-tokens", length)
    if (strategy := given.take("truncation_strategy", "delete")) != "raise":
        draft.flag("--too-long", "split" if strategy == "split" else "reject" if strategy == "delete" else "cut")
        draft.flag("--max-rejected", 10**9)
    scale = given.take("loss_scale", "default")
    if scale not in _COUNTS:
        draft.change("loss_scale", scale, f"not here: {', '.join(_COUNTS)}")
    elif _COUNTS[scale] and not objective:
        draft.flag("--count", _COUNTS[scale])
    if (name := given.take("template")) is not None:
        templates.named("template", str(name), model, draft)
    if (thinks := given.take("enable_thinking")) is not None:
        draft.flag("--chat-template-kwargs", json.dumps({"enable_thinking": bool(thinks)}))
    packed = given.take("packing")
    given.take("padding_free")
    draft.set("data.isolate_documents", True, given.source("packing"))
    if not packed:
        unpacked(draft, "packing")


def _listed(names: object) -> list[str]:
    return names.split() if isinstance(names, str) else [str(name) for name in names or ()]  # type: ignore[attr-defined]


def _source(name: str, draft: Draft, asked: Asked) -> str:
    path, _, count = name.removeprefix("HF::").partition("#")
    if count:
        draft.change("dataset", name, f"{count} of its records: give a shorter file to `llmtrain prepare --source`")
    if path.startswith("MS::") or (not name.startswith("HF::") and path.count("/") == 1 and "." not in path):
        draft.remark("dataset", name, "of ModelScope's hub there, of Hugging Face's here")
    local = asked.path(path)
    return local if local != path or "." in path.rpartition("/")[2] else f"hf:{path.removeprefix('MS::')}"


STACK = Stack(
    name="swift",
    title="ms-swift",
    classes=("swift", "transformers.TrainingArguments"),
    names={"lora_r": "lora_rank", "loraplus_lr_ratio": "lorap_lr_ratio", "attn_implementation": "attn_impl"},
    defaults={
        "per_device_train_batch_size": 1,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "logging_steps": 5,
        "learning_rate": 1e-4,
        "gradient_checkpointing": True,
        "bf16": True,
    },
    translate=_translate,
)
