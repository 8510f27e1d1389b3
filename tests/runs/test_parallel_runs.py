"""The same training in every form of parallelism, as a user starts it: the JSON alone differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.checkpoint.format import step_folder
from tests.helpers import forked
from tests.helpers.launching import losses, rows, write_recipe

MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
FORMS: dict[str, tuple[int, dict]] = {
    "one": (1, {"zero_optimization": {"stage": 0}}),
    "pp2": (2, {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}),
    "sp2": (2, {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2}),
    "pp2xtp2": (
        4,
        {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}},
    ),
}
STEPS = ("--train.max_steps", "6", "--checkpoint.every_steps", "3", "--checkpoint.keep", "2")
CONSTANT = ("--schedule.name", "constant", "--train.micro_batch", "null", "--train.accumulation", "2")


def recipe_for(folder: Path, data: str, form: str) -> tuple[Path, int]:
    """A recipe in a folder of its own, and its ranks."""
    folder.mkdir()
    ranks, keys = FORMS[form]
    recipe = write_recipe(folder, data)
    (folder / "ds.json").write_text(json.dumps(keys))
    lines = recipe.read_text().splitlines()
    begin, end = lines.index("model:"), lines.index("data:")
    model = ["model:", "  config:", *(f"    {key}: {json.dumps(value)}" for key, value in MODEL.items())]
    lines[begin:end] = model
    recipe.write_text("\n".join(f"deepspeed: {folder}/ds.json" if "deepspeed:" in line else line for line in lines))
    return recipe, ranks


@pytest.fixture(scope="module")
def undisturbed(small_data, tmp_path_factory) -> Path:
    """The run folder of six steps in one process."""
    recipe, _ = recipe_for(tmp_path_factory.mktemp("one") / "run", small_data, "one")
    forked.train(recipe, *CONSTANT, *STEPS, world_size=1)
    return recipe.parent / "run"


def close(run: Path, want: Path, steps: range) -> bool:
    return max(abs(losses(run)[step] - losses(want)[step]) for step in steps) < 1e-5


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(2, 34)[None]).logits


@pytest.mark.parametrize("form", ["sp2", "pp2xtp2"])  # the others: test_cells.py and test_layouts.py
def test_a_form_trains_saves_resumes_and_exports_like_one_process(form, undisturbed, small_data, tmp_path):
    """Six steps in this form; then its third step goes on in one process, and one process's third step in this form."""
    recipe, ranks = recipe_for(tmp_path / "form", small_data, form)
    output = forked.train(recipe, *CONSTANT, *STEPS, "--train.export", "true", world_size=ranks)
    run = tmp_path / "form" / "run"
    assert close(run, undisturbed, range(1, 7)), (losses(run), losses(undisturbed))
    assert "validation loss" in output
    evaluated = [next(r["eval/loss"] for r in rows(folder) if "eval/loss" in r) for folder in (run, undisturbed)]
    assert abs(evaluated[0] - evaluated[1]) < 1e-5

    there = tmp_path / "there" / "run"
    alone, _ = recipe_for(tmp_path / "there", small_data, "one")
    shutil.copytree(step_folder(run / "checkpoints", 3), step_folder(there / "checkpoints", 3))
    output = forked.train(alone, *CONSTANT, *STEPS, "--train.export", "true", world_size=1)
    assert "at step 3" in output and close(there, undisturbed, range(4, 7)), losses(there)
    assert float((logits(run / "export") - logits(there / "export")).abs().max()) < 1e-4

    back = tmp_path / "back" / "run"
    recipe, ranks = recipe_for(tmp_path / "back", small_data, form)
    shutil.copytree(step_folder(undisturbed / "checkpoints", 3), step_folder(back / "checkpoints", 3))
    output = forked.train(recipe, *CONSTANT, *STEPS, world_size=ranks)
    assert "at step 3" in output and close(back, undisturbed, range(4, 7)), losses(back)


HEADS: dict[str, dict[str, Any]] = {
    # Caps at 30, its own value: a hidden state of a large model's size is what it bends.
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "initializer_range": 0.5},
    "cohere2": {"sliding_window": 8},  # its own logit_scale is 1/16
    "granite": {"logits_scaling": 8.0},
}


@pytest.mark.parametrize("family", ["gemma2", "cohere2"])
def test_a_pipeline_whose_head_scales_or_caps_its_logits_trains_and_resumes(family, small_data, tmp_path):
    """Ten steps and a resume. From its own init a model's logits may be too small for the cap or the scale to be seen:
    at the resume they are not."""
    recipe, ranks = recipe_for(tmp_path / "form", small_data, "pp2")
    special = {"model_type": family, "num_hidden_layers": 2, **HEADS[family]}
    words = ["--model.attention", "eager"]  # Gemma-2 caps its scores, too
    words += [word for key, value in special.items() for word in (f"--model.config.{key}", str(value))]
    words += [*CONSTANT, "--optim.lr", "1e-2", "--checkpoint.every_steps", "100"]
    forked.train(recipe, *words, "--train.max_steps", "10", world_size=ranks)
    forked.train(recipe, *words, "--train.max_steps", "12", world_size=ranks)
    seen = losses(tmp_path / "form" / "run")
    assert sorted(seen) == list(range(1, 13))
    assert seen[12] < seen[1] - 0.1, seen
