"""How often a step makes the host wait for the device, and whose code does it."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.training.step import Session
from tests.helpers.training import Case, batches, make_engine


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_our_loop_waits_at_most_once_a_step(pools, small_data, stage, precision, record_property):
    steps = 3
    case = Case(data=small_data, stage=stage, precision=precision, accumulation=3)
    waits = pools(1).run(waits_of_steps, case, steps)[0]
    record_property("waits", waits)
    print(f"ZeRO {stage} {precision}, {steps} steps: {waits}")
    ours = {where: count for where, count in waits.items() if not where.startswith("deepspeed")}
    # AdamW's kernel takes norm and clip on a GPU, in bf16; a CPU reads them.
    assert sum(ours.values()) <= (0 if torch.cuda.is_available() and stage in (1, 2) else steps), ours


def waits_of_steps(case: Case, steps: int) -> dict[str, int]:
    """Where (file:line of llmtrain or DeepSpeed) -> how often, in `steps` steps after two others."""
    engine, ranks = make_engine(case)
    session = Session(engine, ranks, engine.mesh.degrees, lambda step: 1.0, seed=0)
    source = batches(case, (0, 1), case.accumulation)
    found: Counter[str] = Counter()
    for index in range(2 + steps):
        batch = next(source)
        with recorded_waits(found) if index >= 2 else contextlib.nullcontext():
            session.step(batch)
    source.close()  # type: ignore[attr-defined]
    engine.close()
    return dict(found)


def test_evaluation_waits_once(cuda, pools, small_data):
    waits = pools(1).run(waits_of_an_evaluation, Case(data=small_data, stage=1, precision="bf16"))[0]
    assert sum(waits.values()) == 1, waits


def waits_of_an_evaluation(case: Case) -> dict[str, int]:
    engine, _ = make_engine(case)
    found: Counter[str] = Counter()
    source = batches(case, (0, 1), 4)
    micros = next(source).micro_batches
    source.close()  # type: ignore[attr-defined]
    engine.evaluate(micros)
    with recorded_waits(found):
        engine.evaluate(micros)
    engine.close()
    return dict(found)


@contextlib.contextmanager
def recorded_waits(found: Counter[str]) -> Iterator[None]:
    """Count into `found`: CUDA's own synchronising calls; on a CPU the operators that would be such calls."""
    if not torch.cuda.is_available():
        with _ScalarReads(found):
            yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: _note(found) if "synchroniz" in str(message) else None
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
)


class _ScalarReads(TorchDispatchMode):
    """Values that Python reads out of tensors, as item(), bool() and float() do, and results whose size depends on
    values, as of `x[mask]`."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype is torch.bool for i in args[1])
        if by_mask or func in _READS:
            _note(self._found)
        return func(*args, **(kwargs or {}))


_OF_HOST_MEMORY = ("to", "weight")
"""Functions that read a micro-batch before it goes to the device, which on a CPU looks like the device's memory."""


def _note(found: Counter[str]) -> None:
    """The innermost frame of DeepSpeed or llmtrain."""
    for frame in reversed(traceback.extract_stack()):
        if "/llmtrain/" in frame.filename and frame.name in _OF_HOST_MEMORY and not torch.cuda.is_available():
            return
        for package in ("deepspeed", "llmtrain"):
            if f"/{package}/" in frame.filename:
                short = frame.filename.rsplit(f"/{package}/", 1)[1]
                found[f"{package}/{short}:{frame.lineno}"] += 1
                return
    found["elsewhere"] += 1
