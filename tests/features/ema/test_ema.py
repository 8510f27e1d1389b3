"""`ema` from the command line: figures, a resume, the export, and the mean of a run's last checkpoints."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmtrain import cli
from llmtrain.checkpoint.format import step_folder
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.features.ema.part import EMA
from tests.helpers import forked
from tests.helpers.launching import rows, write_recipe
from tests.ranks.test_damage import flip

EXPORTED = ("--weights", "ema")


def train_first(words: list[str], rank: int) -> None:
    os.environ["MASTER_PORT"] = "0"  # as in a process that no launcher has started
    assert cli.main(["train", *words, "--train.max_steps", "2"]) == 0
    flip(step_folder(Path(words[0]).parent / "run/checkpoints", 2), EMA, "model.norm.weight", 7)


def test_a_run_with_a_moving_average(small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is resumed has the figures of one of 4 steps, and `--weights ema` exports its mean. A flipped bit in the
    newest mean ended the resume for ever, with an older checkpoint that was whole."""
    figures = {}
    for run in ("once", "twice"):
        (tmp_path / run).mkdir()
        words = [
            str(write_recipe(tmp_path / run, small_data)),
            "--ema.decay",
            "0.5",
            "--schedule.name",
            "constant",
            "--objective.z_loss",
            "1e-4",
            "--train.eval_every",
            "1",
            "--checkpoint.every_steps",
            "1",
            "--train.export",
            "false",
        ]
        first = functools.partial(train_first, words) if run == "twice" else None
        code, output = forked.finish(Path(words[0]), *words[1:], "--train.max_steps", "4", world_size=1, before=first)
        assert code == 0 and "ema: a mean of the parameters" in output, output
        assert (run == "twice") == ("outer.ema of model.norm.weight" in output), output
        figures[run] = {
            row["step"]: (row["eval/loss"], row["eval/ema/loss"])
            for row in rows(tmp_path / run / "run")
            if "eval/ema/loss" in row
        }
    assert figures["once"] == figures["twice"] and len(figures["once"]) == 4
    told = [(key, value) for row in rows(tmp_path / "once/run") for key, value in row.items() if "z_loss" in key]
    assert {key for key, _ in told} == {"z_loss", "eval/z_loss", "eval/ema/z_loss"}
    assert all(abs(value - math.log(512) ** 2) < 2 for _, value in told), told  # 512 words, alike before training
    assert all(own != mean for own, mean in figures["once"].values())
    folder = tmp_path / "once/run"
    assert cli.main(["checkpoint", "to-hf", str(folder), str(tmp_path / "mean"), *EXPORTED, "--dtype", "fp32"]) == 0
    assert " ema " in capsys.readouterr().out
    exported = load_file(tmp_path / "mean/model.safetensors")
    with contextlib.closing(CheckpointReader(step_folder(folder / "checkpoints", 4))) as reader:
        name, values = next(iter(exported.items()))
        assert torch.equal(reader.read_kind(EMA, name, 0, values.numel()), values.reshape(-1))
        assert not torch.equal(reader.read(name, 0, values.numel()), values.reshape(-1))
    assert cli.main(["checkpoint", "average", "--last", "2", str(folder), str(tmp_path / "average")]) == 0
    assert "mean of 2" in capsys.readouterr().out
    assert cli.main(["checkpoint", "to-hf", str(tmp_path / "average"), str(tmp_path / "no"), *EXPORTED]) == 2
    assert "--weights ema" in capsys.readouterr().err
    assert cli.main(["checkpoint", "to-hf", str(folder), str(tmp_path / "no"), "--weights", "mean"]) == 2
    assert re.search(r"--weights mean.*\bema\b", capsys.readouterr().err)
    assert cli.main(["checkpoint", "average", "--last", "3", str(folder), str(tmp_path / "more")]) == 2
    assert "(checkpoint.keep)" in capsys.readouterr().err
