"""A reward model against its definition in plain PyTorch: ZeRO 0 to 3, tensor parallelism, pipelines, whole and beside
an adapter; resume.

Both sides are fp32: 1e-5 is a few roundings of a loss near 1 after four steps; of a parameter 1/50 of the rate: AdamW
makes a whole step of a gradient that is all rounding.
"""

from __future__ import annotations

import json
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
from llmtrain.config.run import AdapterConfig, ModelConfig
from llmtrain.data.stream.train_data import TrainData
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.objective import Objective
from tests.helpers.answers import Figures, answers_case, plain_steps, trained_answers
from tests.helpers.families import FAMILIES
from tests.helpers.preference import Plain, prepared_preferences
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    case_data,
    largest_difference,
)

pytestmark = pytest.mark.needs("peft")

MIXTURE = {**FAMILIES["mixtral"], "vocab_size": LLAMA["vocab_size"], "max_position_embeddings": 256}
ADAPTER = {"r": 4, "alpha": 8.0, "targets": ["all-linear"]}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared_preferences(tmp_path_factory.mktemp("pairs"))


def case_of(pairs: str, **form: Any) -> Case:
    return answers_case(pairs, **{"lr": 1e-3, "objective": {"name": "reward"}, **form})


def plainly(case: Case) -> tuple[Trace, Figures]:
    """One process, each row alone through transformers' own class, which reads the score at its last token."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoConfig, AutoModelForSequenceClassification

    fields = dict(case.model)
    hf: Any = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(fields.pop("model_type"), num_labels=1, **fields)
    )
    adapter = AdapterConfig(**case.adapter)
    spec = ModelSpec.of(ModelConfig(config=dict(case.model)), adapter, scores=True)
    source = spec.initial_weights(0, torch.device("cpu"))
    if adapter.r is not None:
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=r".*layers.*_proj", init_lora_weights=False)
        hf = inject_adapter_in_model(lora, hf, low_cpu_mem_usage=False)
        hf.score.requires_grad_()  # of all that is no adapter, injection makes constants
    plain_of = {n: n.replace(".base_layer.", ".").replace(".default", "") for n, _ in hf.named_parameters()}
    with torch.no_grad():
        for name, value in hf.named_parameters():
            value.copy_(source.read(plain_of[name], 0, value.numel()).view_as(value))
    rows, figures = Plain(hf, case.data).rows, []

    def loss_of(taken: list[int]) -> torch.Tensor:
        scores = []
        for row in taken:
            ids, counted = rows[row]
            upto = int(counted.nonzero()[0][-1]) + 1
            scores.append(hf(input_ids=torch.from_numpy(ids[None, :upto]), use_cache=False).logits[0, 0])
        both = torch.stack(scores).view(-1, 2)
        w, x = both.detach().T
        figures.append({"pairs/margin": float((w - x).mean()), "pairs/accuracy": float((w > x).float().mean()),
                        "pairs/chosen_reward": float(w.mean()), "pairs/rejected_reward": float(x.mean())})  # fmt: skip
        w, x = both.T
        return (-F.logsigmoid(w - x) + case.objective.get("centering", 0.0) * (w + x) ** 2).mean()

    trace = Trace(plain_steps(case, hf, loss_of), [])
    trace.parameters = {plain_of[name]: p.detach().clone() for name, p in hf.named_parameters() if p.requires_grad}
    return trace, figures


def trained(case: Case, folder: str, resumes: bool = False) -> tuple[Trace, Figures]:
    config = read_saved(Objective, case.objective or {"name": "next_token"})
    return trained_answers(case, config, TrainData(case_data(case)), folder, resumes=resumes)


def test_a_reward_model_is_its_definition_under_zero_3(pools, pairs, tmp_path):
    """And resumes bit for bit; figures are those of the global batch."""
    case = case_of(
        pairs, stage=3, accumulation=2, extra={"activation_checkpointing": {}},
        objective={"name": "reward", "centering": 0.1},
    )  # fmt: skip
    want, expected = plainly(case)
    first = ModelSpec.of(ModelConfig(config=dict(case.model)), scores=True).initial_weights(0, torch.device("cpu"))
    score = want.parameters["score.weight"].flatten()
    moved = score - first.read("score.weight", 0, len(score)).detach()
    assert float(moved.abs().max()) > case.lr  # beside an adapter, too
    whole = pools(2).run(trained, case, str(tmp_path))
    again = pools(2).run(trained, case, str(tmp_path), True)
    for (got, figures), (resumed, _) in zip(whole, again, strict=True):
        assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 1e-5
        assert set(want.parameters) <= set(got.parameters)
        own = {name: got.parameters[name] for name in want.parameters}
        assert largest_difference(own, want.parameters) < case.lr / 50
        for have, wanted in zip(figures, expected, strict=True):
            assert all(math.isclose(have[key], value, abs_tol=2e-5) for key, value in wanted.items())
        assert resumed.losses == got.losses[2:]
        assert all(torch.equal(resumed.parameters[name], value) for name, value in got.parameters.items())
    check_exports(next(tmp_path.glob("step-*")), tmp_path, adapted=bool(case.adapter))


def check_exports(checkpoint: Path, folder: Path, *, adapted: bool) -> None:
    """transformers and peft load them; scores of a few tokens are those of the other form."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    whole = export_hf(checkpoint, folder / "whole", merge=adapted)
    assert any(" x 1 logits agree" in line for line in whole.lines), whole.lines
    hf: Any = AutoModelForSequenceClassification.from_pretrained(folder / "whole", dtype=torch.float32)
    assert hf.config.architectures == [type(hf).__name__] and hf.config.num_labels == 1
    score = CheckpointReader(checkpoint).read("score.weight", 0, hf.config.hidden_size)
    assert torch.equal(hf.score.weight.detach().flatten(), score)
    with pytest.raises(CheckpointError, match="of 9999 elements asked of param of score"):
        CheckpointReader(checkpoint).read("score.weight", 0, 9999)
    if not adapted:
        return
    report = export_hf(checkpoint, folder / "peft")
    assert any(line.startswith("adapter") for line in report.lines), report.lines
    config = json.loads((folder / "peft/adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    base = AutoModelForSequenceClassification.from_config(hf.config, dtype=torch.float32)
    own, reader = {}, CheckpointReader(checkpoint)
    for name, value in base.named_parameters():
        own[name] = reader.read(name, 0, value.numel()).view_as(value).clone()
    own["score.weight"].zero_()  # what the folder holds takes its place
    base.load_state_dict(own)
    peft, ids = PeftModel.from_pretrained(base, str(folder / "peft")), torch.arange(3, 40)[None]
    with torch.no_grad():
        ours, theirs = hf.eval()(input_ids=ids).logits, peft.eval()(input_ids=ids).logits
    assert float((ours - theirs).abs()) < 1e-5 < float(ours.abs())
