"""Checkpoints that DeepSpeed made of models with tensors that do not train: imported with the values that they had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch

from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.cli import main
from tests.helpers.deepspeed_peers import adamw, plain_steps
from tests.helpers.families import FROZEN
from tests.helpers.training import Case, joined, resolved_run


def saved(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """transformers' model in DeepSpeed's engine, as a user has it: two steps and a save. The biases, none zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = dict(case.model)
    torch.manual_seed(1)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    biases = {name: value for name, value in hf.state_dict().items() if name.endswith("correction_bias")}
    for value in biases.values():
        value.copy_(torch.randn(value.shape) * 0.3)
    biases = {name: value.clone() for name, value in biases.items()}
    ranks = joined()
    config = resolved_run(case, ranks.world_size).deepspeed
    engine, *_ = deepspeed.initialize(model=hf, optimizer=adamw(hf, case), config=config)
    plain_steps(engine, case, ranks, 0, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    return biases


def test_from_deepspeed_takes_what_does_not_train(pools, small_data, tmp_path: Path, capsys) -> None:
    case = Case(data=small_data, stage=3, model=FROZEN["ernie4_5_moe"], clip=0.0, attention="eager")
    want = pools(2).run(saved, case, str(tmp_path / "theirs"))[0]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(case.model))
    command = ["checkpoint", "from-deepspeed", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--model", str(config)]
    assert main(command) == 0, capsys.readouterr()
    (path,) = (tmp_path / "ours" / "checkpoints").iterdir()
    reader = CheckpointReader(path)
    assert len(want) == 3
    for name, value in want.items():
        assert torch.equal(reader.read(name, 0, value.numel()), value.reshape(-1)), name
    assert main(["checkpoint", "to-deepspeed-universal", str(path), str(tmp_path / "universal")]) == 2
    assert "frozen" in capsys.readouterr().err and not (tmp_path / "universal").exists()
