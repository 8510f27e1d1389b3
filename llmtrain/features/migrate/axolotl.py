"""axolotl's YAML (its schemas of July 2026)."""

from __future__ import annotations

from typing import Any

from llmtrain.features.migrate import templates
from llmtrain.features.migrate.adapters import lora, without_lora
from llmtrain.features.migrate.arguments import Asked, Stack, translate, unpacked
from llmtrain.features.migrate.draft import Draft, Given

_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "varlen",
    "xformers_attention": "sdpa",
}
_OBJECTIVES = {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
_OF_DPO = {"sigmoid": "dpo", "ipo": "ipo", "robust": "robust", "sigmoid_norm": "dpo_norm"}
_CHAT = ("chat_template", "sharegpt", "alpaca")
_READ = (
    "path", "type", "data_files", "ds_type", "split", "name", "revision", "field", "field_messages",
    "chat_template", "chat_template_jinja", "message_property_mappings", "message_field_role",
    "message_field_content", "roles", "roles_to_train", "train_on_eos", "train_on_eot", "conversation",
    "trust_remote_code", "text_column", "preprocess_shards",
)  # fmt: skip
_SHAREGPT = {"role": "from", "content": "value"}
_PLAIN = {"role": "role", "content": "content"}


def _translate(given: Given, draft: Draft, asked: Asked) -> None:
    model = asked.path(str(given.need("base_model")))
    draft.set("model.pretrained", model, "base_model")
    length = given.take("sequence_len", 512)
    draft.set("data.sequence_length", length, given.source("sequence_len"))
    _objective(given, draft)
    mark = len(given.answered)
    _data(given, draft, model, length, asked)
    draft.prepare_from = given.answered[mark:]
    _adapter(given, draft)
    _attention(given, draft)
    if "batch_size" in given and "gradient_accumulation_steps" not in given:
        micro = given.values.get("micro_batch_size") or 1
        given.values["gradient_accumulation_steps"] = given.take("batch_size") // micro
        given.left["gradient_accumulation_steps"] = given.values["gradient_accumulation_steps"]
    least = given.take("cosine_min_lr_ratio") if given.values.get("lr_scheduler", "cosine") == "cosine" else None
    if "warmup_steps" not in given:
        draft.remark(
            "warmup_ratio",
            given.values.get("warmup_ratio"),
            "axolotl rounds the warm-up's steps down, this "
            "run rounds them up" + ("" if "warmup_ratio" in given else "; its default is 0.03, at most 100 steps"),
        )
    translate(given, draft, asked)
    if least:
        draft.set("schedule.shape", "cosine_with_min_lr", "cosine_min_lr_ratio")
        draft.set("schedule.min_ratio", float(least), "cosine_min_lr_ratio")
    if "wandb_project" not in given and not given.left.get("use_wandb"):
        draft.set("tracking.wandb", "disabled", "no wandb_project")


def _objective(given: Given, draft: Draft) -> None:
    method, losses = given.take("rl"), given.take("dpo_loss_type")
    given.take("dpo_loss_weights")
    if losses and not (len(losses) == 1 and losses[0] in _OF_DPO):
        draft.change("dpo_loss_type", losses, f"not here: objective.name has {', '.join(_OF_DPO.values())}")
    if given.take("reward_model"):
        draft.set("objective.name", "reward", "reward_model")
    elif method in _OBJECTIVES:
        name = _OF_DPO.get(losses[0], "dpo") if losses else _OBJECTIVES[method]
        draft.set("objective.name", name, "rl")
        if name == "simpo" and given.take("cpo_alpha", 1.0):
            draft.change(
                "cpo_alpha",
                given.values.get("cpo_alpha"),
                "adds the chosen answer's likelihood (1 is the default there); simpo here is without it",
            )
        beta = given.take("orpo_alpha") if method == "orpo" else given.take("rl_beta")
        draft.set("objective.beta", float(beta or 0.1), given.source("orpo_alpha" if method == "orpo" else "rl_beta"))
        if given.values.get("adapter") and draft.refers_to_start():
            draft.set("objective.reference", "online", "rl with an adapter: its base is the reference")
    elif method:
        draft.change("rl", method, "not here: no objective draws answers from the model while it trains")


def _data(given: Given, draft: Draft, model: str, length: int, asked: Asked) -> None:
    sets, texts = given.take("datasets") or [], given.take("pretraining_dataset") or []
    texts = [{"path": texts}] if isinstance(texts, str) else texts
    for each in texts:
        _unread(each, draft)
    if not (sets or texts):
        draft.change("datasets", sets, "there are none: give `llmtrain prepare --source` the records")
    formats = {_format(each, draft) for each in sets} | ({"text"} if texts else set())
    if len(formats) > 1:
        draft.change(
            "datasets",
            sorted(formats),
            "each form of record is a folder of its own here, by `llmtrain prepare`, "
            "and data.mixture has their weights",
        )
    form = min(formats, default="chat")
    draft.flag("--format", form)
    draft.flag("--source", *[asked.path(_source(each, draft)) for each in (*sets, *texts)])
    fields = {each.get("field_messages") or each.get("field") or each.get("text_column") for each in (*sets, *texts)}
    if field := next(iter(fields - {None, "messages", "conversations", "text"}), None):
        draft.flag("--field", field)
    if more := given.take("test_datasets"):
        draft.flag("--validation-source", *[asked.path(_source(each, draft)) for each in more])
    else:
        share = given.take("val_set_size", 0.0)
        if share > 1:
            draft.remark("val_set_size", share, "--validation-fraction has a share: 0.05 of the records")
            share = 0.05
        draft.flag("--validation-fraction", f"{share:g}")
    draft.flag("--tokenizer", given.take("tokenizer_config", model))
    if form == "text":
        if given.take("sample_packing"):
            draft.set("data.isolate_documents", True, "sample_packing")
        elif sets:
            draft.change("sample_packing", False, "each text has sequences of its own there; here texts are packed")
        return
    draft.set("data.isolate_documents", True, given.source("sample_packing"))
    draft.flag("--max-tokens", length)
    strategy = given.take("excess_length_strategy", "drop")
    if strategy != "raise":
        draft.flag("--too-long", "cut" if strategy == "truncate" else "reject")
        draft.flag("--max-rejected", 10**9)
    if given.take("train_on_inputs"):
        draft.flag("--count", "all")
    _template(given, draft, model, sets)
    if not given.take("sample_packing"):
        unpacked(draft, given.source("sample_packing"))


def _format(each: dict[str, Any], draft: Draft) -> str:
    """The form of a set's records; what its entry has beyond is told."""
    kind = each.get("type")
    start = str(kind or "chat_template").partition(".")[0]
    _unread(each, draft)
    if (roles := each.get("roles_to_train")) not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"]):
        draft.change("datasets.roles_to_train", roles, "answers of the assistant are counted, or --count all")
    for key in ("train_on_eos", "train_on_eot"):
        if each.get(key) not in (None, "turn"):
            draft.change(f"datasets.{key}", each[key], "the token that ends an answer is counted, and no other end")
    mapping = each.get("message_property_mappings") or {
        name: each[key]
        for name, key in (("role", "message_field_role"), ("content", "message_field_content"))
        if each.get(key)
    }
    if mapping and {**_PLAIN, **mapping} not in (_PLAIN, _SHAREGPT):
        draft.change("datasets.message_property_mappings", mapping, "a message has role and content, or from and value")
    if draft.yaml.get("objective.name", ("",))[0]:
        return "unpaired" if draft.yaml["objective.name"][0] == "kto" else "preference"
    if start in ("completion", "pretrain"):
        return "text"
    if start not in _CHAT or isinstance(kind, dict):
        draft.change(
            "datasets.type",
            kind,
            "a prompt format of axolotl's: here the tokenizer's chat template writes it, "
            "for messages, sharegpt, alpaca, and prompt + completion",
        )
    elif start == "alpaca":
        draft.change(
            "datasets.type",
            kind,
            "axolotl writes alpaca's own words around a question, here the tokenizer's "
            "chat template does. Remove this line if that is meant",
        )
    return "chat"


def _unread(each: dict[str, Any], draft: Draft) -> None:
    for key in each.keys() - set(_READ):
        if each[key] is not None and each[key] != key.removeprefix("field_"):
            draft.change(
                f"datasets.{key}",
                each[key],
                "not here: give `llmtrain prepare --source` the records as they are to be trained",
            )


def _source(each: dict[str, Any], draft: Draft) -> str:
    """A source of `llmtrain prepare`: a path or URL as it is, or a data set of the Hub."""
    path, files = str(each["path"]), each.get("data_files")
    split = each.get("split")
    is_part = draft.is_part("datasets.split", split)
    if (
        each.get("ds_type")
        or "://" in path
        or path.startswith((".", "/", "~"))
        or path.count("/") != 1
        or "." in path.rpartition("/")[2]
    ):
        return str(files) if isinstance(files, str) and path in ("json", "parquet", "csv", "text") else path
    if split not in (None, "train") and not is_part:
        draft.change("datasets.split", split, f"name the files: --source hf:{path}/data/PART-*")
    if name := each.get("name"):
        draft.change("datasets.name", name, f"name the files of this part: --source hf:{path}/{name}/train-*")
    revision = f"@{each['revision']}" if each.get("revision") else ""
    return f"hf:{path}{revision}" + (f"/{files}" if isinstance(files, str) else "")


def _template(given: Given, draft: Draft, model: str, sets: list[dict[str, Any]]) -> None:
    names = {each["chat_template"] for each in sets if each.get("chat_template")}
    name, text = given.take("chat_template"), given.take("chat_template_jinja")
    name = next(iter(names), name)
    if text and name in (None, "jinja"):
        is_path = text.endswith((".jinja", ".jinja2", ".j2"))
        if not is_path:
            draft.files["template.jinja"] = text
        draft.flag("--chat-template", text if is_path else "template.jinja")
    elif name:
        templates.named("chat_template", str(name), model, draft)
    if tokens := given.take("eot_tokens"):
        draft.flag("--stop-token", *tokens)
    extra = {key: token for key, token in (given.take("special_tokens") or {}).items() if key != "pad_token" and token}
    if "<|im_end|>" in extra.values() and "chatml.jinja" in draft.files:
        extra = {key: token for key, token in extra.items() if token != "<|im_end|>"}
    added = given.take("tokens")
    if added or extra.get("additional_special_tokens"):
        draft.change(
            "tokens",
            added or extra["additional_special_tokens"],
            "give --tokenizer a folder whose tokenizer has these tokens; model.vocabulary makes their rows",
        )
    elif extra:
        draft.remark("special_tokens", extra, "the tokenizer's own are taken: compare them")


def _adapter(given: Given, draft: Draft) -> None:
    if set("^$|()+?\\[") & set("".join(map(str, given.left.get("unfrozen_parameters") or ()))):
        names = given.take("unfrozen_parameters")
        draft.change("unfrozen_parameters", names, "regular expressions; model.train_only has patterns with * and ?")
    kind = given.take("adapter")
    if kind not in (None, "lora", "qlora"):
        draft.change("adapter", kind, "not here: section adapter is LoRA, with dora, rslora and quantize")
    if kind:
        lora(given, draft, {"r": 8, "alpha": 16, "dropout": 0.0, "targets": []})
    else:
        without_lora(given, draft)


def _attention(given: Given, draft: Draft) -> None:
    named = given.take("attn_implementation")
    flags = [flag for flag in _ATTENTION if given.take(flag)]
    choice, source = (
        (named, "attn_implementation") if named else next(((_ATTENTION[flag], flag) for flag in flags), (None, ""))
    )
    packed = "data.isolate_documents" in draft.yaml
    if packed and choice in ("flash_attention_2", "flash_attention_3", "flex_attention", "varlen"):
        draft.set("model.attention", "auto", f"{source}: varlen on a GPU")
    elif choice in ("sdpa", "eager", "flash_attention_2", "flash_attention_3"):
        draft.set("model.attention", choice, source)


STACK = Stack(
    name="axolotl",
    title="axolotl",
    classes=("axolotl", "transformers.TrainingArguments"),
    names={
        "per_device_train_batch_size": "micro_batch_size",
        "num_train_epochs": "num_epochs",
        "optim": "optimizer",
        "lr_scheduler_type": "lr_scheduler",
        "target_modules": "lora_target_modules",
        "target_linear": "lora_target_linear",
        "modules_to_save": "lora_modules_to_save",
    },
    defaults={
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine",
        "bf16": "auto",
        "warmup_ratio": 0.03,
        "logging_steps": 10,
    },
    translate=_translate,
)
