"""Named sets and bits per byte, in every form: equal to transformers in one process."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmtrain.config.run import DataConfig, EvalConfig, ModelConfig
from llmtrain.config.stages import Stages
from llmtrain.data.sequences import IGNORED
from llmtrain.data.stream.train_data import EvalSet, TrainData
from llmtrain.models.spec import ModelSpec
from llmtrain.training.step import Position
from tests.helpers.training import LENGTH, LLAMA, Case, examined, joined, resolved_run

MICRO_BATCH = 2


class _Tracker:
    """Keeps what a run's tracker is given."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}

    def log(self, row: dict[str, Any], *, more: bool = False) -> None:
        self.row = row


def measured(case: Case, folder: str) -> dict[str, Any]:
    """Figures of the initial weights, as one evaluation of a run gives them on this rank."""
    from llmtrain.training.reporting import Evaluation, throughput_of
    from llmtrain.training.setup import Setup

    ranks = joined()
    run = resolved_run(case, ranks.world_size)
    train = replace(run.config.train, eval_sequences=5)
    evaluated = EvalConfig(sets={"all": folder}, sequences={"all": 7}, mean={"all": 2.0})
    config = replace(run.config, eval=evaluated, train=train)
    (stage,) = run.stages
    stages = Stages((replace(stage, batch=replace(stage.batch, micro_batch=MICRO_BATCH)),))
    run, spec, data = examined(replace(run, config=config, stages=stages))
    sets = {name: EvalSet(path, config.data) for name, path in config.eval.sets.items()}
    setup = Setup(run, spec, replace(data, sets=sets), ranks)
    setup.write()
    tracker = _Tracker()
    launch: Any = SimpleNamespace(
        setup=setup,
        tracker=tracker,
        speed=throughput_of(setup),
        folder=SimpleNamespace(path=Path()),
        start=SimpleNamespace(position=Position()),
        parts=[],
    )
    evaluation = Evaluation(launch)
    figures = evaluation.evaluate(Position(step=3))
    assert tracker.row == {"step": 3, **figures}
    setup.engine.close()
    return figures


@functools.cache
def _plain(folder: str, isolate: bool) -> dict[str, float]:
    """The same by transformers' own model, in one process."""
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(LLAMA)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    source = ModelSpec.of(ModelConfig(config=dict(LLAMA))).initial_weights(0, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json")
    data = TrainData(DataConfig(path=folder, sequence_length=LENGTH, isolate_documents=isolate))
    figures: dict[str, float] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name, 0, parameter.numel()).view_as(parameter))
        for prefix, sequences in (("eval", 5), ("eval/all", 7)):
            nats, text = [], b""
            for sequence in map(data.validation_sequence_at, range(sequences)):
                ids, labels = torch.from_numpy(sequence.inputs)[None], torch.from_numpy(sequence.labels)
                positions = None if sequence.positions is None else torch.from_numpy(sequence.positions)[None]
                logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
                nats.append(F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)[labels != IGNORED])
                # This tokenizer's text is ASCII: a token decodes to its own bytes.
                text += b"".join(tokenizer.decode([int(i)]).encode() for i in labels[labels != IGNORED])
            loss = torch.cat(nats).double()
            figures |= {
                f"{prefix}/loss": float(loss.mean()),
                f"{prefix}/perplexity": math.exp(loss.mean()),
                f"{prefix}/bits_per_byte": float(loss.sum()) / math.log(2) / len(text),
            }
    return figures | {"eval/mean/loss": figures["eval/all/loss"]}


@pytest.mark.parametrize(
    ("ranks", "form"),
    [
        (1, {"stage": 0}),
        (2, {"stage": 3}),
        (2, {"stage": 1, "pipeline": 2}),
        (2, {"stage": 1, "tensor": 2}),
        (2, {"stage": 2, "sequence": 2}),
        (2, {"stage": 3, "isolate_documents": True}),
    ],
    ids=lambda form: "-".join(f"{key}-{value}" for key, value in form.items()) if isinstance(form, dict) else str(form),
)
def test_sets_and_bytes_are_those_of_one_process(pools: Any, small_data: str, ranks: int, form: dict[str, Any]) -> None:
    isolate = form.get("isolate_documents", False)
    want = _plain(small_data, isolate)
    for figures in pools(ranks).run(measured, Case(data=small_data, **form), small_data):
        assert figures == pytest.approx(want, rel=1e-5)
