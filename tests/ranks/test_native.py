"""DeepSpeed's own checkpoints, made by DeepSpeed itself: imported, exported, and the losses that follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from llmtrain.checkpoint.format import Manifest, read_trainer
from llmtrain.checkpoint.load import load_checkpoint
from llmtrain.checkpoint.native import import_deepspeed
from llmtrain.checkpoint.native_universal import export_universal
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.config.run import ModelConfig
from llmtrain.engine.build import DTYPES, Ranks
from llmtrain.engine.step import learning_rate_factor
from llmtrain.errors import CheckpointError
from llmtrain.models.build import initial_weights
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    batches,
    joined,
    make_engine,
    resolved_run,
    shortened,
    train_steps,
)

HALF, END = 4, 8
TIED = {**LLAMA, "tie_word_embeddings": True}
ROUNDING = 2e-6  # of fp32 losses near 6: sums are made in another order


def config_folder(folder: Path, model: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def imported(source: Path, out: Path, model: dict[str, Any] = LLAMA, **options: Any) -> Path:
    """The checkpoint that the import makes."""
    import_deepspeed(source, out, model=config_folder(source, model), **options)
    (path,) = (out / "checkpoints").iterdir()
    return path


def saved_by_deepspeed(case: Case, folder: str) -> None:
    """The first half in our engine, then DeepSpeed's save."""
    engine, stepper, ranks = make_engine(case)
    train_steps(case, stepper, ranks, 0, HALF)
    engine.save_checkpoint(folder, client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}})
    engine.destroy()


def resumed_by_deepspeed(case: Case, folder: str) -> Trace:
    """The second half, after DeepSpeed's load."""
    engine, stepper, ranks = make_engine(case)
    assert engine.load_checkpoint(folder)[0] is not None
    trace = train_steps(case, stepper, ranks, HALF, END)
    engine.destroy()
    return trace


def resumed_by_us(case: Case, path: str) -> Trace:
    """The second half from the imported checkpoint, in an engine with other initial weights."""
    engine, stepper, ranks = make_engine(case)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.add_(1.0)
    load_checkpoint(engine, CheckpointReader(Path(path)), read_trainer(Path(path)), ranks)
    trace = train_steps(case, stepper, ranks, HALF, END)
    engine.destroy()
    return trace


def worst(first: Trace, second: Trace) -> float:
    return max(abs(a - b) for a, b in zip(first.losses, second.losses, strict=True))


@pytest.mark.parametrize(
    "form",
    [
        {"stage": 0},
        {"stage": 1, "model": TIED},
        {"stage": 2},
        {"stage": 3},
        {"stage": 0, "precision": "bf16", "model": TIED},
        {"stage": 1, "precision": "bf16", "extra": {"data_types": {"grad_accum_dtype": "fp32"}}},
        {"stage": 3, "precision": "bf16", "model": TIED},
    ],
    ids=lambda form: "-".join(str(v) for v in form.values() if not isinstance(v, dict)),
)
def test_resumes_bit_for_bit_as_deepspeed_does(pools, small_data, tmp_path, form):
    case = Case(data=small_data, steps=END, **form)
    pools(2).run(saved_by_deepspeed, case, str(tmp_path / "theirs"))
    want = pools(2).run(resumed_by_deepspeed, case, str(tmp_path / "theirs"))[0]
    path = imported(tmp_path / "theirs", tmp_path / "ours", case.model)
    got = pools(2).run(resumed_by_us, case, str(path))[0]
    assert got.losses == want.losses  # the same numbers in the same engine
    assert got.norms == want.norms or case.stage == 0


def test_imported_checkpoint_loads_at_another_layout(pools, small_data, tmp_path):
    case = Case(data=small_data, steps=END, stage=2)
    pools(2).run(saved_by_deepspeed, case, str(tmp_path / "theirs"))
    want = pools(2).run(resumed_by_deepspeed, case, str(tmp_path / "theirs"))[0]
    path = imported(tmp_path / "theirs", tmp_path / "ours")
    got = pools(1).run(resumed_by_us, shortened(case, stage=3), str(path))[0]
    assert worst(got, want) < ROUNDING
