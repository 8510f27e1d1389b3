"""A checkpoint of any form becomes one Hugging Face folder, whose logits in transformers are the trained model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.data.stream.loader import MicroBatch
from llmtrain.models.loss import IGNORE
from tests.helpers.families import FAMILIES
from tests.helpers.training import Case, make_engine, resolved_run, save_checkpoint, train_steps

ROWS, LENGTH = 2, 32
TOKENS = [(0, 0, 5), (0, 7, 300), (0, 31, 511), (1, 15, 0), (1, 16, 77), (1, 31, 256)]
"""(row, position, token) whose log-probability is compared."""


def tokens() -> torch.Tensor:
    return torch.randint(512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def train_and_save(case: Case, folder: str) -> tuple[str, list[float]]:
    """The checkpoint after three steps, and what the engine gives for TOKENS."""
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 3)
    found = []
    for row, position, token in TOKENS:
        labels = torch.full((ROWS, LENGTH), IGNORE)
        labels[row, position] = token
        figures, counted = engine.evaluate([MicroBatch(inputs=tokens(), labels=labels, sample_indices=[0, 1])])
        assert counted == resolved_run(case, ranks.world_size).degrees.data
        found.append(-figures["loss"])
    state = {"step": 3, "tokens": 0, "model_config": engine.module.config.to_dict()}
    path = save_checkpoint(engine, Path(folder), 3, state, resolved_run(case, ranks.world_size), ranks)
    engine.close()
    return str(path), found


def case_of(data: str, form: str, model: dict[str, Any]) -> Case:
    attention = "eager" if model["model_type"] == "gemma2" else "sdpa"  # its soft cap is in no other
    return Case(data=data, steps=3, lr=3e-3, model=model, attention=attention, **FORMS[form])


def compare(pools, case: Case, world_size: int, place: Path) -> None:
    from transformers import AutoModelForCausalLM

    path, ours = pools(world_size).run(train_and_save, case, str(place / "run"))[0]
    export_hf(Path(path), place / "hf", check="none")
    model = AutoModelForCausalLM.from_pretrained(
        place / "hf", dtype=torch.float32, attn_implementation=case.attention
    ).eval()
    with torch.no_grad():
        logits = model(input_ids=tokens()).logits.log_softmax(-1)
    theirs = [float(logits[at]) for at in TOKENS]
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert max(theirs) - min(theirs) > 1e-2  # they tell one token from another


FORMS = {
    "z3": {"stage": 3},
    "pp": {"pipeline": 2, "stage": 1},
    "tp": {"tensor": 2, "stage": 1},
    "tp z0": {"tensor": 2, "stage": 0},
    "tp z3": {"tensor": 2, "stage": 3},
    "sp": {"sequence": 2, "stage": 3},
    "ep": {"expert": 2, "stage": 2},
}
TELLING = [
    ("tp", "gpt2"),
    ("tp z3", "phi3"),
    ("tp z0", "gpt_neox"),
    ("pp", "gemma3"),
    ("sp", "qwen3"),
    ("ep", "mixtral"),
    ("z3", "llama"),
]


@pytest.mark.parametrize(("form", "family"), TELLING)
def test_an_export_is_the_model_that_was_trained(pools, small_data, tmp_path, form, family):
    compare(pools, case_of(small_data, form, FAMILIES[family]), 2, tmp_path)
