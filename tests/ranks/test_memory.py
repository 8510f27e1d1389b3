"""What a rank holds when the work is shared by four: parameters, gradients and optimizer states."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.training import LLAMA, Case, make_engine, train_steps

# 16 layers, so that embedding and head (7 % of it) can be evened out between four stages; four heads for four ranks.
MODEL = {**LLAMA, "vocab_size": 512, "num_hidden_layers": 16, "num_key_value_heads": 4, "intermediate_size": 192}


def held_bytes(case: Case) -> int:
    """Bytes of all tensors on this rank in the moment before the second update, activations gone; model alone."""
    gc.collect()
    before = _storages()  # held, so that none of its keys is given to what comes
    engine, ranks = make_engine(case)
    seen: list[int] = []

    def look() -> None:
        gc.collect()
        seen.append(sum(storage.nbytes() for key, storage in _storages().items() if key not in before))

    train_steps(case, engine, ranks, 0, 2, look)
    engine.close()
    return seen[-1]


def _storages() -> dict[int, torch.UntypedStorage]:
    """By a key that fake tensors, which torch.compile leaves in a rank, have as well."""
    found: dict[int, torch.UntypedStorage] = {}

    def add(tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
            if tensor.is_leaf and tensor.grad is not None:
                add(tensor.grad)

    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            add(thing)
    return found


# Buffers of a fixed size are no parameter, gradient or state: as small as DeepSpeed takes them, and nothing kept whole.
SMALL = {"reduce_bucket_size": 40_000, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
FORMS = {"zero3": {"stage": 3}, "tensor": {"tensor": 4}, "pipeline": {"pipeline": 4, "accumulation": 12}}


@pytest.mark.parametrize("form", ["zero3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("tensor", "pipeline"))])
def test_four_ranks_hold_a_quarter_each(pools, small_data, form):
    """Within 10 % of a quarter of what one process holds."""
    case = Case(data=small_data, model=MODEL, steps=2, **{"stage": 1, **FORMS[form]})
    zero = {"zero_optimization": {"stage": case.stage, **SMALL}}
    alone = pools(1).run(held_bytes, Case(data=small_data, model=MODEL, stage=case.stage, extra=zero, steps=2))[0]
    shared = pools(4).run(held_bytes, replace(case, extra=zero))
    assert max(shared) < 1.1 * alone / 4
