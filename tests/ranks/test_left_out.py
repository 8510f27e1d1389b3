"""An update that a part leaves out by the gradient's norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtrain.data.batches import MicroBatch
from tests.helpers.training import Case, make_engine, view_of

LENGTH = 32


def row(seed: int) -> MicroBatch:
    tokens = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(inputs=tokens, labels=tokens.roll(-1, 1), sequences=[seed])


def left_out(case: Case) -> tuple[list[bool], list[bool], bool, list[float]]:
    engine, _ = make_engine(case)
    batch = [row(seed) for seed in range(2)]
    updates, unchanged, asked = [], [], []
    for step in range(3):
        before = [view_of(piece).clone() for piece in engine.state()]
        engine.forward_backward(batch, lambda: 2 * LENGTH)

        def decide(norm: float, step: int = step) -> bool:
            asked.append(norm)
            return step == 1

        updates.append(engine.update(1.0, decide))
        unchanged.append(all(torch.equal(view_of(p), kept) for p, kept in zip(engine.state(), before, strict=True)))
    engine.close()
    alike = all(float(each.grad_norm) == pytest.approx(norm) for each, norm in zip(updates, asked, strict=True))
    return [each.left_out for each in updates], unchanged, alike, asked


@pytest.mark.parametrize(
    "form",
    [{"stage": 0}, {"stage": 0, "precision": "bf16"}, {"stage": 2}, {"stage": 3}],
    ids=lambda form: "-".join(f"{key}{value}" for key, value in form.items()),
)
def test_an_update_that_is_left_out_changes_nothing(pools: Any, small_data: str, form: dict[str, Any]) -> None:
    told, unchanged, alike, _ = pools(2).run(left_out, Case(data=small_data, **form))[0]
    assert told == [False, True, False] and unchanged == [False, True, False] and alike
