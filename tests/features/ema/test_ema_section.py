"""What the section `ema` asks for: rules, figures, the plan's bytes, and the settings of a proof."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmtrain.base.errors import ConfigError
from llmtrain.base.rank.heartbeat import heart
from llmtrain.config.load import parse
from llmtrain.config.resolve import resolve
from llmtrain.config.run import RunConfig
from llmtrain.features import shortened
from llmtrain.features.ema import EmaConfig
from llmtrain.training.out_of_memory import explain
from tests.unit.plan.test_plan import folder, plan

__all__ = ["folder"]


def test_a_figure_of_the_averages_may_decide(folder: Path) -> None:
    words = ["run.yaml", "--train.eval_every", "4", "--checkpoint.keep_best.metric", "eval/ema/loss"]
    run = parse([*words, "--ema.decay", "0.9"], check_paths=False).config
    assert run.checkpoint.keep_best.metric == "eval/ema/loss"
    with pytest.raises(ConfigError, match="is no figure of this run's evaluations"):
        parse(words, check_paths=False)
    with pytest.raises(ConfigError, match="is the name of other figures"):
        parse(["run.yaml", "--eval.sets.ema", "not/prepared/yet"], check_paths=False)


def test_a_decay_of_1_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)ema\.decay = 1\.0.*just under 1.*0\.999 is common"):
        parse(["run.yaml", "--ema.decay", "1.0"], check_paths=False)


def test_a_proof_follows_steps_that_it_has() -> None:
    run = RunConfig(deepspeed="ds.json", ema=EmaConfig(decay=0.9, every=100))
    assert shortened(run, 20)["ema"] == EmaConfig(decay=0.75, every=2)
    assert shortened(RunConfig(deepspeed="ds.json"), 20)["ema"] == EmaConfig()


def test_a_plan_and_the_words_about_memory_that_ran_out_name_the_means(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    [kind] = plan(capsys, "--device cpu --ema.decay=0.9")["kinds"]
    assert "ema" in kind["rehearsed"]["highest"]
    run = resolve(parse(["run.yaml", "--ema.decay=0.9"], check_paths=False).config, 1)
    monkeypatch.setattr(heart, "in_phase", lambda: "step")
    said = explain(MemoryError(), run, torch.device("cpu"))
    assert "memory ran out in the phase 'step'" in said and ", ema 832 KiB" in said, said
