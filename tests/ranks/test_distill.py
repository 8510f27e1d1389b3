"""Distillation from a column against its definition in plain PyTorch. A teacher in the run: test_cells.py.

Both sides are fp32: 1e-5 is a few roundings of a loss near 1 after twenty steps.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.objectives.by_token import Distill
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    assembled,
    assert_agrees,
    make_engine,
    plain_model,
    plain_pytorch,
    resolved_run,
    train_steps,
)

STEPS = 20
TERMS: dict[str, float] = {"beta": 0.4, "temperature": 2.0, "alpha": 0.3}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of other sizes than the student, and sure of itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    sizes = {**LLAMA, "hidden_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    folder = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(folder)
    return str(folder)


def case_of(data: str, **form: Any) -> Case:
    model = {**LLAMA, "num_hidden_layers": 2}
    return Case(data=data, isolate_documents=True, **{"steps": STEPS, "model": model, "lr": 1e-3, **form})


class Both:
    """The student as `plain_pytorch` calls it, while the teacher reads the same."""

    def __init__(self, case: Case, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.student = plain_model(case)
        self.teacher = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.config, self.theirs = self.student.config, torch.empty(0)
        self.parameters, self.named_parameters = self.student.parameters, self.student.named_parameters

    def __call__(self, **given: Any) -> Any:
        with torch.no_grad():
            self.theirs = self.teacher(**given).logits
        return self.student(**given)


def definition(
    both: Both, logits: Tensor, labels: Tensor, *, beta: float, temperature: float, alpha: float, k: int | None = None
) -> Tensor:
    """(1 - alpha) T^2 JSD + alpha NLL, per counted token; with `k`, of the k likeliest words and all others as one."""
    counted = labels != -100
    p, q = ((each[counted] / temperature).softmax(-1) for each in (both.theirs, logits))
    if k is not None:
        order = p.argsort(-1, descending=True)
        p, q = (
            torch.cat([each[:, :k], each[:, k:].sum(-1, keepdim=True)], -1)
            for each in (p.gather(-1, order), q.gather(-1, order))
        )
    m = beta * p + (1 - beta) * q
    parts = beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()
    nll = F.cross_entropy(logits[counted], labels[counted])
    return (1 - alpha) * temperature**2 * parts.sum(-1).mean() + alpha * nll


@functools.cache
def plainly(data: str, folder: str, k: int | None = None) -> Trace:
    case = case_of(data)
    both = Both(case, folder)
    return plain_pytorch(case, lambda logits, labels: definition(both, logits, labels, **TERMS, k=k), both)


def learnt_from_column(writes: Case, learns: Case, folder: str, top_k: int) -> tuple[Trace, str | None]:
    """All steps, from a column that the teacher wrote in another form; and of which weights it is."""

    from llmtrain.data.stream.train_data import TrainData
    from llmtrain.engine.losses.named import loss_of
    from llmtrain.models.teacher import teacher_model
    from llmtrain.training.output_columns import of_teacher, write_teacher
    from llmtrain.training.setup import taught_by
    from tests.helpers.training import case_data, examined, joined

    ranks = joined()
    config = Distill(teacher=folder, top_k=top_k, **TERMS)
    run = resolved_run(writes, ranks.world_size)
    asked = replace(run.config, objective=config, data=case_data(writes))
    of = of_teacher(run, teacher_model(config, asked.model))
    write_teacher(examined(of), ranks, asked)
    ranks.meet()
    data = TrainData(case_data(learns))
    weights = data.take_teacher(data.teacher_columns(config, 512, "fp32"))
    engine, ranks = make_engine(learns)
    trace = train_steps(learns, engine, ranks, 0, learns.steps, objective=loss_of(config), data=data)
    trace.parameters = assembled(engine, ranks)
    engine.close()
    return trace, taught_by(asked, weights, ranks)


def test_a_column_that_zero_3_writes_is_read_under_zero_1(pools, small_data, teacher, tmp_path):
    """The loss is the definition's of k + 1 events."""
    folder = str(shutil.copytree(small_data, tmp_path / "data"))
    want = plainly(small_data, teacher, 16)
    assert (
        abs(want.losses[0] - plainly(small_data, teacher).losses[0]) > 1e-3 and want.losses[-1] < want.losses[0] - 0.1
    )
    arguments = (case_of(folder, stage=3, sequence=2), case_of(folder, stage=1, sequence=2), teacher, 16)
    for got, weights in pools(2).run(learnt_from_column, *arguments):
        assert_agrees(got, want, loss=1e-5, parameters=5e-5)
        assert weights == json.loads((Path(folder) / "teacher-32.json").read_text())["weights"]
