"""Save under one layout, load under the same or another one, and go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from llmtrain.checkpoint.load import load_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from tests.helpers.families import FAMILIES
from tests.helpers.processors import on_device
from tests.helpers.training import (
    Case,
    Trace,
    assembled,
    counted,
    make_engine,
    resolved_run,
    save_checkpoint,
    train_steps,
)

HALF, END = 3, 6
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16_MOMENTS = {"bf16": {"bf16_optimizer_states": True}}


def save_in_the_middle(case: Case, folder: str) -> tuple[Trace, str]:
    """All steps with a checkpoint after HALF; the trace covers the second half."""
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, HALF)
    state = counted(engine)
    run = resolved_run(case, ranks.world_size)
    path = save_checkpoint(engine, Path(folder), HALF, state, run, ranks)
    trace = train_steps(case, engine, ranks, HALF, END)
    trace.parameters = assembled(engine, ranks)
    engine.close()
    return trace, str(path)


def load_and_go_on(case: Case, path: str) -> Trace:
    """The second half from the checkpoint, in an engine with other initial weights."""

    engine, ranks = make_engine(case)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.add_(1.0)
    reader = CheckpointReader(Path(path))
    load_checkpoint(engine, reader, TrainerState.read(Path(path)), ranks)
    trace = train_steps(case, engine, ranks, HALF, END)
    trace.parameters = assembled(engine, ranks)
    engine.close()
    return trace


@pytest.mark.parametrize(
    ("world_size", "form"),
    [
        (2, {"stage": 0, "accumulation": 3}),
        (2, {"stage": 3}),
        (2, {"stage": 1, "precision": "bf16"}),
        (2, {"stage": 1, "precision": "bf16", "extra": FP32_SUMS}),
        (2, {"stage": 2, "precision": "bf16", "extra": BF16_MOMENTS}),
        (2, {"stage": 3, "offload": "all"}),
        (2, {"stage": 1, "optimizer": "muon", "precision": "bf16"}),
        (2, {"stage": 1, "optimizer": "lion"}),
        # DeepSpeed's CPULion is built for it, within a minute
        (2, {"stage": 3, "optimizer": "lion", "precision": "bf16", "offload": "optimizer"}),
        (2, {"stage": 1, "precision": "bf16", "pipeline": 2}),
        (2, {"stage": 0, "precision": "bf16", "tensor": 2}),
        (2, {"stage": 3, "precision": "bf16", "sequence": 2}),
        (2, {"stage": 2, "precision": "bf16", "expert": 2, "model": FAMILIES["mixtral"]}),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(f"{v}" for k, v in value.items() if k != "model"),
)
def test_same_layout_goes_on_bit_for_bit(pools, small_data, tmp_path, world_size, form):
    """On a device that has fp16, where Muon in bf16 uses it."""
    case = Case(data=small_data, steps=END, **form)
    want, path = pools(world_size).run(on_device, True, save_in_the_middle, case, str(tmp_path))[0]
    got = pools(world_size).run(on_device, True, load_and_go_on, case, path)[0]
    assert got.losses == want.losses
    assert got.norms == want.norms
    for name, value in want.parameters.items():
        assert torch.equal(got.parameters[name], value), name


def loaded_moments(case: Case, path: str) -> tuple[dict[str, dict[str, torch.Tensor]], set[torch.dtype]]:
    """The moments after loading, by kind, and how they are kept."""
    engine, ranks = make_engine(case)
    load_checkpoint(engine, CheckpointReader(Path(path)), TrainerState(), ranks)
    moments = {kind: assembled(engine, ranks, kind) for kind in ("exp_avg", "exp_avg_sq")}
    dtypes = {piece.dtype for piece in engine.state() if piece.kind != "param"}
    engine.close()
    return moments, dtypes


def test_bf16_moments_travel(pools, small_data, tmp_path):
    """Into fp32 as they are, from fp32 rounded to the nearest; masters are fp32 in both."""
    wide = Case(data=small_data, stage=1, steps=END, precision="bf16")
    narrow = replace(wide, stage=3, extra=BF16_MOMENTS)
    for saved, loaded in ((narrow, wide), (wide, narrow)):
        path = pools(2).run(save_in_the_middle, saved, str(tmp_path / str(saved.stage)))[0][1]
        with safe_open(f"{path}/rank-00000.safetensors", "pt") as file:
            kept = {(key.split("/")[0], file.get_tensor(key).dtype) for key in file.keys()}  # noqa: SIM118
        dtype = torch.bfloat16 if saved is narrow else torch.float32
        assert kept == {("param", torch.float32), ("exp_avg", dtype), ("exp_avg_sq", dtype)}
        want, got = (pools(2).run(loaded_moments, case, path)[0] for case in (saved, loaded))
        assert got[1] == {torch.bfloat16 if loaded is narrow else torch.float32}
        for kind, tensors in want[0].items():
            for name, value in tensors.items():
                expected = value.bfloat16().float() if loaded is narrow else value
                assert value.any() and torch.equal(got[0][kind][name], expected), (kind, name)
