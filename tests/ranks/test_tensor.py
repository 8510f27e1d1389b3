"""Tensor parallelism against plain PyTorch in one process, fp32, 5 steps.

Tolerance: shards are summed in another order than one product sums them, nothing else differs. A loss near 6 has a
spacing of 5e-7; what 5 to 20 steps of AdamW make of that is seen to stay below 2e-6 in all families.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmtrain.config.topology import Degrees
from llmtrain.engine.ranks.ranks import AgreedError
from llmtrain.models import compiler, loss
from llmtrain.models.loss import About, HeadForm, chunked_nll_sums
from llmtrain.models.parallel.mesh import mesh_of
from llmtrain.models.parallel.tensor import Span, VocabularyShard
from llmtrain.training.setup import Setup, check_head
from llmtrain.training.step import seed_step
from tests.helpers.families import FAMILIES, HYBRID, LOW_RANK, VARIANTS, tied
from tests.helpers.training import (
    LENGTH,
    Case,
    Trace,
    assert_agrees,
    batches,
    examined,
    joined,
    make_engine,
    plain_pytorch,
    resolved_run,
    run_case,
    train_steps,
)

MODELS = {**FAMILIES, **VARIANTS, "deepseek_v2": LOW_RANK, "qwen3_5": HYBRID}


def case_of(data: str, family: str = "llama", tie: bool = False, **form: Any) -> Case:
    attention = "eager" if family == "gemma2" else "sdpa"
    return Case(data=data, model=tied(MODELS[family], tie), **{"attention": attention, "tensor": 2, **form})


@functools.cache
def reference(data: str, family: str, tie: bool, clip: float = 1.0, isolate: bool = False) -> Trace:
    return plain_pytorch(case_of(data, family, tie, clip=clip, isolate_documents=isolate))


def check(got: Trace, want: Trace) -> None:
    assert_agrees(got, want, loss=5e-6, norm=1e-5, parameters=2e-5)
    assert min(want.norms) > 0.1  # it does train


def test_micro_batches_of_unequal_length_and_clipping(pools, small_data):
    """Grouped-query attention, three micro-batches of unequal length, clipping that bites at every step."""
    case = case_of(small_data, stage=0, accumulation=3, clip=0.05)
    check(pools(2).run(run_case, case)[0], reference(small_data, "llama", False, 0.05))


def refused(case: Case) -> str:
    """The error of a start in which rank 1 has found no attention that ranks can share."""
    ranks, (run, spec, data) = joined(), examined(resolved_run(case, 2))
    found = spec.projections
    if ranks.rank == 1:
        maps = tuple(each for each in found.maps if "mlp" in each.path)
        spec.__dict__["projections"] = replace(found, maps=maps, note="the attention is complete")
    try:
        Setup(run, spec, data, ranks)
    except AgreedError as error:
        return str(error)
    return ""


def test_ranks_that_would_share_different_parts(pools, small_data):
    for said in pools(2).run(refused, case_of(small_data, stage=3)):
        assert "autotp_size 2" in said
        assert re.search("Rank 0: 28 linear maps.*Rank 1: 12 linear maps.*the attention is complete", said), said


TELLING = {
    "gpt2": 0,  # weights the other way round, query, key and value in one
    "gpt_neox": 1,  # the same head by head
    "phi3": 2,  # sections of unequal size, head counts that are read from the config
    "qwen3": 3,  # norms of each head: each rank has a part of their gradient
    "olmo2": 3,  # norms across all heads
    "stablelm_full": 1,  # a norm module for each head
    "opt": 3,  # biases that must be added once, a padding row
    "gemma2": 1,  # capped logits, scaled embedding
    "qwen3_moe": 3,  # experts, some layers without
    "deepseek_v2": 1,  # low-rank attention, a key that all heads share
    "qwen3_5": 3,  # recurrent layers, which stay whole
}


@pytest.mark.parametrize("family", TELLING)
def test_families(pools, small_data, family):
    case = case_of(small_data, family, True, stage=TELLING[family])
    check(pools(2).run(run_case, case)[0], reference(small_data, family, True))


def test_with_other_ranks(pools, small_data):
    """Two groups of two: other sequences, or other parts of them."""
    case = case_of(small_data, stage=2, accumulation=3, family="llama_biases", steps=6)
    check(pools(4).run(run_case, case)[0], plain_pytorch(case))


def test_three_ranks_share_an_odd_vocabulary(pools, small_data):
    """517 words do not divide by 3; 3 key/value heads do."""
    model = {**MODELS["gqa_uneven"], "intermediate_size": 96, "tie_word_embeddings": True}
    case = Case(data=small_data, model=model, tensor=3, stage=1, steps=6)
    check(pools(3).run(run_case, case)[0], plain_pytorch(case))


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_documents_stay_apart(pools, small_data, attention):
    case = case_of(small_data, stage=1, isolate_documents=True, attention=attention)
    check(pools(2).run(run_case, case)[0], reference(small_data, "llama", False, isolate=True))


def what_ranks_hold(case: Case) -> tuple[dict[str, torch.Tensor], list[float], float, int, list[int]]:
    """After three steps: what all ranks of a group hold, losses, and an evaluation; the samples of the first batch."""
    engine, ranks = make_engine(case)
    place = mesh_of(engine.mesh.degrees).place
    seed_step(0, 0, ranks.rank // case.tensor)
    trace = train_steps(case, engine, ranks, 0, 3)
    held = engine.module.local_parameters()
    common = {p.name: p.parameter.detach().clone() for p in held if p.copy[1] > 1}
    batch = next(batches(case, (place.data, engine.mesh.degrees.data), 1))
    figures, tokens = engine.evaluate(batch.micro_batches)
    check_head(engine, torch.arange(LENGTH).unsqueeze(0))
    engine.close()
    return common, trace.losses, figures["loss"], tokens, batch.micro_batches[0].sequences


def test_ranks_of_a_group_see_the_same_rows(pools, small_data):
    results = pools(4).run(what_ranks_hold, case_of(small_data, stage=1))
    samples = [result[4] for result in results]
    assert samples[0] == samples[1] != samples[2] == samples[3]
    assert sorted(samples[0] + samples[2]) == list(range(12))
    counted = sum((1 + (index * 7) % (LENGTH - 1)) for index in range(12))
    assert {result[3] for result in results} == {counted}  # each row is counted once
    assert len({result[2] for result in results}) == 1


DROPPING = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


def test_dropout_keeps_the_ranks_together(pools, small_data):
    """What all ranks compute they drop alike, or the parameters that all of them hold would drift apart."""
    model = {**FAMILIES["gpt2"], **DROPPING}
    case = replace(case_of(small_data, "gpt2", stage=1), model=model)
    (here, losses, *_), (there, other_losses, *_) = pools(2).run(what_ranks_hold, case)
    assert len(here) > 10
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert losses == other_losses
    without = reference(small_data, "gpt2", False).losses
    assert abs(losses[0] - without[0]) > 1e-4
    recomputed = replace(case, extra={"activation_checkpointing": {}})
    again = pools(2).run(what_ranks_hold, recomputed)[0][1]
    assert max(abs(a - b) for a, b in zip(again, losses, strict=True)) < 2e-6  # the same was dropped


def drawn() -> list[list[float]]:
    """Random numbers before, within, after, within and after shared stretches; then the first stretch again."""
    joined()
    span = Span(dist.group.WORLD, dropout=True)
    numbers = []
    for _ in range(2):
        torch.manual_seed(7)
        numbers.append(torch.rand(3).tolist())
        for _ in range(2):
            span.enter(torch.zeros(1), training=True)
            numbers.append(torch.rand(3).tolist())
            span.leave()
            numbers.append(torch.rand(3).tolist())
    return numbers


def test_each_rank_drops_other_things_of_its_own(pools):
    here, there = pools(2).run(drawn)
    assert [a == b for a, b in zip(here, there, strict=True)] == [True, False, True, False, True] * 2
    assert here[:5] == here[5:]
    assert len({tuple(numbers) for numbers in here}) == 5


def vocabulary_loss(form: HeadForm, total: int, way: str, dtype: torch.dtype) -> float:
    """Largest relative difference to the whole loss with a z-loss: sums, gradients of the input, weight and bias."""
    with pytest.MonkeyPatch.context() as patch, compiler.uncompiled():
        patch.setattr(loss, "_elementwise", lambda device: getattr(loss, way))
        return _vocabulary_loss(form, total, dtype)


def _vocabulary_loss(form: HeadForm, total: int, dtype: torch.dtype) -> float:
    ranks = joined()
    group = mesh_of(Degrees(tensor=ranks.world_size)).tensor
    words = VocabularyShard.of(total, group)
    torch.manual_seed(3)
    hidden, weight, bias = (torch.randn(size).to(dtype) for size in ((2, 9, 16), (total, 16), (total,)))
    labels = torch.randint(0, total, (2, 9))
    labels[0, 3:5] = -100
    rows = slice(words.first, words.first + words.count)
    whole = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    share = [tensor.clone().requires_grad_() for tensor in (hidden, weight[rows], bias[rows])]
    about = About(4, form, z_loss=0.1)
    want = chunked_nll_sums(*whole, labels, about)
    got = chunked_nll_sums(words.shared(share[0]), *share[1:], labels, about._replace(vocabulary=words))
    (want[0] * 0.3).backward()
    (got[0] * 0.3).backward()
    pairs = [(want, got), (whole[0].grad, share[0].grad), (whole[1].grad[rows], share[1].grad)]
    pairs += [(whole[2].grad[rows], share[2].grad)]
    logits = words.logits(hidden, share[1].detach(), share[2].detach())
    pairs += [(hidden @ weight.T + bias, logits)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("form", [HeadForm(), HeadForm(scale=0.5, softcap=3.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("way", ["_in_place", "_fused"])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_the_loss_over_a_shared_vocabulary(pools, form, way, dtype, rounding):
    """13 words over 2 ranks; over 4, the last ranks have 3 each. What a GPU compiles is plain PyTorch here.

    Of the largest element. In bf16, which has 8 bits, each rank rounds its part of the hidden states' gradient.
    """
    assert max(pools(2).run(vocabulary_loss, form, 13, way, dtype)) < rounding
    assert max(pools(4).run(vocabulary_loss, form, 13, way, dtype)) < rounding
