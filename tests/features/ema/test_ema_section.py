"""What the section `ema` asks for: rules, figures, the plan's bytes, and the settings of a proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.config.load import parse
from llmtrain.config.run import RunConfig
from llmtrain.features import shortened
from llmtrain.features.ema import EmaConfig

RUN = """\
deepspeed: ds.json
model: {config: {model_type: llama, vocab_size: 512, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4}}
data: {path: not/prepared/yet, sequence_length: 64}
optim: {name: adamw, lr: 1.0e-3}
train: {micro_batch: 4, max_steps: 10}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("ds.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    return tmp_path


def test_a_figure_of_the_averages_may_decide(folder: Path) -> None:
    words = ["run.yaml", "--train.eval_every", "4", "--checkpoint.keep_best.metric", "eval/ema/loss"]
    run = parse([*words, "--ema.decay", "0.9"], check_paths=False).config
    assert run.checkpoint.keep_best.metric == "eval/ema/loss"
    with pytest.raises(ConfigError, match=r'checkpoint\.keep_best\.metric = "eval/ema/loss"'):
        parse(words, check_paths=False)
    with pytest.raises(ConfigError, match=r"eval\.sets\.ema = "):
        parse(["run.yaml", "--eval.sets.ema", "not/prepared/yet"], check_paths=False)


def test_a_decay_of_1_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)ema\.decay = 1\.0.*0\.999"):
        parse(["run.yaml", "--ema.decay", "1.0"], check_paths=False)


def test_a_proof_follows_steps_that_it_has() -> None:
    run = RunConfig(deepspeed="ds.json", ema=EmaConfig(decay=0.9, every=100))
    assert shortened(run, 20)["ema"] == EmaConfig(decay=0.75, every=2)
    assert shortened(RunConfig(deepspeed="ds.json"), 20)["ema"] == EmaConfig()
