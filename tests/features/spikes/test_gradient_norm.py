"""The gradient norms of single rows by `Engine.gradients`, against plain PyTorch, one row at a time."""

from __future__ import annotations

import math
import traceback
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.data.batches import MicroBatch
from llmtrain.data.stream.loader import StepBatch
from llmtrain.engine.losses.function import NEXT_TOKEN
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.spikes import looks
from llmtrain.features.spikes.looks import GradientCopy, gradient_norm
from llmtrain.models.loss import IGNORE
from llmtrain.models.routing import unwatched
from tests.helpers.families import FAMILIES
from tests.helpers.training import Case, case_degrees, make_engine, one_step, plain_model, view_of

ROWS, LENGTH = 4, 32


def row(index: int, vocabulary: int = 64) -> MicroBatch:
    tokens = torch.randint(0, vocabulary, (1, LENGTH), generator=torch.Generator().manual_seed(index))
    labels = tokens.roll(-1, 1)
    labels[:, : 8 * index] = IGNORE  # rows of unequal weight
    return MicroBatch(inputs=tokens, labels=labels, sequences=[index])


WEIGHT = sum(int((row(index).labels != IGNORE).sum()) for index in range(ROWS))


def empty() -> MicroBatch:
    return replace(row(0), labels=torch.full((1, LENGTH), IGNORE), sequences=[])


class Widened(TorchDispatchMode):
    """Notes the most elements of a float64 tensor that the look at gradients makes. DeepSpeed's ZeRO 3 has its own."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        looks = any(frame.name == "look" for frame in traceback.extract_stack(limit=6))
        if looks and isinstance(made, torch.Tensor) and made.dtype == torch.float64:
            self.most = max(self.most, made.numel())
        return made


def looked(engine: Any, ranks: Ranks, mine: list[int]) -> tuple[list[float], list[float]]:
    """(norms of the batch and of each row, shares of the rows), with pieces of 1,000 elements: the embedding of a large
    model, widened as a whole, took more memory than the step that follows leaves."""
    with patch.object(looks, "_AT_ONCE", 1000), Widened() as widened:
        found = _looked(engine, ranks, mine)
    assert 1 < widened.most <= 1000
    return found


def _looked(engine: Any, ranks: Ranks, mine: list[int]) -> tuple[list[float], list[float]]:
    copy = GradientCopy()
    micros = [row(index) for index in mine]
    whole, own = gradient_norm(engine, ranks, micros, WEIGHT, NEXT_TOKEN, copy_into=copy)
    assert own == pytest.approx(whole * whole)
    norms, shares = [whole], []
    for index in range(ROWS):
        micro = row(index) if index in mine else empty()
        with unwatched(engine.module):
            norm, product = gradient_norm(engine, ranks, [micro], WEIGHT, NEXT_TOKEN, times=copy)
        norms.append(norm)
        shares.append(product / whole**2)
    return norms, shares


def made(case: Case) -> tuple[Any, Ranks, list[int]]:
    """(engine, ranks, rows of this rank)."""
    engine, ranks = make_engine(case)
    degrees = case_degrees(case, ranks.world_size)
    return engine, ranks, list(range(degrees.place(ranks.rank).data, ROWS, degrees.data))


def first_weights(case: Case) -> tuple[list[float], list[float]]:
    engine, ranks, mine = made(case)
    found = looked(engine, ranks, mine)
    engine.close()
    return found


def measured(case: Case) -> tuple[list[float], list[float], bool, float]:
    """After a step: (norms, shares, True if looking changes no state, norm of the next step)."""
    engine, ranks, mine = made(case)
    batch = StepBatch(micro_batches=[row(index) for index in mine], first_index=0, sequences=ROWS)
    one_step(engine, batch, WEIGHT)  # so that there are moments
    before = [view_of(piece).clone() for piece in engine.state()]
    norms, shares = looked(engine, ranks, mine)
    same = all(torch.equal(view_of(piece), kept) for piece, kept in zip(engine.state(), before, strict=True))
    _, update = one_step(engine, batch, WEIGHT)
    engine.close()
    return norms, shares, same, float(update.grad_norm)


def plain(case: Case) -> tuple[list[float], list[float]]:
    """At the first weights."""
    model = plain_model(case)
    gradients = []
    for index in range(ROWS):
        micro = row(index)
        logits = model(input_ids=micro.inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0].float(), micro.labels[0], reduction="sum")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(loss / WEIGHT, trained, allow_unused=True, materialize_grads=True)
        gradients.append(torch.cat([each.reshape(-1).double() for each in found]))
    whole = torch.stack(gradients).sum(0)
    shares = [float(each @ whole / (whole @ whole)) for each in gradients]
    return [float(whole.norm()), *(float(each.norm()) for each in gradients)], shares


@pytest.mark.parametrize(
    "form",
    [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2, "offload": "optimizer"},
        {"stage": 3},
        {"stage": 1, "pipeline": 2},
        {"stage": 1, "tensor": 2},
        {"stage": 1, "sequence": 2},
        {"stage": 1, "expert": 2, "model": FAMILIES["mixtral"]},
    ],
    ids=lambda form: "-".join(f"{key}{value}" for key, value in form.items() if key != "model"),
)
def test_rows_have_the_norms_and_shares_of_plain_pytorch(pools: Any, small_data: str, form: dict[str, Any]) -> None:
    """In fp32; 1e-5 is rounding."""
    case = Case(data=small_data, clip=0.01, **form)
    norms, shares = pools(2).run(first_weights, case)[0]
    want_norms, want_shares = plain(case)
    assert norms == pytest.approx(want_norms, rel=1e-5)
    assert shares == pytest.approx(want_shares, abs=1e-5) and math.fsum(shares) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "form",
    [{"stage": 0}, {"stage": 0, "precision": "bf16"}, {"stage": 1}, {"stage": 3}, {"stage": 1, "pipeline": 2}],
    ids=lambda form: "-".join(f"{key}{value}" for key, value in form.items()),
)
def test_looking_changes_nothing(pools: Any, small_data: str, form: dict[str, Any]) -> None:
    """Neither parameters nor moments, and the next step has the gradient that was looked at."""
    norms, shares, same, norm = pools(2).run(measured, Case(data=small_data, **form))[0]
    assert same and norm == pytest.approx(norms[0], rel=1e-5)
    assert math.fsum(shares) == pytest.approx(1, abs=1e-5 if "precision" not in form else 0.02)
