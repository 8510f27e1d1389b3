"""train.epochs: the length of a run in passes over its data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from llmtrain import cli
from llmtrain.base.errors import ConfigError
from llmtrain.config.load import load
from llmtrain.data.stream.epoch import sequences_of_epoch
from tests.helpers.config_workplace import write


def length(here: Path, **train: Any) -> int | None:
    write(here, {"train": {"max_steps": None, **train}})
    return load(["run.yaml"], 2, epoch=sequences_of_epoch).max_steps


def test_an_epoch_is_every_sequence_of_the_data_once(here: Path) -> None:
    """2,000 tokens are 15 sequences of 128 and their last label; a step takes 8 of them."""
    sequences = (2_000 - 1) // 128
    assert [length(here, epochs=epochs) for epochs in (1, 3, 0.5, 1.6)] == [
        math.ceil(epochs * sequences / 8) for epochs in (1, 3, 0.5, 1.6)
    ]
    assert length(here, epochs=3, max_steps=2) == 2 and length(here, epochs=1, max_steps=20) == 2
    assert length(here, epochs=3, max_tokens=8 * 128 * 4) == 4


def test_the_schedule_must_fit_into_the_epochs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, {"train": {"max_steps": None, "epochs": 2}, "schedule": {"warmup_steps": 4}})
    assert cli.main(["config", "check", "run.yaml", "--world-size", "2"]) == 2
    told = capsys.readouterr().err
    assert "schedule.warmup_steps = 4 with train.epochs = 2.0  (run.yaml, line" in told
    assert "4 steps" in told and "train.epochs to more than 2" in told


@pytest.mark.parametrize("epochs", [0, -1, 1e9])
def test_other_numbers_are_told(here: Path, epochs: float) -> None:
    with pytest.raises(ConfigError) as refused:
        length(here, epochs=epochs)
    assert refused.value.keys == {"train.epochs"}
