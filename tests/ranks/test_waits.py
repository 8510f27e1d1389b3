"""How often DeepSpeed stops the host until the device has done everything, with each of the shipped files.

A CPU has nothing to wait for, so its accelerator says here that it has streams, and counts who waits for them.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from llmtrain.engine.deepspeed.zero_step import OneNormZero
from tests.helpers.processors import fp16
from tests.helpers.training import Case, make_engine, train_steps

ROOT = Path(__file__).parents[2]
MICRO_BATCHES, STEPS = 3, 2


class Stream:
    """Does nothing, and says when it is waited for."""

    def __init__(self, waits: Counter[str]) -> None:
        self._waits = waits

    def synchronize(self) -> None:
        self._waits["stream"] += 1

    def query(self) -> bool:
        return True

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


@contextlib.contextmanager
def streams() -> Iterator[Counter[str]]:
    """An accelerator as CUDA's: what is waited for, by "device" or "stream"."""
    waits: Counter[str] = Counter()
    accelerator, one = get_accelerator(), Stream(waits)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("resolves_data_dependency", "is_synchronized_device", "handles_memory_backpressure"):
            patch.setattr(accelerator, name, lambda: False)
        for name in ("Stream", "Event"):
            patch.setattr(type(accelerator), name, property(lambda self: lambda *_, **__: Stream(waits)))
        for name in ("current_stream", "default_stream"):
            patch.setattr(accelerator, name, lambda *_: one)
        patch.setattr(accelerator, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(accelerator, "synchronize", lambda *_: waits.update(device=1))
        patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
        yield waits


@fp16(True)
def waits_of(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """(of all micro-batches but the last of each step, of these with the update), by whom."""
    with streams() as waits:
        engine, ranks = make_engine(case)
        train_steps(case, engine, ranks, 0, 1)
        waits.clear()
        between: Counter[str] = Counter()
        plain, done = engine.micro_step, [0]

        def micro_step(*args: Any) -> Any:
            before = waits.copy()
            result = plain(*args)
            done[0] += 1
            if done[0] % MICRO_BATCHES:
                between.update(waits - before)
            return result

        engine.micro_step = micro_step
        train_steps(case, engine, ranks, 1, 1 + STEPS)
        found = dict(between), dict(waits)
        engine.close()
        return found


def case_of(path: Path, data: str) -> Case:
    """The file's ZeRO on one rank: what its degrees share has no part in it."""
    tree = json.loads(path.read_text())
    kept = ("zero_optimization", "data_types", "communication_data_type", "activation_checkpointing")
    extra = {key: tree[key] for key in kept if key in tree}
    zero = {k: v for k, v in extra["zero_optimization"].items() if not k.startswith("offload")}
    precision = next((name for name in ("bf16", "fp16") if name in tree), "fp32")
    scale = {"fp16": {"initial_scale_power": 8}} if precision == "fp16" else {}
    small = {"reduce_bucket_size": 200_000, "allgather_bucket_size": 200_000}
    extra["zero_optimization"] = {**zero, **small}
    return Case(
        data=data,
        stage=zero["stage"],
        precision=precision,
        accumulation=MICRO_BATCHES,
        extra={**extra, **scale},
        steps=1 + STEPS,
    )


def notes_of(case: Case) -> list[str]:
    engine, _ = make_engine(case)
    engine.close()
    return engine.module.notes


def test_zero_3_on_one_rank_says_that_it_waits_for_nothing(pools, small_data):
    """DeepSpeed's handle of a parameter that no other rank has synchronises the stream, hundreds of times a step."""
    for world, changes, says in (
        (1, {}, True),
        (1, {"offload": "all"}, False),
        (2, {"tensor": 2}, True),
        (2, {"sequence": 2}, False),
    ):
        for notes in pools(world).run(notes_of, Case(data=small_data, stage=3, **changes)):
            assert any(note.startswith("ZeRO 3 has no other rank") for note in notes) is says


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_no_micro_batch_waits_for_the_device(pools, small_data, path, record_property):
    between, all_in_all = pools(1).run(waits_of, case_of(path, small_data))[0]
    record_property("waits", [between, all_in_all])
    print(f"{path.name}: {between} between, {all_in_all} in {STEPS} steps")
    assert between.get("device", 0) == 0
    assert all_in_all.get("device", 0) == 0


def order_of(case: Case) -> list[str]:
    """What happens to gradients in a step, in its order: reductions, the compute stream's waits for them, their use."""
    said: list[str] = []
    with streams(), pytest.MonkeyPatch.context() as patch:
        engine, ranks = make_engine(case)
        optimizer, compute = engine.deepspeed.optimizer, get_accelerator().current_stream()
        assert isinstance(optimizer, OneNormZero)
        for name in ("allreduce_bucket", "_add_to_grad_partition_buffer"):
            plain = getattr(optimizer, name)
            patch.setattr(optimizer, name, lambda *a, _p=plain, **k: (said.append("reduce"), _p(*a, **k))[1])
        patch.setattr(
            compute, "wait_stream", lambda other: said.append("wait" if other is optimizer.reduction_stream else "else")
        )
        plain_step = engine.micro_step

        def micro_step(*given: Any) -> Any:
            result = plain_step(*given)
            said.append("use")
            return result

        engine.micro_step = micro_step
        train_steps(case, engine, ranks, 0, 1)
        engine.close()
    return said


@pytest.mark.parametrize("whole", [False, True])
def test_gradients_are_used_behind_their_reductions(pools, small_data, whole):
    """With DeepSpeed's wait for the device gone, the stream's is what keeps the sums right."""
    zero = {
        "stage": 2,
        "overlap_comm": True,
        "use_multi_rank_bucket_allreduce": whole,
        "reduce_bucket_size": 5000,
        "allgather_bucket_size": 5000,
    }
    case = Case(data=small_data, stage=2, precision="bf16", accumulation=2, extra={"zero_optimization": zero})
    for said in pools(2).run(order_of, case):
        micros = " ".join(said).split("use")
        assert len(micros) == 3 and said.count("reduce") > 10
        assert [micro.split()[-1] for micro in micros[:2]] == ["wait", "wait"], said
