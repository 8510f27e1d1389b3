"""A run's export is read by each command that takes a model."""

from __future__ import annotations

import pytest

from llmtrain.cli import main
from tests.helpers import forked
from tests.helpers.launching import losses, write_run
from tests.runs.test_quantized import first_loss
from tools.families.configs import tiny


@pytest.mark.slow  # tests/unit/models/test_own_configs.py reads them by the same reader
def test_the_export_of_a_family_with_an_infinite_number_is_read(small_data, tmp_path, capsys):
    """transformers 5 writes Mamba-2's time_step_limit as {"__float__": "Infinity"}."""
    from transformers import AutoModelForCausalLM

    train = {"global_batch": 4, "micro_batch": 4, "max_steps": 1, "export": True}
    model = {"config": {**tiny("granitemoehybrid"), "layer_types": ["mamba", "attention"]}}
    recipe = write_run(tmp_path / "first", small_data, {}, train, model=model)
    forked.train(recipe, world_size=1)
    run = tmp_path / "first/run"
    assert "Infinity" in (run / "export/config.json").read_text()
    for folder in (run, run / "export"):
        assert main(["generate", str(folder), "--prompt", "a", "--max-tokens", "2"]) == 0
    assert main(["checkpoint", "from-hf", str(run / "export"), str(tmp_path / "imported")]) == 0
    assert main(["checkpoint", "to-hf", str(tmp_path / "imported"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert main(["generate", str(tmp_path / "out"), "--prompt", "a", "--max-tokens", "2"]) == 0
    model, train = {"pretrained": str(run / "export")}, {**train, "export": False}
    again = write_run(tmp_path / "again", small_data, {}, train, model=model)
    forked.train(again, world_size=1)
    wanted = first_loss(AutoModelForCausalLM.from_pretrained(run / "export"), small_data)
    assert abs(losses(tmp_path / "again/run")[1] - wanted) < 1e-5  # fp32, other kernels of the same definition
