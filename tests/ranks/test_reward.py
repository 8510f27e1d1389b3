"""A reward model against its definition in plain PyTorch, with transformers' own class; its resume and its export.

Both sides are fp32: 1e-5 is a few roundings of a loss near 1 after four steps; of a parameter 1/50 of the rate: AdamW
makes a whole step of a gradient that is all rounding.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.config.reader import read_saved
from llmtrain.config.run import ModelConfig
from llmtrain.data.stream.train_data import TrainData
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.objective import Objective
from tests.helpers.answers import Figures, answers_case, plain_steps, trained_answers
from tests.helpers.preference import Plain, prepared_preferences
from tests.helpers.training import (
    Case,
    Trace,
    case_data,
    largest_difference,
)

pytestmark = pytest.mark.needs("peft")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared_preferences(tmp_path_factory.mktemp("pairs"))


def case_of(pairs: str, **form: Any) -> Case:
    return answers_case(pairs, **{"lr": 1e-3, "objective": {"name": "reward"}, **form})


def plainly(case: Case) -> tuple[Trace, Figures]:
    """One process, each row alone through transformers' own class, which reads the score at its last token."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    fields = dict(case.model)
    hf: Any = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(fields.pop("model_type"), num_labels=1, **fields)
    )
    source = first_weights(case)
    with torch.no_grad():
        for name, value in hf.named_parameters():
            value.copy_(source.read(name, 0, value.numel()).view_as(value))
    rows, figures = Plain(hf, case.data).rows, []

    def loss_of(taken: list[int]) -> torch.Tensor:
        scores = []
        for row in taken:
            ids, counted = rows[row]
            upto = int(counted.nonzero()[0][-1]) + 1
            scores.append(hf(input_ids=torch.from_numpy(ids[None, :upto]), use_cache=False).logits[0, 0])
        both = torch.stack(scores).view(-1, 2)
        w, x = both.detach().T
        figures.append(
            {
                "pairs/margin": float((w - x).mean()),
                "pairs/accuracy": float((w > x).float().mean()),
                "pairs/chosen_reward": float(w.mean()),
                "pairs/rejected_reward": float(x.mean()),
            }
        )
        w, x = both.T
        return (-F.logsigmoid(w - x) + case.objective.get("centering", 0.0) * (w + x) ** 2).mean()

    trace = Trace(plain_steps(case, hf, loss_of), [])
    trace.parameters = {name: p.detach().clone() for name, p in hf.named_parameters()}
    return trace, figures


def first_weights(case: Case) -> Any:
    spec = ModelSpec.of(ModelConfig(config=dict(case.model)), scores=True)
    return spec.initial_weights(0, torch.device("cpu"))


def trained(case: Case, folder: str, resumes: bool = False) -> tuple[Trace, Figures]:
    config = read_saved(Objective, case.objective or {"name": "next_token"})
    return trained_answers(case, config, TrainData(case_data(case)), folder, resumes=resumes)


def test_a_reward_model_is_its_definition_under_zero_3(pools, pairs, tmp_path):
    """And resumes bit for bit; figures are those of the global batch."""
    case = case_of(
        pairs,
        stage=3,
        accumulation=2,
        extra={"activation_checkpointing": {}},
        objective={"name": "reward", "centering": 0.1},
    )
    want, expected = plainly(case)
    score = want.parameters["score.weight"].flatten()
    moved = score - first_weights(case).read("score.weight", 0, len(score)).detach()
    assert float(moved.abs().max()) > case.lr
    whole = pools(2).run(trained, case, str(tmp_path))
    again = pools(2).run(trained, case, str(tmp_path), True)
    for (got, figures), (resumed, _) in zip(whole, again, strict=True):
        assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 1e-5
        assert largest_difference(got.parameters, want.parameters) < case.lr / 50
        for have, wanted in zip(figures, expected, strict=True):
            assert all(math.isclose(have[key], value, abs_tol=2e-5) for key, value in wanted.items())
        assert resumed.losses == got.losses[2:]
        assert all(torch.equal(resumed.parameters[name], value) for name, value in got.parameters.items())
    is_exported(next(tmp_path.glob("step-*")), tmp_path / "hf")


def is_exported(checkpoint: Path, folder: Path) -> None:
    """As transformers loads it."""
    from transformers import AutoModelForSequenceClassification

    report = export_hf(checkpoint, folder)
    assert any(" x 1 logits agree" in line for line in report.lines), report.lines
    hf: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert hf.config.architectures == [type(hf).__name__] and hf.config.num_labels == 1
    score = CheckpointReader(checkpoint).read("score.weight", 0, hf.config.hidden_size)
    assert torch.equal(hf.score.weight.detach().flatten(), score)
    with pytest.raises(CheckpointError, match=r"9999.*score\.weight"):
        CheckpointReader(checkpoint).read("score.weight", 0, 9999)
