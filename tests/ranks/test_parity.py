"""Every form of data-parallel training against plain PyTorch in one process, fp32, 20 steps.

Tolerance: both sides compute in fp32 and differ in the order of summation only. A loss near 6 has a spacing of
5e-7, and 20 steps amplify that little. A parameter whose gradient nearly cancels is where AdamW amplifies rounding
most: its update is g / |g|, so an error of lr x (rounding / |g|) per step; at lr 3e-4 that stays below 1e-5.
"""

from __future__ import annotations

import functools

import pytest

from tests.helpers.training import LLAMA, Case, Trace, assert_agrees, plain_pytorch, run_case


@functools.cache
def reference(data: str, tied: bool) -> Trace:
    return plain_pytorch(Case(data=data, model={**LLAMA, "tie_word_embeddings": tied}, steps=20))


FORMS = [(1, 3, 3), (4, 1, 3)]
"""(Ranks, ZeRO stage, accumulation). test_cells.py lacks one rank, and four that share no row."""


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_loss_and_parameters_agree(pools, small_data, form):
    world_size, stage, accumulation = form
    want = reference(small_data, False)
    got = pools(world_size).run(run_case, Case(data=small_data, stage=stage, accumulation=accumulation, steps=20))[0]
    assert_agrees(got, want, loss=1e-5, norm=1e-4, parameters=1e-5)
    assert want.losses[-1] < want.losses[0] - 0.1  # it does learn
