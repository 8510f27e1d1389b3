"""A chat format's own tokens, for which the model has no rows: refused with the remedy, trained, exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.checkpoint.hf.inference import Sampling, generate
from tests.helpers.chat import write_tokenizer
from tests.helpers.forked import finish, train
from tests.helpers.launching import RECIPE, REPO, losses
from tests.helpers.warm import WarmCommands
from tests.runs.test_chat import KIND, MODEL, conversations
from tests.runs.test_kills import llmtrain

pytestmark = pytest.mark.needs("peft")


def written(folder: Path, tokens: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = MODEL | {"vocab_size": tokens}
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder, KIND)


def test_new_tokens_of_a_chat_format(tmp_path: Path, warm: WarmCommands) -> None:
    from transformers import AutoModelForCausalLM

    written(tmp_path / "model", 300)  # whose tokenizer tells how many it has
    records = "".join(json.dumps({"messages": talk}) + "\n" for talk in conversations())
    (tmp_path / "talks.jsonl").write_text(records)
    words = ("--format", "chat", "--source", "talks.jsonl", "--tokenizer", "model", "--out", "data")
    llmtrain(tmp_path, "prepare", *words, warm=warm)
    tokens = json.loads((tmp_path / "data/manifest.json").read_text())["vocab_size"]
    written(tmp_path / "model", tokens - 5)
    settings = tmp_path / "model/generation_config.json"
    stops = [*json.loads(settings.read_text())["eos_token_id"], tokens - 1]  # the last is no end of these answers
    settings.write_text(json.dumps({"eos_token_id": stops}))
    text = RECIPE.format(repo=REPO, data=tmp_path / "data", run=tmp_path / "run").replace("th: 32", "th: 160")
    model = f"model: {{pretrained: {tmp_path / 'model'}}}\nadapter: {{r: 4}}\n"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        re.sub(r"model:\n(  .*\n)+", model, text).replace("data:\n", "data:\n  isolate_documents: true\n")
    )
    for asked, says in (
        ((), f"set model.vocabulary to {tokens} or more"),
        (("--model.vocabulary", str(tokens)), r"would never train: it is frozen(.|\n)*adapter.modules_to_save"),
    ):
        code, output = finish(recipe, *asked)
        assert code == 2 and re.search(says, output), output
    asked = (
        "--model.vocabulary",
        str(tokens),
        "--optim.lr",
        "5e-3",
        "--adapter.modules_to_save",
        '["lm_head"]',
        "--train.export",
        "true",
    )
    train(recipe, *asked, "--train.max_steps", "4", "--checkpoint.every_steps", "2")
    found = losses(tmp_path / "run")
    assert found[4] < found[1]
    assert isinstance(generate(tmp_path / "run/export", "yes", Sampling(max_tokens=4)), str)
    llmtrain(tmp_path, "checkpoint", "to-hf", "run", "merged", "--merge", warm=warm)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == tokens
    assert set(stops) <= set(merged.generation_config.eos_token_id), "where the base stops"
    llmtrain(tmp_path, "checkpoint", "average", "run", "--last", "2", "mean", warm=warm)
    llmtrain(tmp_path, "checkpoint", "to-hf", "mean", "exported", "--merge", warm=warm)
    kept = json.loads((tmp_path / "exported/generation_config.json").read_text())["eos_token_id"]
    assert set(stops) <= set(kept), "of the mean of checkpoints, too"
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert isinstance(generate(tmp_path / "merged", "yes", Sampling(max_tokens=4)), str)
