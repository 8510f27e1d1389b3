"""What model.attention auto stands for: on which device, for which runs and families, and what is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.base.errors import ConfigError
from llmtrain.config.load import load, resolve
from llmtrain.config.run import DataConfig, ModelConfig, Run, RunConfig, TrainConfig
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.objective import Objective
from llmtrain.optim.optimizers import AdamW
from llmtrain.training.setup import with_attention
from tests.helpers.families import FAMILIES
from tests.helpers.hf_folders import model_folder, new_model
from tests.helpers.prepared import write_prepared
from tests.runs.test_bench import load as bench

GPU, CPU = torch.device("cuda"), torch.device("cpu")
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def run_of(
    folder: Path,
    json_keys: dict[str, Any],
    model: ModelConfig,
    *,
    isolate: bool = True,
    ranks: int = 1,
    length: int = 64,
    micro_batch: int = 2,
    accumulation: int = 1,
    **sections: Any,
) -> Run:
    """A resolved run without data."""
    (folder / "ds.json").write_text(json.dumps(json_keys))
    config = RunConfig(
        deepspeed=str(folder / "ds.json"),
        model=model,
        data=DataConfig(path="(none)", sequence_length=length, isolate_documents=isolate),
        optim=AdamW(lr=1e-4),
        train=TrainConfig(micro_batch=micro_batch, accumulation=accumulation, max_steps=10),
        **sections,
    )
    return resolve(config, ranks, "a test")


def resolved(
    folder: Path, model: dict[str, Any], json_keys: dict[str, Any] = BF16, attention: Any = "auto", **more: Any
) -> Run:
    return run_of(folder, json_keys, ModelConfig(config=model, attention=attention), **more)


def chosen(run: Run, device: torch.device) -> tuple[str, str]:
    """(the attention, the note)"""
    spec, notes = with_attention(run, ModelSpec.of(run.config.model), device)
    assert len(notes) <= 1 and spec.skeleton.config._attn_implementation == spec.model.attention
    return spec.model.attention, "".join(notes)


LLAMA = FAMILIES["llama"]
DROPOUT = {**FAMILIES["gpt2"], "attn_pdrop": 0.1}
WIDE = {**LLAMA, "head_dim": 512}


@pytest.mark.parametrize(
    ("given", "device", "attention", "said"),
    [
        ({"model": LLAMA}, GPU, "varlen", "model.attention auto: varlen, which computes within documents"),
        ({"model": LLAMA}, CPU, "sdpa", "model.attention auto: sdpa, as varlen is for GPUs"),
        ({"model": LLAMA, "isolate": False}, GPU, "sdpa", ""),
        ({"model": LLAMA, "json_keys": {}}, GPU, "sdpa", "auto: sdpa, as varlen's kernel computes in bf16 and fp16"),
        (
            {"model": LLAMA, "json_keys": BF16 | {"pipeline": {"stages": 2}}, "ranks": 2, "accumulation": 2},
            GPU,
            "sdpa",
            "auto: sdpa, as varlen needs whole sequences and all layers on each rank",
        ),
        ({"model": DROPOUT}, GPU, "sdpa", "GPT2LMHeadModel does not go with varlen (model.attention varlen: GPT2At"),
        ({"model": WIDE}, GPU, "sdpa", "auto: sdpa, as varlen has heads of at most 256 features"),
        ({"model": FAMILIES["qwen3_moe"]}, GPU, "varlen", "auto: varlen"),
        ({"model": LLAMA, "attention": "sdpa"}, GPU, "sdpa", "computes all pairs of a sequence's tokens"),
        ({"model": LLAMA, "attention": "sdpa"}, CPU, "sdpa", ""),
        # A mask of 4 GiB and more would be refused: the CPU has a slow way without one.
        ({"model": LLAMA, "length": 65536, "micro_batch": 2}, CPU, "varlen", "auto: varlen"),
    ],
)
def test_auto_stays_within_documents_on_a_gpu(tmp_path, given, device, attention, said):
    found = chosen(resolved(tmp_path, **given), device)
    assert found[0] == attention and (said in found[1] if said else found[1] == ""), found


def test_a_mask_that_is_too_large_is_refused_where_there_has_to_be_one(tmp_path):
    run = resolved(tmp_path, LLAMA, {}, length=65536)
    with pytest.raises(ConfigError, match="8 GiB", check=lambda e: e.keys == {"data.sequence_length"}):
        chosen(run, GPU)


@pytest.mark.parametrize(("family", "attention"), [("llama", "varlen"), ("gpt2", "sdpa")])
def test_the_teacher_has_to_go_with_it_too(tmp_path, family, attention):
    more = {"attn_pdrop": 0.1} if family == "gpt2" else {}
    model_folder(tmp_path / "teacher", new_model(family, **more))
    objective = Objective.of("distill", teacher=str(tmp_path / "teacher"))
    assert chosen(resolved(tmp_path, LLAMA, objective=objective), GPU)[0] == attention


@pytest.mark.parametrize("at_once", [0, 4])
@pytest.mark.parametrize("how", ["full", "lora"])
def test_both_tables_of_post_training_have_no_mask_on_a_gpu(tmp_path, how, at_once):
    """Peers have none: ours lost a third of its speed to one by count."""
    bench("posttraining")  # whose folder it is imported from
    tuners = bench("tuners")
    model_folder(tmp_path / "model", new_model("llama", vocab_size=512))
    (tmp_path / "deepspeed.json").write_text(json.dumps(BF16))
    write_prepared(tmp_path / "data", [[[1, 2, 3] * 200]], [[[1, 2, 3] * 200]], vocab_size=512)
    task = tuners.Tuning(
        folder=str(tmp_path),
        sequence=64,
        global_batch=2,
        contestants=(),
        threads=1,
        steps_per_round=1,
        rounds=2,
        bf16=True,
        at_once=at_once,
    )
    run = load(["--config", str(tuners.write_yaml(task, how))], 1, "a test")
    run = replace(run, config=replace(run.config, adapter=replace(run.config.adapter, start=None)))
    assert chosen(run, GPU)[0] == "varlen" and run.config.data.isolate_documents
