"""Compiled decoder layers: static shapes, one graph for each kind of layer, the losses of plain PyTorch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmtrain.engine.ranks.ranks import AgreedError
from llmtrain.models import compiler
from llmtrain.models.spec import ModelSpec
from llmtrain.training import setup
from tests.helpers.compiled import gathered_layers, graphs_of, inductor_in, varlen_as_on_cuda
from tests.helpers.training import (
    LLAMA,
    Case,
    Trace,
    assert_agrees,
    joined,
    make_engine,
    plain_pytorch,
    resolved_run,
    run_case,
)
from tests.ranks.test_experts import DBRX

TWO_KINDS = {
    **LLAMA,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


CHECKPOINTED = {"activation_checkpointing": {"partition_activations": False}}


@pytest.mark.parametrize(
    ("changes", "kinds", "evaluated"),
    [
        ({"model": TWO_KINDS}, 2, 2),
        ({"extra": CHECKPOINTED}, 1, 1),
        ({"recompute": {"layers": 2}}, 2, 2),  # one with recomputation, one without
        ({"recompute": {"layers": "all", "keep": "attention"}}, 1, 1),
        ({"isolate_documents": True}, 1, 1),
    ],
    ids=["two kinds", "recomputed", "half recomputed", "attention kept", "documents"],
)
def test_each_kind_of_layer_is_one_graph_of_fixed_sizes(pools, small_data, changes, kinds, evaluated):
    """Four layers. The start-up checks have other shapes, and compile nothing."""
    case = Case(data=small_data, stage=1, accumulation=3, steps=4, compile_layers=True, **changes)
    (graphs,) = pools(1).run(graphs_of, case)
    assert [symbols for _, symbols in graphs] == [[]] * len(graphs)
    assert [gradients for gradients, _ in graphs] == [True] * kinds + [False] * evaluated


def test_so_is_each_kind_of_layer_of_a_pipelines_stage(pools, small_data):
    case = Case(data=small_data, stage=1, accumulation=3, pipeline=2, steps=4, compile_layers=True)
    assert pools(2).run(graphs_of, case) == [[(True, []), (False, [])]] * 2


def test_documents_of_any_layout_share_one_graph_of_varlen_attention(pools, small_data):
    """Once eight graphs in three steps, and no compiled layer any more: each micro-batch has other documents.

    The code is CUDA's; its losses and norms are those of plain PyTorch with masks (fp32, another order of sums)."""
    model = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256}
    case = Case(
        data=small_data,
        stage=1,
        accumulation=3,
        steps=4,
        model=model,
        length=256,
        attention="varlen",
        isolate_documents=True,
        compile_layers=True,
    )
    ((graphs, got),) = pools(1).run(varlen_as_on_cuda, case)
    assert graphs == 1
    want = plain_pytorch(replace(case, attention="sdpa"))
    assert_agrees(got, want, loss=5e-6, norm=1e-5)


FORMS = {
    "plain": {},
    "recomputed": {"extra": CHECKPOINTED},
    "adapter": {"adapter": {"r": 8}},
}


@pytest.mark.needs("peft")
@pytest.mark.parametrize(
    ("attention", "stage", "form"),
    [("sdpa", 1, "plain"), ("sdpa", 2, "adapter"), ("varlen", 2, "recomputed"), ("varlen", 3, "adapter")],
)
def test_all_layers_of_eight_steps_are_one_graph(pools, small_data, attention, stage, form):
    """Whatever the documents of a micro-batch are. torch.compile gives up after eight graphs."""
    model = {**LLAMA, "num_hidden_layers": 3, "max_position_embeddings": 128}
    case = Case(
        data=small_data,
        stage=stage,
        accumulation=3,
        steps=8,
        model=model,
        length=128,
        attention=attention,
        isolate_documents=True,
        compile_layers=True,
        **FORMS[form],
    )
    ((graphs, trace),) = pools(1).run(varlen_as_on_cuda, case, "eager")
    assert graphs == 1
    assert len(trace.losses) == 8


def compiled_run(case: Case, cache: str) -> tuple[Trace, int]:
    """(what it left, graphs that inductor compiled for this machine)."""
    with pytest.MonkeyPatch.context() as patch, inductor_in(Path(cache)):
        patch.setattr(compiler, "_answers", {})
        trace = run_case(case)
        return trace, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]


