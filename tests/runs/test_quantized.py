"""A run with its frozen weights in 4 bits, from a folder of weights to a PEFT folder."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.parity.plain_adapter import in_four_bits
from tests.helpers import forked
from tests.helpers.launching import losses, write_run
from tests.runs.test_sites_forms import written

pytestmark = pytest.mark.needs("peft", "bitsandbytes")


def test_qlora_trains_on_the_rounded_weights_goes_on_and_ends_in_a_peft_folder(small_data, tmp_path):
    """Two ranks at ZeRO 2. The first loss is that of the model with its maps rounded; a resume on one rank at ZeRO 0
    goes on as if nothing had happened (sums of another order: 1e-5); the folder's adapter is for the folder's base."""
    from transformers import AutoModelForCausalLM

    base = written(tmp_path / "base", 0)
    train = {"global_batch": 4, "micro_batch": 2, "max_steps": 8, "export": True}
    recipe = write_run(tmp_path, small_data, {"zero_optimization": {"stage": 2}}, train, checkpoint={"every_steps": 4},
                       model={"pretrained": str(base)}, adapter={"r": 4, "quantize": "nf4"})  # fmt: skip
    said = forked.train(recipe)
    assert "4 bits (NF4)" in said
    whole = losses(tmp_path / "run")
    later = shutil.ignore_patterns("step-00000008", "metrics.jsonl")
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=later)
    recipe.write_text(recipe.read_text().replace(str(tmp_path / "run"), str(tmp_path / "again")))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    forked.train(recipe, world_size=1)
    again = losses(tmp_path / "again")
    assert again.keys() == {5, 6, 7, 8}
    assert all(abs(whole[step] - again[step]) < 1e-5 for step in again), (whole, again)
    model = AutoModelForCausalLM.from_pretrained(base)
    first = first_loss(model, small_data)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = in_four_bits(parameter)
    rounded = first_loss(model, small_data)
    assert abs(whole[1] - rounded) < 1e-5 < abs(whole[1] - first), (whole[1], rounded, first)
    found = load_file(tmp_path / "run/export/adapter_model.safetensors")
    assert all(".lora_" in name for name in found) and any(
        bool(each.any()) for n, each in found.items() if "lora_B" in n
    )


def first_loss(model: torch.nn.Module, data: str) -> float:
    from llmtrain.config.run import DataConfig
    from llmtrain.data.stream.loader import TrainData
    from tests.helpers.plain import mean_cross_entropy

    windows = [TrainData(DataConfig(path=data, sequence_length=32)).window_at(index) for index in range(4)]
    inputs, labels = (torch.stack([torch.from_numpy(getattr(w, key)) for w in windows]) for key in ("inputs", "labels"))
    with torch.no_grad():
        return float(mean_cross_entropy(model(inputs.long()).logits, labels.long()))
