"""TRL's losses of the same batches, by TRL's own trainers as far as they can be asked."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from llmtrain.config.run import DataConfig
from llmtrain.data.batches import AnswerBatch, MicroBatch
from llmtrain.data.kinds.judged import Judged, partners
from llmtrain.data.manifest import SPLITS
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.loader import Dealt, batches_of
from llmtrain.data.stream.reference_and_teacher import write_reference
from llmtrain.data.stream.train_data import TrainData
from llmtrain.engine.losses.function import NEXT_TOKEN, LossFunction
from llmtrain.engine.losses.named import loss_of
from llmtrain.models.distillation import Terms, distilled_sums
from llmtrain.models.language import LanguageModel
from llmtrain.models.loss import About, HeadForm
from llmtrain.objectives.objective import Objective
from tests.helpers.preference import Plain, prepared_preferences, prepared_unpaired
from tests.helpers.training import LLAMA

with contextlib.suppress(ImportError):
    import trl
pytestmark = [pytest.mark.long, pytest.mark.needs("trl")]
LENGTH, MICRO = 192, 4
DIFFERENCE = 1e-5
"""Relative: both are fp32, theirs padded and ours packed."""


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """(policy, reference)"""
    fields = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa"))
    return made[0], made[1]


def batch_of(folder: str, models: tuple[Any, Any]) -> tuple[AnswerBatch, dict[int, float], Plain]:
    """(our first micro-batch, the reference's log-probabilities, rows)"""
    prepared = PreparedSet(folder)
    judged = prepared.kind.mismatched
    plain = Plain(models[1], folder)
    if judged:
        plain.mismatched(list(range(len(plain.rows))))
    with torch.no_grad():
        values = plain.answers(list(range(len(plain.rows))))[0].numpy()
    other = prepared.manifest.documents["validation"] * (1 + judged)
    columns: dict[Any, np.ndarray] = dict(zip(SPLITS, (values, np.zeros(other, np.float32)), strict=True))
    write_reference(prepared, "w", "fp32", columns, {})
    data = TrainData(DataConfig(path=folder, sequence_length=LENGTH, isolate_documents=True))
    data.take_reference("fp32")
    micro = next(batches_of(data.kind, data.sequence_at, MICRO, MICRO, Dealt()))
    assert isinstance(micro, AnswerBatch)
    return micro, dict(enumerate(values.tolist())), plain


def ours(hf: Any, objective: LossFunction, micro: AnswerBatch) -> float:
    model = LanguageModel(copy.deepcopy(hf), 40)

    def evaluate(micros: Any, asked: LossFunction) -> tuple[dict[str, float], int]:
        sums = sum(model(each.inputs, functools.partial(asked.sums, micro=each), each.positions) for each in micros)
        weight = sum(map(asked.weight, micros))
        return dict(zip(asked.figures, (sums / weight).tolist(), strict=True)), weight

    given: list[MicroBatch] = [micro]
    with torch.no_grad():
        if micro.mismatched is not None:
            objective.look(given, evaluate)  # type: ignore[attr-defined]
        return evaluate(given, objective)[0]["loss"]


def halves(plain: Plain, row: int) -> tuple[list[int], list[int]]:
    """(prompt, answer) of a row, as ids."""
    ids, counted = plain.rows[row]
    begin = int(counted.argmax())
    return ids[:begin].tolist(), ids[begin:].tolist()


RECORDS: dict[str, dict[str, Any]] = {
    "SFT": {"text": "hi"},
    "DPO": {"prompt": "hi", "chosen": "a", "rejected": "b"},
    "KTO": {"prompt": "hi", "completion": "a", "label": True},
    "Reward": {"chosen": "hi a", "rejected": "hi b"},
}


def trainer(kind: str, models: tuple[Any, ...], folder: str, **options: Any) -> Any:
    """TRL's own, with a model and, if there is a second one, its reference."""
    from datasets import Dataset

    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(Path(folder) / kind),
        report_to=[],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        **options,
    )
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "tokenizer")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    reference = {"ref_model": copy.deepcopy(models[1])} if len(models) > 1 else {}
    return getattr(trl, f"{kind}Trainer")(
        model=copy.deepcopy(models[0]),
        args=arguments,
        processing_class=tokenizer,
        **reference,
        train_dataset=Dataset.from_list([RECORDS[kind]] * 2),
    )


