"""Multiple choice in the engine: the log-probabilities, answers and figures of plain PyTorch under every form."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmtrain.config.stages import Stages
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.choices import ChoiceSet
from llmtrain.training.reporting import choice_log_probs
from tests.helpers.answers import SMALL, answers_case
from tests.helpers.families import FAMILIES
from tests.helpers.preference import prepared_preferences
from tests.helpers.questions import prepared_choices, questions
from tests.helpers.training import LLAMA, Case, make_setup, plain_model

LENGTH = 64
"""Shorter than the longest rows: those lose their beginning."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(what a run trains on, questions)"""
    place = tmp_path_factory.mktemp("choices")
    pairs = prepared_preferences(place, 60)
    return pairs, prepared_choices(place, Path(pairs) / "tokenizer", questions())


@functools.cache
def plainly(folder: str, mixture: bool) -> np.ndarray:
    """Each row alone, by torch: fp64 [rows]."""
    case = answers_case(folder, **({"model": MIXTURE} if mixture else {}))
    hf: Any = plain_model(case).eval()
    stream = PreparedSet(folder).split("validation")
    found, at = [], 0
    for length in stream.row_lengths().tolist():
        ids = torch.from_numpy(stream.read(at, length).astype(np.int64))
        counted = torch.from_numpy(stream.counted(at, length))[1:][-LENGTH:]
        with torch.no_grad():
            logits = hf(ids[-LENGTH - 1 : -1][None]).logits[0].double()
        nll = F.cross_entropy(logits, ids[1:][-LENGTH:], reduction="none")
        found.append(-float(nll[counted].sum()))
        at += length
    return np.array(found)


def scored(case: Case, folder: str) -> tuple[np.ndarray, dict[str, float], list[list[int]]]:
    """As a run's evaluation does it."""
    setup = make_setup(case)
    (stage,) = setup.run.stages
    stages = Stages((replace(stage, batch=replace(stage.batch, sequence_length=LENGTH)),))
    setup.run = replace(setup.run, stages=stages)
    choices = ChoiceSet(folder, sequence_length=LENGTH, shared=setup.mesh.degrees.sequence)
    log_probs = choice_log_probs(setup, choices)
    setup.engine.close()
    return log_probs, choices.figures(log_probs), [each.tolist() for each in choices.chosen(log_probs)]


def defined(log_probs: np.ndarray) -> tuple[list[list[int]], dict[str, float]]:
    """Answers and figures from the records themselves."""
    best, normalised, right, bits, size, at = [], [], [0, 0], 0.0, 0, 0
    records = questions()
    for record in records:
        own = log_probs[at : at + len(record["choices"])]
        at += len(own)
        best.append(int(np.argmax(own)))
        normalised.append(int(np.argmax(own / [len(choice) for choice in record["choices"]])))
        right[0] += best[-1] == record["answer"]
        right[1] += normalised[-1] == record["answer"]
        bits -= own[record["answer"]] / math.log(2)
        size += len(record["choices"][record["answer"]].encode())
    accuracy, accuracy_norm = (count / len(records) for count in right)
    return [best, normalised], {"accuracy": accuracy, "accuracy_norm": accuracy_norm, "bits_per_byte": bits / size}


MIXTURE = {**FAMILIES["mixtral"], "vocab_size": LLAMA["vocab_size"], "max_position_embeddings": 256}
FORMS: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 1, "pipeline": 2, "accumulation": 2},
    {"stage": 1, "tensor": 2},
    {"stage": 3, "sequence": 2},
    {"stage": 2, "expert": 2, "model": MIXTURE},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(f"{k}{v}" for k, v in form.items() if k != "model"))
def test_choices_are_scored_as_one_process_does(pools: Any, folders: tuple[str, str], form: dict[str, Any]) -> None:
    """fp32: a few roundings of sums of up to 80 nats, and of figures near 1."""
    pairs, folder = folders
    want = plainly(folder, "model" in form)
    answers, figures = defined(want)
    for log_probs, got, chosen in pools(2).run(scored, answers_case(pairs, **form), folder):
        assert np.allclose(log_probs, want, rtol=1e-6, atol=0), np.abs(log_probs / want - 1).max()
        assert chosen == answers
        assert got == pytest.approx(figures, abs=1e-5)
    assert 0 < figures["accuracy"] < 1 and answers[0] != answers[1]
    assert SMALL["num_hidden_layers"] == 2
