"""Sequence parallelism against plain PyTorch in one process, fp32: ranks that share each row, and tiled MLPs.

Tolerances: as in test_parity.py; loss 2e-5 is allowed for sequence parallelism, 1e-6 is what is seen. Labels are
counted up to an uneven length in each row, so some ranks have columns without a counted token.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from llmtrain.training.setup import check_head, check_isolation
from tests.helpers.families import FAMILIES, VARIANTS, tied
from tests.helpers.ranks import RankFailed
from tests.helpers.training import LLAMA, Case, Trace, assert_agrees, make_engine, plain_pytorch, run_case

ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}
LONG = {**VARIANTS["phi3_longrope"], "original_max_position_embeddings": 16}
LONG["rope_parameters"] = {**LONG["rope_parameters"], "original_max_position_embeddings": 16}
"""Its angles change beyond 16 of a row's 32 positions, of which a rank has 16."""


@functools.cache
def reference(data: str) -> Trace:
    return plain_pytorch(Case(data=data))


def close(got: Trace, want: Trace, loss: float = 2e-5) -> bool:
    assert_agrees(got, want, loss=loss, norm=1e-4, parameters=5e-5)
    return True


def agrees(pools: Any, world_size: int, case: Case) -> bool:
    return close(pools(world_size).run(run_case, case)[0], plain_pytorch(case))


def test_two_ranks_share_each_row(pools, small_data):
    got = pools(2).run(run_case, Case(data=small_data, sequence=2, stage=1, accumulation=1))[0]
    assert close(got, reference(small_data))


def test_zero_3_averages_alike_whatever_way_it_reduces(pools, small_data):
    """DeepSpeed's two ways of ZeRO 3 divide by different numbers when they are told of sequence-parallel ranks."""
    zero = {"zero_optimization": {"stage": 3, "reduce_scatter": False}}
    got = pools(2).run(run_case, Case(data=small_data, sequence=2, stage=3, extra=zero))[0]
    assert close(got, reference(small_data))


@pytest.mark.parametrize(
    "form",
    [
        {"sequence": 4, "stage": 2},  # two key/value heads for four ranks
        {"sequence": 2, "tensor": 2, "stage": 1},
    ],
    ids=str,
)
def test_four_ranks(pools, small_data, form):
    assert close(pools(4).run(run_case, Case(data=small_data, **form))[0], reference(small_data))


def test_ranks_without_a_counted_token(pools, small_data):
    """Micro-batches of one row: most have all their counted tokens in the first rank's columns."""
    assert agrees(pools, 2, Case(data=small_data, sequence=2, stage=3, accumulation=12, steps=2))


def family_case(data: str, model: dict[str, Any], **changes: Any) -> Case:
    attention = "eager" if model["model_type"] == "gemma2" else "sdpa"
    return Case(
        **{"data": data, "sequence": 2, "stage": 1, "steps": 6, "model": model, "attention": attention, **changes}
    )


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (FAMILIES["gemma2"], {}),  # caps, windows in every other layer, eager masks
        (FAMILIES["gemma3"], {"stage": 3, "isolate_documents": True}),  # two kinds of rotary angles
        (FAMILIES["gpt2"], {"stage": 0}),  # learned positions, tied
        (FAMILIES["qwen3_moe"], {"stage": 3}),
        (LONG, {}),
        (tied(LLAMA), {"stage": 3, "isolate_documents": True}),
    ],
    ids=["gemma2", "gemma3 documents", "gpt2", "qwen3_moe", "longrope", "tied documents"],
)
def test_families(pools, small_data, model, changes):
    assert agrees(pools, 2, family_case(small_data, model, **changes))


@pytest.mark.parametrize(
    "form",
    [
        {"stage": 0},
        {"stage": 2, "accumulation": 3},
        {"stage": 3, "extra": ON_HOST},
        {"stage": 3, "extra": ON_HOST, "sequence": 2},
    ],
    ids=str,
)
def test_tiled_mlps(pools, small_data, form):
    """Seven tokens at a time: rows of a micro-batch and a rank's columns are no multiple of it."""
    got = pools(2).run(run_case, Case(data=small_data, mlp_tile_tokens=7, **form))[0]
    assert close(got, reference(small_data))


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_model_that_attends_across_documents_is_refused(pools, small_data, sequence):
    """transformers' OPT makes its mask without positions."""
    case = Case(data=small_data, sequence=sequence, stage=3, model=FAMILIES["opt"], isolate_documents=True)
    with pytest.raises(RankFailed, match="attention mask without positions"):
        pools(2).run(make_engine, case)


def checked_at_the_start(case: Case, fault: str) -> str:
    """What a run's check of its loss says when a part of sequence parallelism is missing."""
    from llmtrain.base.errors import ModelError
    from llmtrain.models.parallel import sequence

    own = sequence._see_the_last_position
    if fault == "angles":
        sequence._see_the_last_position = lambda rotary, exchange: None
    try:
        engine, _ = make_engine(case)
        with torch.no_grad():  # as small as they begin, attention is nearly the same for all positions
            for parameter in engine.module.parameters():
                parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
        if fault == "positions":
            base = engine.module.hf.base_model
            plain = base.forward
            base.forward = lambda *args, position_ids=None, **kwargs: plain(
                *args, position_ids=None if position_ids is None else position_ids - position_ids[:, :1], **kwargs
            )
        check_head(engine, torch.arange(32).unsqueeze(0) + 40)
        check_isolation(engine, torch.arange(32).unsqueeze(0) + 40)
    except ModelError as error:
        return str(error)
    finally:
        sequence._see_the_last_position = own
    engine.close()
    return ""


@pytest.mark.parametrize("fault", ["", "positions", "angles"])
def test_a_run_begins_with_a_proof_that_sharing_rows_changes_nothing(pools, small_data, fault):
    answers = pools(2).run(checked_at_the_start, Case(data=small_data, sequence=2, stage=1, model=LONG), fault)
    assert all(("wrong loss" in answer) if fault else answer == "" for answer in answers), answers