SAME: list[tuple[str, dict[str, float], dict[str, Any]]] = [
    ("dpo", {}, {"loss_type": "sigmoid"}),
    ("robust", {}, {"loss_type": "robust", "label_smoothing": 0.1}),
    ("ipo", {}, {"loss_type": "ipo"}),
    ("dpo_norm", {"beta": 5.0}, {"loss_type": "sigmoid_norm", "beta": 5.0}),
]


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [pytest.param(*each, id=each[0], marks=pytest.mark.slow if each[0] in ("robust", "ipo") else ()) for each in SAME],
)
def test_losses_over_pairs_are_those_of_trl(tmp_path: Path, models: Any, name: str, options: Any, theirs: Any) -> None:
    folder = prepared_preferences(tmp_path, 60)
    micro, _, plain = batch_of(folder, models)
    peer = trainer("DPO", models, folder, **theirs)
    examples = []
    for chosen, rejected in micro.rows.view(-1, 2).tolist():
        (prompt, answer), (_, other) = halves(plain, chosen), halves(plain, rejected)
        examples.append({"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": other})
    with torch.no_grad():
        want = peer._compute_loss(peer.model.eval(), peer.data_collator(examples), False).item()
    got = ours(models[0], loss_of(Objective.of(name, **options)), micro)
    print(f"{name}: {got:.8f} here, {want:.8f} in TRL {trl.__version__}, {len(examples)} pairs")
    assert got == pytest.approx(want, rel=DIFFERENCE)


def test_the_loss_of_conversations_is_that_of_trl(tmp_path: Path, models: Any) -> None:
    """Over the counted tokens of the same rows, which here lie packed in sequences."""
    folder = prepared_preferences(tmp_path, 60)
    micro, _, plain = batch_of(folder, models)
    peer = trainer("SFT", models[:1], folder)
    examples = []
    for ids, counted in (plain.rows[row] for row in micro.rows.tolist()):
        labels = [each if counts else -100 for each, counts in zip(ids.tolist(), counted, strict=True)]
        examples.append({"input_ids": ids.tolist(), "labels": labels})
    with torch.no_grad():
        want = peer.compute_loss(peer.model.eval(), peer.data_collator(examples)).item()
    got = ours(models[0], NEXT_TOKEN, micro)
    print(f"sft: {got:.8f} here, {want:.8f} in TRL {trl.__version__}, {len(examples)} rows")
    assert got == pytest.approx(want, rel=DIFFERENCE)


@pytest.mark.parametrize("centering", [0.0, 0.1])
def test_a_reward_models_loss_is_that_of_trl(tmp_path: Path, centering: float) -> None:
    fields = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256}
    config = AutoConfig.for_model(fields.pop("model_type"), num_labels=1, **fields)
    torch.manual_seed(1)
    made: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    made.config.architectures = [type(made).__name__]
    torch.nn.init.normal_(made.score.weight, std=0.5)
    folder = prepared_preferences(tmp_path, 60)
    stream = TrainData(DataConfig(path=folder, sequence_length=LENGTH, isolate_documents=True))
    micro = next(batches_of(stream.kind, stream.sequence_at, MICRO, MICRO, Dealt()))
    assert isinstance(micro, AnswerBatch)
    rows = Plain(None, folder).rows
    peer = trainer("Reward", (made,), folder, center_rewards_coefficient=centering or None)
    examples = [
        {"chosen_ids": rows[chosen][0].tolist(), "rejected_ids": rows[rejected][0].tolist()}
        for chosen, rejected in micro.rows.view(-1, 2).tolist()
    ]
    padding = len(
        peer.processing_class
    )  # no token of a row: transformers reads a score at the last one that is no padding
    peer.model.config.pad_token_id = peer.data_collator.pad_token_id = min(padding, made.config.vocab_size - 1)
    with torch.no_grad():
        want = peer.compute_loss(peer.model.eval(), peer.data_collator(examples)).item()
    got = ours(made, loss_of(Objective.of("reward", centering=centering)), micro)
    print(f"reward: {got:.8f} here, {want:.8f} in TRL {trl.__version__}, {len(examples)} pairs")
    assert got == pytest.approx(want, rel=DIFFERENCE)


