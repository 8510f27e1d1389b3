"""Checks that a run makes before its first step on numbers known without training, and their error texts."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.data.manifest import SPLITS
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.reference_and_teacher import read_reference, write_reference
from tests.helpers import forked
from tests.helpers.answers import SMALL
from tests.helpers.launching import REPO
from tests.helpers.preference import prepared_preferences, prepared_unpaired
from tests.helpers.warm import WarmCommands

pytestmark = pytest.mark.needs("peft")

RECIPE = """
deepspeed: {repo}/ds_configs/zero1_fp32.json
model: {{pretrained: {base}}}
data: {{path: {data}, sequence_length: 192, isolate_documents: true}}
objective: {objective}
adapter: {adapter}
train: {{run_dir: {run}, global_batch: 2, micro_batch: 2, max_steps: 1, log_every: 1, eval: false, export: false}}
schedule: {{warmup_steps: 0}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = LlamaConfig(**{key: value for key, value in SMALL.items() if key != "model_type"})
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # answers of unequal likelihood
    model.save_pretrained(folder)
    return folder


def recipe(
    folder: Path, base: Path, data: str, objective: dict[str, Any], adapter: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(
        RECIPE.format(
            repo=REPO,
            base=base,
            data=data,
            run=folder / "run",
            objective=json.dumps(objective),
            adapter=json.dumps(adapter or {}),
        )
    )
    return path


def write_column(recipe: Path, warm: WarmCommands) -> None:
    env = warm.environment(PYTHONPATH=str(REPO))
    done = subprocess.run(["llmtrain", "reference", str(recipe)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def late_by_one(data: str, *, from_half: bool = False) -> None:
    """The column of each split, or its second half, one row off, with checksums that are right."""
    prepared = PreparedSet(data)
    made, columns = read_reference(prepared, "fp32")
    late = {}
    for split in SPLITS:
        begin = len(columns[split]) // 2 if from_half else 0
        late[split] = np.concatenate([columns[split][:begin], np.roll(columns[split][begin:], 1)])
    write_reference(prepared, made.weights, made.precision, late, made.model)


def first_loss(run: Path) -> float:
    return float(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"])


def refused(file: Path, words: str, **launch: Any) -> str:
    """A launch that ends with a sentence, and before it has trained or saved anything."""
    code, said = forked.finish(file, world_size=1, **launch)
    assert code not in (0, 1) and words in " ".join(said.split()) and "Traceback" not in said, (code, said)
    assert not list((file.parent / "run").glob("checkpoints/step-*"))
    assert not (file.parent / "run/metrics.jsonl").exists() or not (file.parent / "run/metrics.jsonl").read_text()
    return said


def test_a_reference_column_that_is_one_row_off_ends_the_run_at_its_start(
    base: Path, tmp_path: Path, warm: WarmCommands
) -> None:
    """And one that is right serves another rank, other targets and another seed of the adapter: its B is 0."""
    data = prepared_preferences(tmp_path)
    file = recipe(tmp_path / "a", base, data, {"name": "dpo"}, {"r": 4})
    write_column(file, warm)
    again = recipe(tmp_path / "b", base, data, {"name": "dpo"}, {"r": 8, "targets": ["*.q_proj"]})
    forked.train(again, "--train.seed", "7", world_size=1)
    assert math.isclose(first_loss(tmp_path / "b/run"), math.log(2), abs_tol=1e-6)
    late_by_one(data)
    said = refused(file, "objective.name dpo: ")
    assert " an answer " in said and "llmtrain reference RUN.yaml" in said


def test_a_column_whose_prompts_with_other_answers_are_off_ends_a_run_of_kto(
    base: Path, tmp_path: Path, warm: WarmCommands
) -> None:
    data = prepared_unpaired(tmp_path)
    file = recipe(tmp_path / "a", base, data, {"name": "kto"})
    write_column(file, warm)
    late_by_one(data, from_half=True)
    refused(file, "log-probabilities of a prompt with the answer to another differ by")


def other_sign(_: int) -> None:
    """simpo with its gamma added."""
    from llmtrain.objectives.preferences import SimPo

    right = SimPo.losses
    SimPo.losses = lambda self, a: right(replace(self, gamma=-self.gamma), a)  # type: ignore[method-assign]


def loud_adapter(_: int) -> None:
    from llmtrain.models.adapter import AdaptedSource
    from llmtrain.models.parameters import B

    right = AdaptedSource._first
    AdaptedSource._first = lambda self, name: right(self, name) + name.endswith(B)  # type: ignore[method-assign]


def late_teacher(_: int) -> None:
    from llmtrain.models.teacher import Teacher

    right = Teacher.logits

    def late(self: Any, inputs: Any, positions: Any) -> Any:
        return right(self, inputs.roll(1, dims=1), positions)

    Teacher.logits = late  # type: ignore[method-assign]


def test_first_numbers_that_do_not_hold_end_a_run_with_a_sentence(base: Path, tmp_path: Path) -> None:
    """Covers an objective without a reference, and an adapter."""
    data = prepared_preferences(tmp_path)
    file = recipe(tmp_path / "simpo", base, data, {"name": "simpo"})
    refused(file, "an answer that is compared with itself has the margin", before=other_sign)
    refused(
        recipe(tmp_path / "lora", base, data, {"name": "orpo"}, {"r": 4}),
        "a new adapter, whose matrices B are 0, must not change the loss",
        before=loud_adapter,
    )


def test_a_student_that_is_its_own_teacher_begins_with_no_divergence(
    base: Path, small_data: str, tmp_path: Path
) -> None:
    own = shutil.copytree(base, tmp_path / "model")
    shutil.copytree(PreparedSet(small_data).tokenizer_dir, own, dirs_exist_ok=True)
    file = recipe(tmp_path / "own", own, small_data, {"name": "distill", "teacher": str(own)})
    refused(file, "the model and its teacher have the same weights", before=late_teacher)
    shutil.rmtree(tmp_path / "own/run", ignore_errors=True)
    forked.train(file, world_size=1)
    assert abs(first_loss(tmp_path / "own/run")) < 1e-5
