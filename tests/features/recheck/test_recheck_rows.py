"""The part of a sequence that a check of the ranks' arithmetic computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.data.batches import MicroBatch
from llmtrain.data.sequences import IGNORED
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.features.recheck.part import Recheck


@pytest.mark.parametrize(
    ("rows", "sharing", "fp8", "prompt", "length"),
    [(1, 1, None, 0, 40), (2, 1, None, 0, 64), (1, 3, None, 0, 39), (1, 1, "tensorwise", 0, 32), (1, 1, None, 40, 64)],
)
def test_a_row_that_fills_a_micro_batch_is_cut(
    rows: int, sharing: int, fp8: str | None, prompt: int, length: int
) -> None:
    """Layers are not compiled in a check: a complete row would take more memory than in the step. Of 64 tokens, 40 are
    five eighths; a row stays complete where those have no counted label."""

    def micro(count: int) -> MicroBatch:
        tokens = torch.arange(64).repeat(count, 1)
        labels = torch.where(tokens < prompt, IGNORED, tokens + 1)
        return MicroBatch(inputs=tokens, labels=labels, sequences=[*range(count)], positions=tokens)

    loader = SimpleNamespace(
        build=lambda step: SimpleNamespace(micro_batches=[micro(rows)] * 4), row=lambda step, index: micro(1)
    )
    part: Any = object.__new__(Recheck)
    part._turn, part._data, part._replica = 0, 1, 1
    part._ranks = Ranks()
    degrees = SimpleNamespace(sequence=sharing)
    run = SimpleNamespace(model=SimpleNamespace(fp8=fp8))
    setup = SimpleNamespace(run=SimpleNamespace(mix=SimpleNamespace(degrees=degrees), config=run))
    part._launch = SimpleNamespace(loader=loader, setup=setup)
    micros = part._micro_batches(0)
    assert len(micros) == (3 if rows == 1 else 6)
    for each in micros:
        assert [tuple(t.shape) for t in (each.inputs, each.labels, each.positions)] == [(1, length)] * 3
        assert each.labels.equal(torch.where(each.inputs < prompt, IGNORED, each.inputs + 1))