def test_losses_without_a_reference_are_those_of_trl(tmp_path: Path, models: Any) -> None:
    """simpo, and of orpo the odds: TRL's loss of the chosen answers beside them is over their prompts, too. From the
    answers' mean log-probabilities, which the other tests compare."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    micro, _, plain = batch_of(prepared_preferences(tmp_path, 60), models)
    plain.hf = models[0]
    with torch.no_grad():
        sums, counts = plain.answers(micro.rows.tolist())
    means = (sums / counts).view(-1, 2)
    on = SimpleNamespace(device="cpu")
    cpo = SimpleNamespace(loss_type="simpo", alpha=0.0, beta=2.0, simpo_gamma=0.5, label_smoothing=0.0, accelerator=on)
    odds = SimpleNamespace(beta=0.1, accelerator=on)
    for name, want in (
        ("simpo", CPOTrainer.cpo_loss(cpo, *means.T)[0].mean()),
        ("orpo", -means[:, 0].mean() - ORPOTrainer.odds_ratio_loss(odds, *means.T)[0].mean()),
    ):
        got = ours(models[0], loss_of(Objective.of(name)), micro)
        print(f"{name}: {got:.8f} here, {want.item():.8f} in TRL {trl.__version__}")
        assert got == pytest.approx(want.item(), rel=DIFFERENCE)


def test_kto_is_that_of_trl(tmp_path: Path, models: Any) -> None:
    """Of the same prompts with the same answers to others: which ones TRL would take depends on its batches."""
    folder = prepared_unpaired(tmp_path, 60)
    micro, _, plain = batch_of(folder, models)
    assert isinstance(micro, AnswerBatch)
    peer = trainer("KTO", models, folder, desirable_weight=1.0, undesirable_weight=2.0)
    partner = partners(PreparedSet(folder).split("train").entries(Judged.entry)["prompt"])
    assert partner is not None
    examples = []
    for row, label in zip(micro.rows.tolist(), micro.facts["desirable"].tolist(), strict=True):
        prompt, answer = halves(plain, row)
        other = halves(plain, int(partner[row]))[1]
        examples.append({"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": other, "label": label})
    with torch.no_grad():
        want = peer._compute_loss(peer.model.eval(), peer.data_collator(examples), False).item()
    got = ours(models[0], loss_of(Objective.of("kto", undesirable_weight=2.0)), micro)
    print(f"kto: {got:.8f} here, {want:.8f} in TRL {trl.__version__}, {len(examples)} answers")
    assert got == pytest.approx(want, rel=DIFFERENCE)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_is_that_of_trl(beta: float) -> None:
    """Of TRL's GKD, whose loss has no temperature^2; value and gradient."""
    from trl.experimental.gkd import GKDTrainer

    draw = torch.Generator().manual_seed(0)
    logits, theirs = (torch.randn(1, 40, 64, generator=draw) for _ in range(2))
    labels = torch.where(torch.rand(1, 40, generator=draw) < 0.4, -100, 7)
    ours, trls = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    sums = distilled_sums(
        ours,
        torch.eye(64),
        None,
        labels,
        About(80, HeadForm()),
        teacher=lambda rows: theirs[0, rows].clone(),
        terms=Terms(beta=beta, temperature=2.0, alpha=0.0),
    )
    loss = sums[0] / int((labels != -100).sum()) / 4
    want = GKDTrainer.generalized_jsd_loss(trls, theirs, labels, beta=beta, temperature=2.0)
    print(f"beta {beta}: {loss.item():.7f} here, {want.item():.7f} TRL")
    assert loss.item() == pytest.approx(want.item(), rel=DIFFERENCE)
    loss.backward()
    want.backward()
    assert ours.grad is not None and trls.grad is not None
    assert torch.allclose(ours.grad, trls.grad, rtol=1e-4, atol=1e-7)
