"""TRL's `sft`, `dpo`, `kto` and `reward`, and transformers' run_clm: their words, or the YAML that they read."""

from __future__ import annotations

import json
from typing import Any

from llmtrain.features.migrate.adapters import lora, without_lora
from llmtrain.features.migrate.arguments import Asked, Stack, translate, unpacked
from llmtrain.features.migrate.draft import Draft, Given

_OF_DPO = {"sigmoid": "dpo", "robust": "robust", "ipo": "ipo", "sigmoid_norm": "dpo_norm"}
_METHODS = {"trl-sft": "sft", "trl-dpo": "dpo", "trl-kto": "kto", "trl-reward": "reward"}


def _translate(given: Given, draft: Draft, asked: Asked) -> None:
    method = _METHODS[asked.stack.name]
    model = asked.path(str(given.take("model") or given.need("model_name_or_path")))
    draft.set("model.pretrained", model, given.source("model_name_or_path"))
    length = given.take("max_length", given.take("max_seq_length", 1024))
    draft.set("data.sequence_length", length, given.source("max_length"))
    if method != "sft":
        _objective(given, draft, method)
    mark = len(given.answered)
    _data(given, draft, model, length, method, asked)
    draft.prepare_from = given.answered[mark:]
    if given.take("use_peft") or given.values.get("peft_config"):
        lora(given, draft, {"r": 16, "alpha": 32, "dropout": 0.05, "targets": []})
        if draft.refers_to_start():
            draft.set("objective.reference", "online", "use_peft: the base is the reference")
    else:
        without_lora(given, draft)
    dtype = str(given.take("dtype", given.take("torch_dtype", "auto")))
    if dtype in ("float16", "bfloat16") and "bf16" not in given and "fp16" not in given:
        draft.remark("dtype", dtype, "masters of the parameters are in fp32 here, the JSON says in what they compute")
    translate(given, draft, asked)


def _objective(given: Given, draft: Draft, method: str) -> None:
    loss = given.take("loss_type", {"dpo": "sigmoid", "kto": "kto"}.get(method))
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    weights = given.take("loss_weights")
    name: Any = {"kto": "kto", "reward": "reward"}.get(method)
    if method == "dpo" and loss == ["sigmoid", "sft"]:
        name = "rpo"
        first, second = weights or (1.0, 1.0)
        draft.change(
            "loss_type",
            loss,
            "TRL's likelihood is a mean over the tokens of all chosen answers, rpo's over each answer's mean",
        )
        draft.set("objective.alpha", float(second) / float(first), given.source("loss_weights"))
    elif method == "dpo" and isinstance(loss, str):
        name = _OF_DPO.get(loss)
    if name is None or (method == "kto" and loss != "kto"):
        draft.change("loss_type", loss, f"not here: objective.name has {', '.join(_OF_DPO.values())}, rpo, kto, reward")
    draft.set("objective.name", name or "dpo", given.source("loss_type") if method != "reward" else "trl reward")
    if method != "reward":
        draft.set("objective.beta", float(given.take("beta", 0.1)), given.source("beta"))
    smoothing = given.take("label_smoothing", 0.0)
    if smoothing and name in ("dpo", "robust"):
        draft.set("objective.smoothing", smoothing, "label_smoothing")
    elif smoothing:
        draft.change("label_smoothing", smoothing, f"{name} has no smoothing here")


def _data(given: Given, draft: Draft, model: str, length: int, method: str, asked: Asked) -> None:
    draft.flag("--format", {"sft": "chat", "dpo": "preference", "kto": "unpaired", "reward": "preference"}[method])
    name = str(given.need("dataset_name"))
    part, train = given.take("dataset_config"), given.take("dataset_train_split", "train")
    test = given.take("dataset_test_split", "test")
    train = "train" if draft.is_part("dataset_train_split", train) else train
    local = name.startswith((".", "/", "~")) or "." in name.rpartition("/")[2]
    inside = f"/{part}" if part else ""
    draft.flag(
        "--source",
        asked.path(name) if local else f"hf:{name}{inside}" + ("" if train == "train" and not part else f"/{train}-*"),
    )
    if given.values.get("eval_strategy", "no") != "no" and not local:
        test = "test" if draft.is_part("dataset_test_split", test) else test
        draft.flag("--validation-source", f"hf:{name}{inside}/{test}-*")
    else:
        draft.flag("--validation-fraction", "0")
    draft.flag("--tokenizer", model)
    draft.flag("--max-tokens", length)
    draft.set("data.isolate_documents", True, given.source("packing"))
    packed, strategy = given.take("packing"), given.take("packing_strategy", "bfd")
    given.take("padding_free")
    draft.remark(
        "",
        None,
        "what a template writes behind an answer's end, such as a line feed, is no part of a row here; TRL learns it "
        "unless {% generation %} leaves it out",
    )
    if method == "sft":
        draft.flag("--too-long", "cut")
        everything = not given.take("assistant_only_loss")
        completion = given.take("completion_only_loss")
        if everything and completion:
            draft.remark(
                "completion_only_loss", completion, "records with prompt and completion: the completion counts"
            )
        elif everything:
            draft.flag("--count", "all")
            if completion is None:
                draft.remark(
                    "completion_only_loss",
                    None,
                    "TRL counts every token of messages; of records with prompt and "
                    "completion the completion alone: remove `--count all` for these",
                )
        if packed and strategy == "wrapped":
            draft.change("packing_strategy", strategy, "rows are kept whole and apart here, as with bfd")
    else:
        draft.flag("--max-rejected", 10**9)
    if not packed:
        unpacked(draft, given.source("packing"))
    if (kwargs := given.take("chat_template_kwargs")) is not None:
        draft.flag("--chat-template-kwargs", json.dumps(kwargs))


def _stack(method: str, config: str, **defaults: Any) -> Stack:
    return Stack(
        name=f"trl-{method}",
        title=f"trl {method}",
        classes=(config, "trl.SFTConfig", "trl.ScriptArguments", "trl.ModelConfig", "transformers.TrainingArguments"),
        names={"target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"},
        defaults={"logging_steps": 10, "gradient_checkpointing": True, "bf16": True, **defaults},
        translate=_translate,
    )


STACKS = (
    _stack("sft", "trl.SFTConfig", learning_rate=2e-5),
    _stack("dpo", "trl.DPOConfig", learning_rate=1e-6),
    _stack("kto", "trl.KTOConfig", learning_rate=1e-6),
    _stack("reward", "trl.RewardConfig", learning_rate=1e-4),
)
