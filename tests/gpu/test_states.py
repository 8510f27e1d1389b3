"""What a run keeps on CUDA: a resume is bit-exact, and the fp16 loss scale travels with the checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from llmtrain.checkpoint.load import load_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.engine.deepspeed.engine import ZeroEngine
from llmtrain.engine.losses.function import NEXT_TOKEN
from llmtrain.engine.ranks.device import use_deterministic_kernels
from llmtrain.engine.weights import _sum_on
from llmtrain.storage.checksum import checksum, checksum_part
from llmtrain.storage.region import Region
from tests.helpers.training import Case, Trace, batches, counted, make_engine, one_step, resolved_run, save_checkpoint
from tests.ranks.test_resume import END, load_and_go_on, save_in_the_middle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_gpus_checksum_is_that_of_a_cpu(dtype: torch.dtype) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = (torch.arange(9_000_000) % 9973).to(dtype) * 0.37
    strided = Region(65_000, 3_000_000, runs=((100, 3_000),), stride=7_000)
    assert _sum_on(values, device) == checksum(values) == checksum(values.to(device))
    assert checksum(values.to(device), 65_537) == checksum(values, 65_537)
    part = values[: strided.numel]
    assert checksum_part(part.to(device), strided) == checksum_part(part, strided)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_goes_on_bit_for_bit(pools, small_data, tmp_path, stage, precision):
    # 512 tokens are several tiles of an attention kernel: going backward, several blocks add to one gradient.
    case = Case(data=small_data, stage=stage, precision=precision, length=512, steps=END)
    want, path = pools(1).run(deterministically_save, case, str(tmp_path))[0]
    got = pools(1).run(deterministically_load, case, path)[0]
    assert got.losses == want.losses
    assert got.norms == want.norms
    for name, value in want.parameters.items():
        assert torch.equal(got.parameters[name], value), name


def deterministically_save(case: Case, folder: str) -> tuple[Trace, str]:
    with_deterministic_kernels()
    try:
        return save_in_the_middle(case, folder)
    finally:
        torch.use_deterministic_algorithms(False)


def deterministically_load(case: Case, path: str) -> Trace:
    with_deterministic_kernels()
    try:
        return load_and_go_on(case, path)
    finally:
        torch.use_deterministic_algorithms(False)


def with_deterministic_kernels() -> None:
    """As `train.deterministic` does it."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    use_deterministic_kernels()


@dataclass
class Scaled:
    """Steps of an fp16 training."""

    losses: list[float]
    scales: list[float]
    """Loss scale after each step."""
    skipped: list[bool]
    applied: int
    """Optimizer steps that changed the parameters."""


FP16 = {"loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 4, "hysteresis": 1, "min_loss_scale": 1}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_finds_its_loss_scale_and_resumes_with_it(pools, small_data, tmp_path, stage):
    case = Case(data=small_data, stage=stage, precision="fp16", steps=40, extra={"fp16": FP16})
    first, path, saved = pools(1).run(fp16_save, case, str(tmp_path), 34)[0]
    assert first.skipped[0] and first.scales[0] < 2.0**32, "a scale of 2^32 overflows: the step is skipped"
    good = [index for index, skipped in enumerate(first.skipped) if not skipped]
    assert len(good) >= 10, "the scale came down and training went on"
    assert first.applied == len(good)
    assert any(first.scales[i] > first.scales[i - 1] for i in good[1:]), "the scale rises after the window"
    assert first.losses[good[-1]] < first.losses[0]

    loaded, second = pools(1).run(fp16_load, case, path, 34)[0]
    assert loaded == saved
    assert second.applied == first.applied + sum(not skipped for skipped in second.skipped)
    assert max(second.scales) <= max(first.scales[good[0] :]) * 4, "it does not start from 2^32 again"
    assert sum(second.skipped) < 3


def fp16_save(case: Case, folder: str, steps: int) -> tuple[Scaled, str, dict[str, float]]:
    allow_fp16()
    engine, ranks = make_engine(case)
    scaled = fp16_steps(case, engine, 0, steps)
    state = counted(engine)
    path = save_checkpoint(engine, Path(folder), steps, state, resolved_run(case, 1), ranks)
    engine.close()
    return scaled, str(path), state["loss_scale"]


def fp16_load(case: Case, path: str, first: int) -> tuple[dict[str, float], Scaled]:
    allow_fp16()
    engine, ranks = make_engine(case)
    trainer = TrainerState.read(Path(path))
    load_checkpoint(engine, CheckpointReader(Path(path)), trainer, ranks)
    loaded = engine.counters().loss_scale
    scaled = fp16_steps(case, engine, first, case.steps)
    engine.close()
    return loaded, scaled


def fp16_steps(case: Case, engine: ZeroEngine, first: int, last: int) -> Scaled:
    scaled = Scaled([], [], [], 0)
    source = batches(case, (0, 1), case.accumulation, first)
    for _ in range(first, last):
        batch = next(source)
        weight = sum(map(NEXT_TOKEN.weight, batch.micro_batches))
        sums, result = one_step(engine, batch, weight)
        scaled.losses += (torch.stack(sums).sum(0).double() / weight).tolist()
        scaled.scales.append(engine.counters().loss_scale["cur_scale"])
        scaled.skipped.append(result.skipped)
    source.close()  # type: ignore[attr-defined]
    scaled.applied = int(engine.counters().optimizer_step)
    return scaled


def allow_fp16() -> None:
    """DeepSpeed refuses fp16 on a CPU; torch computes it. For trying these tests without a GPU."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        get_accelerator().is_fp16_supported = lambda: True
        get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float16, torch.bfloat16]
