"""LLaMA-Factory's YAML or JSON (its arguments of August 2026)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.features.migrate import templates
from llmtrain.features.migrate.adapters import lora, without_lora
from llmtrain.features.migrate.arguments import Asked, Stack, translate, unpacked
from llmtrain.features.migrate.draft import Draft, Given

_ATTENTION = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"}
_PREFERENCES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_COLUMNS = {"messages", "prompt", "query", "response", "history", "system", "tools", "chosen", "rejected", "kto_tag"}


def _translate(given: Given, draft: Draft, asked: Asked) -> None:
    model = asked.path(str(given.need("model_name_or_path")))
    scratch = given.take("train_from_scratch")
    draft.set("model.config" if scratch else "model.pretrained", model, "model_name_or_path")
    length = given.take("cutoff_len", 2048)
    draft.set("data.sequence_length", length, given.source("cutoff_len"))
    stage = str(given.take("stage", "sft"))
    _objective(given, draft, stage)
    mark = len(given.answered)
    _data(given, draft, model, length, stage, asked)
    draft.prepare_from = given.answered[mark:]
    kind = given.take("finetuning_type", "lora")
    if kind == "lora":
        lora(given, draft, {"r": 8, "alpha": None, "dropout": 0.0, "targets": ["all"]})
        usual = given.take("quantization_method", "bnb") == "bnb" and given.take("quantization_type", "nf4") == "nf4"
        if given.values.get("quantization_bit") == 4 and usual:
            given.take("quantization_bit")
            draft.set("adapter.quantize", "nf4", "quantization_bit")
    elif kind == "full":
        without_lora(given, draft)
    else:
        draft.change("finetuning_type", kind, "not here: lora and full; model.train_only names what trains alone")
    if (bits := given.left.get("quantization_bit")) is not None:
        draft.change("quantization_bit", bits, "not here: adapter.quantize has nf4, 4 bits")
        given.take("quantization_bit")
    if (attention := given.take("flash_attn", "auto")) in _ATTENTION:
        packed = "data.isolate_documents" in draft.yaml and attention in ("fa2", "fa3")
        draft.set("model.attention", "auto" if packed else _ATTENTION[attention], "flash_attn")
    translate(given, draft, asked)


def _objective(given: Given, draft: Draft, stage: str) -> None:
    beta, loss = given.take("pref_beta", 0.1), given.take("pref_loss", "sigmoid")
    source = given.source("pref_loss")
    if stage == "dpo":
        if loss not in _PREFERENCES:
            draft.change("pref_loss", loss, f"not here: objective.name has {', '.join(_PREFERENCES.values())}")
        name = _PREFERENCES.get(loss, "dpo")
        if name == "dpo" and (share := given.take("pref_ftx", 0.0)):
            name = "rpo"
            draft.set("objective.alpha", float(share), "pref_ftx")
            draft.remark("pref_ftx", share, "rpo's term is per token, as there")
        elif given.take("pref_ftx", 0.0):
            draft.change("pref_ftx", given.values["pref_ftx"], f"{name} has no term of likelihood here")
        draft.set("objective.name", name, source)
        draft.set("objective.beta", float(beta), given.source("pref_beta"))
    elif stage in ("kto", "rm"):
        name = "kto" if stage == "kto" else "reward"
        draft.set("objective.name", name, "stage")
        if stage == "kto":
            draft.set("objective.beta", float(beta), given.source("pref_beta"))
    elif stage not in ("pt", "sft"):
        draft.change("stage", stage, "not here: no objective draws answers from the model while it trains")
    if given.values.get("finetuning_type", "lora") == "lora" and draft.refers_to_start():
        draft.set("objective.reference", "online", "finetuning_type lora: the base is the reference")


def _data(given: Given, draft: Draft, model: str, length: int, stage: str, asked: Asked) -> None:
    folder = asked.folder / str(given.take("dataset_dir", "data"))
    forms = {"pt": "text", "kto": "unpaired", "dpo": "preference", "rm": "preference"}
    draft.flag("--format", form := forms.get(stage, "chat"))
    sets = _listed(given.need("dataset", str, list))
    draft.flag("--source", *[_source(name, folder, asked.out, draft) for name in sets])
    if validation := _listed(given.take("eval_dataset")):
        draft.flag("--validation-source", *[_source(name, folder, asked.out, draft) for name in validation])
    else:
        share = given.take("val_size", 0.0)
        draft.flag("--validation-fraction", f"{share if share <= 1 else 0.05:g}")
        if share > 1:
            draft.remark("val_size", share, "--validation-fraction has a share: 0.05 of the records")
    draft.flag("--tokenizer", model)
    packing, neat = given.take("packing"), given.take("neat_packing")
    if form == "text":
        if packing is False:
            draft.change("packing", packing, "each text has a sequence of its own there; here texts are packed")
        return
    draft.set("data.isolate_documents", True, given.source("neat_packing"))
    if packing and not neat:
        draft.change("packing", packing, "without neat_packing a row reads the rows before it; here rows are isolated")
    elif not packing and not neat:
        unpacked(draft, given.source("neat_packing"))
    draft.flag("--max-tokens", length)
    draft.flag("--too-long", "cut" if form == "chat" else "reject")
    if form != "chat":
        draft.remark(
            "cutoff_len", length, "longer answers are left out, and named in rejected.jsonl; LLaMA-Factory cuts them"
        )
    draft.flag("--max-rejected", 10**9)
    if form == "chat" and given.take("train_on_prompt"):
        draft.flag("--count", "all")
    elif form == "chat" and given.take("mask_history"):
        draft.flag("--count", "last")
    if (name := given.take("template")) is not None:
        templates.named("template", str(name), model, draft)
    if (thinks := given.take("enable_thinking", True)) is not True:
        draft.flag("--chat-template-kwargs", json.dumps({"enable_thinking": bool(thinks)}))


def _listed(names: Any) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(map(str, names or ()))


def _source(name: str, folder: Path, out: Path, draft: Draft) -> str:
    """The file or the Hub's name that dataset_info.json has for a data set."""
    try:
        entry = untrusted.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError):
        draft.remark(
            "dataset",
            name,
            f"{folder / 'dataset_info.json'} does not say what it is: write its file, or hf:ORG/NAME, into commands.sh",
        )
        return f"{os.path.relpath(folder / name, out)}.json"
    columns = {ours: theirs for ours, theirs in (entry.get("columns") or {}).items() if ours in _COLUMNS}
    usual = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
    if odd := {ours: theirs for ours, theirs in columns.items() if theirs not in (ours, usual.get(ours))}:
        draft.change("dataset", f"{name}: columns {odd}", "records have the usual names here: rename these")
    parts = {key: entry[key] for key in ("subset", "split", "folder", "num_samples") if entry.get(key)}
    if parts.get("split") == "train":
        del parts["split"]
    if parts:
        draft.change(
            "dataset", f"{name}: {parts}", "a part of the records: give `llmtrain prepare` a file with it alone"
        )
    if hub := entry.get("hf_hub_url"):
        return f"hf:{hub}"
    return os.path.relpath(folder / str(entry.get("file_name", f"{name}.json")), out)


STACK = Stack(
    name="llamafactory",
    title="LLaMA-Factory",
    classes=("llamafactory", "transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments"),
    names={
        "lora_r": "lora_rank",
        "target_modules": "lora_target",
        "modules_to_save": "additional_target",
        "early_stopping_patience": "early_stopping_steps",
    },
    defaults={"gradient_checkpointing": True},
    translate=_translate,
)
