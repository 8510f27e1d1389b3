"""Stages whose data have columns of a reference or of a teacher, against plain PyTorch that knows both data sets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmtrain.config.stages import StageBatch, StageConfig
from llmtrain.objectives.by_token import Distill, NextToken
from llmtrain.optim.schedules import Cosine
from llmtrain.training.examine import in_stages, stage_data, stage_key, take_columns
from llmtrain.training.output_columns import of_teacher, write_columns, write_teacher
from llmtrain.training.setup import Setup
from tests.helpers.answers import answers_case
from tests.helpers.plain import PlainTraining
from tests.helpers.preference import prepared_preferences, prepared_unpaired, rows_read
from tests.helpers.training import (
    GLOBAL_BATCH,
    Case,
    Trace,
    largest_difference,
    plain_model,
    prepared_data,
    resolved_run,
)
from tests.ranks.test_distill import TERMS, definition, teacher  # noqa: F401  # a fixture
from tests.ranks.test_preference import definition as definition_of_answers
from tests.ranks.test_stages import SAVED, STEPS, plainly, stages, trained

BORDER = 2
"""Steps before the second stage."""
TOP_K = 16


def reading_columns(case: Case) -> Setup:
    """A run whose data have their columns, and whose parameters have no values yet."""
    from tests.helpers.training import examined, joined

    ranks = joined()
    run, spec, opened = examined(resolved_run(case, ranks.world_size))
    data = {stage_key(stage): each for stage, each in in_stages(run.stages, opened.stages)}
    objective = run.config.objective
    if isinstance(objective, Distill):
        form = (objective, spec.facts.vocab_size, "fp32")
        taken = take_columns(data, lambda own: own.take_teacher(own.teacher_columns(*form)))
        opened = replace(opened, teachers=taken)
    else:
        opened = replace(opened, references=take_columns(data, lambda own: own.take_reference("fp32")))
    return Setup(run, spec, opened, ranks)


def with_columns(case: Case) -> Setup:
    """A run at its beginning, whose columns one command has written for all stages."""
    from tests.helpers.training import examined, joined

    ranks = joined()
    run = resolved_run(case, ranks.world_size)
    config = run.config
    plain = replace(run, config=replace(config, objective=NextToken()))
    if isinstance(config.objective, Distill):
        from llmtrain.models.teacher import teacher_model

        write_teacher(examined(of_teacher(plain, teacher_model(config.objective, config.model))), ranks, config)
    else:
        write_columns(examined(plain), ranks)
    ranks.meet()
    setup = reading_columns(case)
    setup.start()
    setup.prove()
    return setup


def whole_and_rests(case: Case, folder: Path, saves: list[int]) -> tuple[Trace, list[int], list[Trace]]:
    """On this rank: the whole run with its micro-batches, and its rest from each checkpoint in a new engine."""
    whole, micros, saved = trained(with_columns(case), folder, saves)
    rests = []
    for step in saves:
        rests.append(trained(reading_columns(case), folder, [], saved[step])[0])
    return whole, micros, rests


def compare(got: Trace, want: Trace, rests: list[Trace], saves: list[int]) -> None:
    """Losses after the borders within 1e-5: fp32 sums in another order; a resume goes on bit for bit."""
    for step, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
        assert abs(a - b) < 1e-5, (step, a, b)
    assert largest_difference(got.parameters, want.parameters) < 5e-5
    for step, rest in zip(saves, rests, strict=True):
        assert rest.losses == got.losses[step:], step
        assert largest_difference(rest.parameters, got.parameters) == 0.0


def answered(case: Case, other: str) -> Trace:
    """dpo or kto in one process: two steps of the first data, then of the other one in a batch of half the size."""
    hf = plain_model(case)
    training = PlainTraining(
        hf, lr=case.lr, rate=partial(Cosine(warmup_steps=3).factor, max_steps=case.steps), clip=case.clip
    )
    losses = [definition_of_answers(hf, folder, case.objective["name"]) for folder in (case.data, other)]
    sources = stage_data(resolved_run(case, 2).stages)
    for step in range(case.steps):
        at = int(step >= BORDER)
        size = GLOBAL_BATCH // (1 + at)
        sequences = [sources[at].sequence_at((step - at * BORDER) * size + row) for row in range(size)]
        training.step(losses[at](rows_read(sequences)))
    return Trace(training.losses, training.norms, training.parameters())


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Two folders of preferences, and two of judged answers."""
    return {
        "dpo": tuple(prepared_preferences(tmp_path_factory.mktemp("pairs"), count) for count in (90, 60)),
        "kto": tuple(prepared_unpaired(tmp_path_factory.mktemp("judged"), count) for count in (90, 60)),
    }  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("dpo", {"stage": 1, "accumulation": 2}),
        ("kto", {"stage": 3}),
    ],
)
def test_answers_in_stages_are_those_of_plain_pytorch(pools, pairs, tmp_path, name, form):
    """Each stage reads the log-probabilities of its own answers: the first loss after the border tells."""
    first, other = pairs[name]
    half = StageBatch(global_batch=GLOBAL_BATCH // 2, accumulation=1)
    after = StageConfig(from_step=BORDER, path=other, train=half)
    objective = {"name": name, **({"undesirable_weight": 0.25} if name == "kto" else {})}
    case = answers_case(first, lr=1e-3, objective=objective, stages=(after,), **form)
    case, saves = replace(case, steps=5), [BORDER, BORDER + 1]
    got, _, rests = pools(2).run(whole_and_rests, case, tmp_path, saves)[0]
    compare(got, answered(case, other), rests, saves)


def test_a_distillation_in_stages_is_its_definition(pools, teacher, tmp_path):  # noqa: F811
    """The other data is read in two lengths, each with a column of its own; the student's positions change, too."""
    from transformers import AutoModelForCausalLM

    first = prepared_data(tmp_path / "first", 30)
    other = prepared_data(tmp_path / "other", 30, like=first)
    objective = {"name": "distill", "teacher": teacher, "top_k": TOP_K, **TERMS}
    case = Case(data=first, steps=STEPS, stages=stages(other), objective=objective, stage=3)
    theirs = AutoModelForCausalLM.from_pretrained(teacher).eval()

    def loss_of(inputs: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            said = SimpleNamespace(theirs=theirs(input_ids=inputs).logits)
        return definition(said, logits, labels, **TERMS, k=TOP_K)  # type: ignore[arg-type]

    saves = [BORDER, SAVED]
    got, micros, rests = pools(2).run(whole_and_rests, case, tmp_path, saves)[0]
    compare(got, plainly(case, other, micros, loss_of), rests, saves)
    assert {path.name for path in Path(other).glob("teacher-*.json")} == {"teacher-32.json", "teacher-64.json"}
