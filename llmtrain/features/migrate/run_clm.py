"""transformers' run_clm.py: its words, or its TrainingArguments as JSON."""

from __future__ import annotations

from llmtrain.features.migrate.arguments import Asked, Stack, translate
from llmtrain.features.migrate.draft import Draft, Given


def _translate(given: Given, draft: Draft, asked: Asked) -> None:
    model = given.take("model_name_or_path")
    if model is not None:
        draft.set("model.pretrained", asked.path(str(model)), "model_name_or_path")
    elif config := given.take("config_name"):
        draft.set("model.config", asked.path(str(config)), "config_name")
    else:
        draft.change("config_overrides", given.take("config_overrides"), "write its fields below model.config")
    draft.set("data.sequence_length", given.take("block_size", 1024), given.source("block_size"))
    mark = len(given.answered)
    draft.flag("--format", "text")
    name, part = given.take("dataset_name"), given.take("dataset_config_name")
    source = asked.path(str(given.need("train_file"))) if name is None else f"hf:{name}" + (f"/{part}" if part else "")
    draft.flag("--source", source)
    if file := given.take("validation_file"):
        draft.flag("--validation-source", asked.path(str(file)))
    else:
        share = given.take("validation_split_percentage", 5)
        draft.flag("--validation-fraction", f"{share / 100:g}")
    draft.flag("--tokenizer", asked.path(str(given.take("tokenizer_name", model))))
    draft.prepare_from = given.answered[mark:]
    draft.remark("", None, "run_clm.py puts nothing between two texts; here the tokenizer's end of a text stands there")
    draft.set("data.mask_document_starts", False, "run_clm.py counts each token of a block")
    translate(given, draft, asked)


STACK = Stack(
    name="run_clm",
    title="transformers' run_clm.py",
    classes=("run_clm", "trl.ModelConfig", "transformers.TrainingArguments"),
    defaults={"num_train_epochs": 3.0},
    translate=_translate,
)