def test_compiled_layers_have_the_losses_of_plain_pytorch(pools, small_data, tmp_path):
    case = Case(data=small_data, stage=2, steps=5, model={**LLAMA, "num_hidden_layers": 2})
    (want,) = pools(1).run(run_case, case)
    ((got, graphs),) = pools(1).run(compiled_run, replace(case, compile_layers=True), str(tmp_path))
    assert graphs == 3  # the trial of the compiler; for both layers one forward, one backward
    for a, b in ((got.losses, want.losses), (got.norms, want.norms)):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 2e-6  # fp32; another order of sums
    assert got.norms != want.norms, "the layers were not compiled"


_LAYER = 43_136
"""Elements of a layer of LLAMA."""


@pytest.mark.parametrize(
    ("ahead", "changes"),
    [
        pytest.param(0, {}, marks=pytest.mark.slow),
        (_LAYER, {"extra": {"activation_checkpointing": {}}}),
        (0, {"recompute": {"layers": "all", "keep": "attention"}}),
        (0, {"freeze": ("model.embed_tokens.*", "model.layers.0.*")}),
        pytest.param(0, {"adapter": {"r": 8}}, marks=pytest.mark.needs("peft")),
    ],
    ids=["plain", "recomputed", "attention kept", "frozen", "adapter"],
)
def test_zero_3_gathers_around_a_compiled_layer(pools, small_data, ahead, changes):
    """A graph for all layers, which keeps no weight for the backward pass. Of what is gathered ahead, the layer that
    the backward pass begins with is there already. Behind frozen embeddings DeepSpeed let a layer go before its
    backward pass, which ended in an error; so did torch's selective checkpointing, compiled or not, which saw other
    gathers in the recomputation."""
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 10,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": ahead,
        "stage3_max_live_parameters": 2 * ahead,
    }
    extra = {"zero_optimization": zero, **changes.get("extra", {})}
    case = Case(data=small_data, stage=3, accumulation=3, steps=4, **{**changes, "extra": extra})
    want, _ = pools(2).run(run_case, case)
    for got in pools(2).run(gathered_layers, replace(case, compile_layers=True)):
        kinds = 2 if case.freeze else 1  # a layer without gradients is another
        assert (got.graphs, got.breaks) == ([True] * kinds, {})
        assert got.gathered > 4 * 3 * 4 * 4 * _LAYER * 0.99  # steps, micro-batches, layers, bytes
        assert set(got.alive[1:]) == {4 * ahead}
        assert got.late[1:] == [0, 0, 0] if ahead else min(got.late) >= _LAYER
        for a, b in ((got.trace.losses, want.losses), (got.trace.norms, want.norms)):
            assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 2e-6  # fp32; another order of sums


def started(case: Case, answers: list[str | None]) -> tuple[str, bool]:
    """(what the start of an engine says, whether anything may be compiled afterwards), by what each rank can do."""
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_answers", {"cpu": answers[int(os.environ["RANK"])]})
        said = ""
        try:
            make_engine(case)[0].close()
        except AgreedError as error:
            said = str(error)
        dist.barrier()
        return said, compiler.trouble(torch.device("cpu")) is None


def test_what_one_rank_cannot_compile_is_compiled_on_none(pools, small_data):
    case = Case(data=small_data, stage=1, compile_layers=True)
    for said, compiles in pools(2).run(started, case, [None, "no g++"]):
        assert not compiles
        assert "model.compile_layers" in said and "no g++" in said and "null" in said


@pytest.mark.parametrize(
    ("changes", "compiles"),
    [
        ({}, True),
        ({"precision": "bf16", "stage": 2, "extra": CHECKPOINTED}, True),
        ({"stage": 3}, True),
        ({"extra": {"activation_checkpointing": {"cpu_checkpointing": True}}}, False),
        ({"mlp_tile_tokens": 8}, False),
        ({"tensor": 2}, False),
        ({"sequence": 2}, False),
        ({"model": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}}, False),
        ({"model": DBRX}, False),  # whose configuration has other names, and whose experts other shapes
        ({"compile_layers": False}, False),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_whether_a_gpu_compiles_layers_unasked(pools, small_data, changes, compiles):
    case = Case(data=small_data, **{"stage": 1, "compile_layers": None, **changes})
    assert pools(2).run(decided_on_cuda, case, None) == [compiles] * 2
    assert pools(2).run(decided_on_cuda, case, "no gcc") == [False] * 2
    assert pools(2).run(decided_on_cuda, case, None, False) == [False] * 2


def decided_on_cuda(case: Case, trouble: str | None, one_shape: bool = True) -> bool:
    ranks = replace(joined(), device=torch.device("cuda"))
    run = resolved_run(case, ranks.world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_answers", {"cuda": trouble})
        return setup._compiles_layers(ModelSpec.of(run.config.model), run.mix, ranks, one_shape=one_shape)
