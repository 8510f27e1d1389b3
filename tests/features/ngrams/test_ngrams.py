"""The losses of a unigram and a bigram model against a naive count, and which runs have them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmtrain.config.run import RunConfig, TrainConfig
from llmtrain.data.sequences import IGNORED
from llmtrain.data.stream.train_data import TrainData
from llmtrain.features import asked
from llmtrain.features.ngrams import counting
from llmtrain.features.ngrams.counting import ngram_baselines
from llmtrain.objectives.objective import Objective


def naive_bigram(data: TrainData, sequences: int) -> tuple[float, float]:
    """The same model family with dicts, without numpy."""
    train: list[tuple[int, int]] = []
    for stream in data.streams("train"):
        tokens = stream.read(0, stream.tokens).tolist()
        train += [(p, t) for p, t in pairwise(tokens) if p != 0]
    test = []
    for i in range(min(sequences, data.validation_sequences)):
        inputs, labels = data.validation_sequence(i)
        test += [(p, t) for p, t in zip(inputs.tolist(), labels.tolist(), strict=True) if t != -100]
    unigram, pairs = Counter(t for _, t in train), Counter(train)
    context = Counter(p for p, _ in train)
    followers = Counter(p for p, _ in pairs)

    def p_unigram(t: int, k: float) -> float:
        return (unigram[t] + k) / (len(train) + k * data.vocab_size)

    losses = {k: -sum(math.log(p_unigram(t, k)) for _, t in test) / len(test) for k in counting._ADD_K}
    k = min(losses, key=losses.__getitem__)

    def p_bigram(p: int, t: int, d: float, a: float) -> float:
        return (max(pairs[p, t] - d, 0) + (a + d * followers[p]) * p_unigram(t, k)) / (context[p] + a)

    assert sum(p_bigram(3, t, 0.7, 3.0) for t in range(data.vocab_size)) == pytest.approx(1)  # a distribution
    bigram = min(
        -sum(math.log(p_bigram(p, t, d, a)) for p, t in test) / len(test)
        for d in counting._DISCOUNTS
        for a in counting._CONCENTRATIONS
    )
    return losses[k], bigram


def test_baselines_equal_a_naive_count(data: TrainData) -> None:
    assert ngram_baselines(data, sequences=6) == pytest.approx(naive_bigram(data, 6), rel=1e-12)


def test_baselines_are_counted_once_for_the_same_data(
    data: TrainData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[dict[str, Any]] = []
    tracker = cast(Any, SimpleNamespace(event=lambda kind, **more: events.append(more)))
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(counting, "_VALIDATION_TOKENS", 6 * data.sequence_length)
    counting.tell(data, tracker)
    counted = sum(int((data.validation_sequence(index)[1] != IGNORED).sum()) for index in range(6))
    assert events[0]["validation_tokens"] == counted < 6 * data.sequence_length
    (kept,) = (tmp_path / "baselines").iterdir()
    with monkeypatch.context() as without:
        without.setattr(counting, "ngram_baselines", None)
        counting.tell(data, tracker)
    kept.write_text('{"unigram_loss": 1')  # damaged: counted again
    counting.tell(data, tracker)
    assert events[0] == events[1] == events[2] and kept.read_text().endswith("}")


@pytest.mark.parametrize(
    ("objective", "evaluates", "has"), [("next_token", True, True), ("next_token", False, False), ("dpo", True, False)]
)
def test_a_run_with_a_validation_loss_of_the_next_token_has_them(objective: str, evaluates: bool, has: bool) -> None:
    config = RunConfig(deepspeed="", train=TrainConfig(eval=evaluates), objective=Objective.of(objective))
    assert ("ngrams" in [feature.name for feature in asked(config)]) == has
