"""The bytes that ZeRO 1 and 2 move beside the model's passes, and that they compute what DeepSpeed's own way does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from llmtrain.engine.deepspeed import zero_step
from tests.helpers import training
from tests.helpers.moved import MovedBytes
from tests.helpers.training import Case, make_engine, train_steps

FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
SUMS = ("process_gradients", "reduce_gradients", "overlapping_partition_gradients_reduce_epilogue",
        "backward_epilogue", "clear_backward_seen_flag")  # fmt: skip
"""DeepSpeed's methods in which an optimizer takes gradients."""
ZEROS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2-shipped": {"stage": 2, "overlap_comm": True, "use_multi_rank_bucket_allreduce": False},
}


def case_of(data: str, zero: dict[str, Any], accumulation: int, **more: Any) -> Case:
    zero = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, **zero}
    extra = {**FP32_SUMS, "zero_optimization": zero}
    fields = {"precision": "bf16", "steps": 2, "extra": extra, **more}
    return Case(data=data, stage=zero["stage"], accumulation=accumulation, **fields)


@contextlib.contextmanager
def short_messages(global_batch: int) -> Iterator[None]:
    """A context in which slices of this small model are long enough for a message each."""
    before = training.GLOBAL_BATCH, zero_step._LONG
    training.GLOBAL_BATCH, zero_step._LONG = global_batch, 1000
    try:
        yield
    finally:
        training.GLOBAL_BATCH, zero_step._LONG = before


def sums_moved(case: Case, global_batch: int) -> tuple[float, dict[str, float]]:
    """Bytes a parameter and micro-batch of the second step's sums: all of them with those of the messages, which are
    read and written, and each operator's."""
    with short_messages(global_batch):
        engine, ranks = make_engine(case)
        train_steps(case, engine, ranks, 0, 1)
        moved = MovedBytes()
        with moved.inside(engine.deepspeed.optimizer, *SUMS):
            train_steps(case, engine, ranks, 1, 2)
    share = sum(held.parameter.numel() for held in engine.module.local_parameters()) * case.accumulation
    engine.close()
    return (moved.total + 2 * moved.message_bytes) / share, {name: each / share for name, each in moved.bytes.items()}


@pytest.mark.parametrize(("ranks", "most"), [(1, 10.5), (8, 25.0)])
@pytest.mark.parametrize("zero", ZEROS)
def test_bytes_of_fp32_sums(pools, small_data, zero, ranks, most, record_property):
    """On one rank a gradient is read once and its sum once written and read. DeepSpeed: 54, 43 and 43; with eight ranks
    41, 35 and 29."""
    for accumulation in (1, 3) if ranks == 1 else (1,):
        case = case_of(small_data, ZEROS[zero], accumulation)
        for total, by_operator in pools(ranks).run(sums_moved, case, 24):
            record_property("bytes", [total, by_operator])
            assert total <= most, by_operator


def update_moved(case: Case) -> tuple[float, dict[str, float]]:
    """Bytes a parameter of the second step's update: all of them, and each operator's."""
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 1)
    moved = MovedBytes()
    with moved.inside(engine.deepspeed.optimizer, "step"):
        train_steps(case, engine, ranks, 1, 2)
    share = sum(held.parameter.numel() for held in engine.module.local_parameters())
    engine.close()
    return moved.total / share, {name: each / share for name, each in moved.bytes.items()}


@pytest.mark.parametrize(("sums", "most"), [({}, 38.5), (FP32_SUMS, 34.5)], ids=["bf16", "fp32"])
def test_bytes_of_an_update(pools, small_data, sums, most, record_property):
    """bf16 gradients are read for the norm (2) and to widen them (2, and 4 written), then multiplied by the clip's
    factor (8); AdamW reads 16 (what it writes in place is not counted), and masters are rounded (6). DeepSpeed joins
    the gradients in bf16 first, which is 4 more. fp32 sums are read for the norm (4), and are joined already."""
    case = Case(data=small_data, stage=2, precision="bf16", steps=2, clip=0.01, extra=sums)
    total, by_operator = pools(1).run(update_moved, case)[0]
    record_property("bytes", [total, by_operator])
    assert total <= most, by_operator


def sums_and_masters(case: Case, known: dict[str, str]) -> list[torch.Tensor]:
    """This rank's gradients before each update and its masters in the end, with a DeepSpeed of these checksums."""
    before, zero_step._KNOWN = zero_step._KNOWN, known
    found: list[torch.Tensor] = []
    try:
        with short_messages(training.GLOBAL_BATCH):
            engine, ranks = make_engine(case)
            optimizer = engine.deepspeed.optimizer

            def look() -> None:
                found.extend(group.flat_partition.clone() for group in optimizer.averaged_gradients.values())

            train_steps(case, engine, ranks, 0, case.steps, look)
            found += [flat.detach().clone() for flat in optimizer.single_partition_of_fp32_groups]
        assert (type(optimizer) is zero_step.OneNormZero) is ("" not in known.values())
        engine.close()
    finally:
        zero_step._KNOWN = before
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("zero", ZEROS)
def test_fp32_sums_are_deepspeeds_to_the_last_bit(pools, small_data, zero, ranks):
    """Without clipping, as DeepSpeed adds the squares of its norm in another order. Three: no power of two."""
    case = case_of(small_data, ZEROS[zero], 2, clip=0.0)
    ours, theirs = (
        pools(ranks).run(sums_and_masters, case, known)
        for known in (zero_step._KNOWN, {**zero_step._KNOWN, "step": ""})
    )
    for mine, own in zip(ours, theirs, strict=True):
        assert len(mine) == len(own) > 4
        assert all(map(torch.equal, mine, own))
        assert all(gradient.any() for gradient in mine)
