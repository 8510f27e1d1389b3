"""Runs with torch_autocast, by the commands: a column of another precision is refused, and a resume is exact.

More than 20 CPU s: a column, and three launches of two ranks.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import equal

from llmtrain import cli
from tests.helpers import forked
from tests.helpers.hf_folders import model_folder
from tests.helpers.launching import TINY, losses, resumed, write_run
from tests.helpers.preference import prepared_preferences

ARITHMETIC = "fp32 with products in bf16 (torch.autocast)"
STEPS = 4


def test_preferences_under_autocast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    answers = prepared_preferences(tmp_path, 40)
    fields = {key: value for key, value in TINY.items() if key != "model_type"}
    model_folder(tmp_path / "base", AutoModelForCausalLM.from_config(LlamaConfig(**fields)))
    shutil.copy(Path(answers) / "tokenizer/tokenizer.json", tmp_path / "base")

    def recipe(name: str, json: dict[str, Any]) -> Path:
        train = {"global_batch": 8, "micro_batch": 2, "max_steps": STEPS, "export": True}
        sections = {"objective": {"name": "dpo"}, "model": {"pretrained": str(tmp_path / "base")}}
        data = {
            "data": {"path": answers, "sequence_length": 192, "isolate_documents": True},
            "checkpoint": {"every_steps": 2},
        }
        return write_run(
            tmp_path / name, answers, json | {"zero_optimization": {"stage": 2}}, train, **sections, **data
        )

    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    whole, half = recipe("whole", autocast), recipe("half", autocast)
    assert cli.main(["reference", str(whole)]) == 0
    capsys.readouterr()
    code, output = forked.finish(recipe("bf16", {"bf16": {"enabled": True}}))
    assert code == 2 and re.search(f"{re.escape(ARITHMETIC)}, .* bf16", output), output

    assert f", {ARITHMETIC}, ZeRO 2, " in forked.train(whole)
    forked.train(half, "--train.max_steps", "2")
    forked.train(half)
    assert resumed(tmp_path / "half/run") == [2]
    runs = tmp_path / "whole/run", tmp_path / "half/run"
    assert losses(runs[0]) == losses(runs[1]) and len(losses(runs[0])) == STEPS
    exports = [load_file(run / "export/model.safetensors") for run in runs]
    assert all(equal(value, exports[1][name]) for name, value in exports[0].items())
