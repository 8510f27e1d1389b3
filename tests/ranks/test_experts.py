"""Mixtures of experts under ZeRO, and with experts that ranks share, against plain PyTorch in one process, fp32.

Tolerances as in test_parity.py: both sides differ in the order of summation only.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.base.errors import UserError
from llmtrain.base.log import rank
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.models import experts
from llmtrain.models.parallel import expert_parallel
from llmtrain.models.parallel.deepspeed_private import TravellingTokens
from llmtrain.models.routing import RoutingFigures
from tests.gpu.test_syncs import recorded_waits
from tests.helpers.families import FAMILIES, FROZEN, VARIANTS
from tests.helpers.training import (
    GLOBAL_BATCH,
    LENGTH,
    Case,
    Trace,
    assembled,
    assert_agrees,
    batches,
    make_engine,
    plain_pytorch,
    run_case,
    train_steps,
)
from tests.unit.models.test_experts import Launches

ALL = {**FAMILIES, **VARIANTS, **FROZEN}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
"""So large a coefficient that a wrong factor on the loss shows in the first step."""


@functools.cache
def reference(data: str, family: str, balanced: bool, accumulation: int, steps: int, clip: float) -> Trace:
    fields = {**FAMILIES[family], **(BALANCED if balanced else {})}
    return plain_pytorch(Case(data=data, model=fields, accumulation=accumulation, steps=steps, clip=clip))


def check(pools: Any, data: str, world: int, family: str, balanced: bool = True, **changes: Any) -> None:
    changes = {"steps": 5, "clip": 1.0, "accumulation": 1, **changes}
    # Without the balancing loss a step is the same however it is accumulated.
    pieces = changes["accumulation"] if balanced else 1
    want = reference(data, family, balanced, pieces, changes["steps"], changes["clip"])
    fields = {**FAMILIES[family], **(BALANCED if balanced else {})}
    got = pools(world).run(run_case, Case(data=data, model=fields, **changes))[0]
    assert_agrees(got, want, loss=1e-5, norm=1e-4, parameters=1e-5)


@pytest.mark.parametrize(
    ("world", "family", "changes"),
    [
        (1, "qwen3_moe", {"stage": 0, "accumulation": 3}),
        (2, "mixtral", {"stage": 3}),
        (2, "mixtral", {"stage": 1, "tensor": 2}),
    ],
)
def test_the_balancing_loss_does_not_know_how_many_ranks_there_are(pools, small_data, world, family, changes):
    check(pools, small_data, world, family, **changes)


@pytest.mark.parametrize(
    ("world", "family", "balanced", "changes"),
    [
        (2, "mixtral", False, {"stage": 0, "clip": 0.2}),  # the norm of all experts decides by how much all are clipped
        (4, "mixtral", True, {"stage": 2, "accumulation": 3, "clip": 0.2}),
        (2, "qwen3_moe", True, {"stage": 3, "sequence": 2}),
        (4, "mixtral", True, {"stage": 1, "sequence": 2, "clip": 0.2}),
        (4, "qwen3_moe", False, {"stage": 1, "pipeline": 2, "accumulation": 3, "clip": 0.2}),
    ],
)
def test_two_ranks_share_the_experts(pools, small_data, world, family, balanced, changes):
    check(pools, small_data, world, family, balanced, expert=2, **changes)


def test_a_stage_of_a_pipeline_may_have_no_experts(pools, small_data):
    model = {**FAMILIES["qwen3_moe"], "mlp_only_layers": [0, 1]}
    case = Case(data=small_data, model=model, stage=1, pipeline=2, partition=(2, 2), expert=2, accumulation=3, clip=0.2)
    want = plain_pytorch(replace(case, accumulation=1))
    got = pools(4).run(run_case, case)[0]
    assert_agrees(got, want, loss=1e-5, norm=1e-4, parameters=1e-5)


class ListedExperts(nn.ModuleList):
    """Experts as modules of their own, as in older models and in code that folders carry."""

    def __init__(self, config: Any) -> None:
        sizes = config.hidden_size, config.intermediate_size
        super().__init__(nn.ModuleList([nn.Linear(*sizes), nn.Linear(*sizes[::-1])]) for _ in range(4))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number, (up, down) in enumerate(self):  # type: ignore[misc]
            token, place = torch.where(index == number)
            if len(token):  # an expert that nobody chose does not run
                out = out.index_add(0, token, down(F.silu(up(hidden[token]))) * weights[token, place, None])
        return out


LISTED = {**FAMILIES["mixtral"], "hidden_act": "silu"}


def with_listed_experts(patch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    # DeepSpeed knows Mixtral's block by its name; ours has another.
    unknown = type("UnknownBlock", (modeling_mixtral.MixtralSparseMoeBlock,), {})
    patch.setattr(modeling_mixtral, "MixtralSparseMoeBlock", unknown)
    patch.setattr(modeling_mixtral, "MixtralExperts", ListedExperts)
    patch.setattr(modeling_mixtral.MixtralPreTrainedModel, "_init_weights", lambda self, module: spread(module))


@torch.no_grad()
def spread(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(0.1)


def train_with_choices(case: Case) -> tuple[Trace, list[str], list[int]]:
    """The tokens of the batch's first half choose experts 0 and 1, the others 1 and 2; nobody chooses 3.

    Two ranks have a half each: each rank leaves two experts idle, one of them busy on the other rank.
    """
    from deepspeed.utils import get_z3_leaf_modules

    with pytest.MonkeyPatch.context() as patch:
        with_listed_experts(patch)
        prefer(patch, [[0, 1], [1, 2]] if int(os.environ["WORLD_SIZE"]) == 1 else [[0, 1], [1, 2]][rank() :][:1])
        engine, ranks = make_engine(case)
        trace = train_steps(case, engine, ranks, 0, case.steps)
        trace.parameters = assembled(engine, ranks)
        leaves = [type(module).__name__ for module in get_z3_leaf_modules(engine.module)]
        figures = routed(engine, ranks)
        engine.close()
        return trace, leaves, [sum(column) for column in zip(*figures.tokens_LE, strict=True)]


def prefer(patch: pytest.MonkeyPatch, choices: list[list[int]]) -> None:
    """Equal shares of the tokens, in their order, go to these experts."""
    from transformers.models.mixtral import modeling_mixtral

    def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        index = torch.tensor(choices).repeat_interleave(len(logits) // len(choices), 0)
        weights = logits.softmax(-1).gather(1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index

    patch.setattr(modeling_mixtral.MixtralTopKRouter, "forward", forward)


def test_ranks_that_choose_different_experts_do_not_wait_for_each_other(pools, small_data):
    """DeepSpeed #7461: without leaf modules the ranks gather different experts, and wait for each other for ever."""
    case = Case(data=small_data, model=LISTED, stage=3, steps=3)
    (want, _, counted), *_ = pools(1).run(train_with_choices, Case(data=small_data, model=LISTED, steps=3))
    for got, leaves, tokens in pools(2).run(train_with_choices, case, timeout_s=60):
        assert leaves == ["UnknownBlock"] * 4
        assert_agrees(got, want, loss=1e-5, norm=1e-4, parameters=1e-6)
        half = 3 * 4 * GLOBAL_BATCH * LENGTH // 2  # steps, layers, half of the tokens
        assert tokens == counted == [half, 2 * half, half, 0]


JETMOE = {
    "model_type": "jetmoe",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "kv_channels": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
"""Its attention never calls its block of experts, but two methods of it."""


def as_a_leaf(case: Case) -> str:
    """What a first step says where the block is one that ZeRO 3 gathers when it is called."""
    from deepspeed.utils import set_z3_leaf_module

    def mark(_: nn.Module, blocks: list[experts.ExpertBlock]) -> None:
        for block in blocks:
            set_z3_leaf_module(block.module, True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "set_leaf_modules", mark)
        engine, ranks = make_engine(case)
        try:
            train_steps(case, engine, ranks, 0, 1)
        except UserError as error:
            return str(error)
    return "nothing"


def test_zero_3_has_the_gradients_of_a_block_that_is_never_called(pools, small_data):
    """On a GPU, DeepSpeed drops what it did not take, and says nothing."""
    want = plain_pytorch(Case(data=small_data, model=JETMOE, steps=3))
    got = pools(2).run(run_case, case := Case(data=small_data, model=JETMOE, stage=3, steps=3))[0]
    assert_agrees(got, want, loss=1e-5, parameters=1e-5)
    for text in pools(2).run(as_a_leaf, case):
        assert "ZeRO 3" in text and "8 parameters" in text and ".self_attention.experts." in text


DBRX = {
    "model_type": "dbrx",
    "vocab_size": 512,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 64, "moe_top_k": 1},
}
"""All experts lie below each other in one matrix, and a module without parameters calls one that has them."""


def test_zero_3_waits_for_nobody_where_ranks_choose_other_experts_of_a_matrix_of_two_dimensions(pools, small_data):
    """Each call of a chosen expert gathered its matrix, and the ranks waited in two collectives."""
    case = Case(data=small_data, model=DBRX, stage=3, sequence=2, steps=3)
    want = plain_pytorch(replace(case, stage=0, sequence=1))
    got = pools(2).run(run_case, case)[0]
    assert_agrees(got, want, loss=1e-5, parameters=1e-4)  # an expert of a token or two: Adam divides


def refused_list(case: Case) -> str:
    with pytest.MonkeyPatch.context() as patch:
        with_listed_experts(patch)
        return refusal(case)


def test_experts_without_a_gradient_are_refused_where_deepspeed_mixes_them_up(pools, small_data):
    """In ZeRO 1 and 2 the test above ends with gradients of one expert in another: parameters part by 9e-4."""
    for text in pools(2).run(refused_list, Case(data=small_data, model=LISTED, stage=2)):
        assert "model.layers.0.mlp " in text and "zero_optimization.stage" in text


def routed(engine: Any, ranks: Ranks) -> RoutingFigures:
    """Since the last call."""
    found: RoutingFigures = engine.module.routing.take(ranks.sum, counts=engine.mesh.place.tensor == 0)
    return found


def routing_of(case: Case) -> tuple[float, list[list[int]]]:
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 1)
    figures = routed(engine, ranks)
    engine.evaluate(next(batches(case, (0, 1), 1)).micro_batches)
    again = routed(engine, ranks)  # nothing was trained since: what an evaluation routes does not count
    engine.close()
    assert not any(map(any, again.tokens_LE))
    return figures.aux_loss, figures.tokens_LE


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"expert": 2, "stage": 1}),
        (2, {"expert": 2, "stage": 2, "sequence": 2}),
        (4, {"tensor": 2, "accumulation": 3}),
    ],
)
def test_tokens_of_experts_are_those_of_one_process(pools, small_data, world, changes):
    case = Case(data=small_data, model=FAMILIES["mixtral"])
    want_loss, want = pools(1).run(routing_of, Case(data=small_data, model=FAMILIES["mixtral"]))[0]
    assert [sum(row) for row in want] == [2 * GLOBAL_BATCH * LENGTH] * 4  # two experts a token
    for loss, tokens in pools(world).run(routing_of, Case(data=case.data, model=case.model, **changes)):
        assert tokens == want
        assert loss == pytest.approx(want_loss, rel=1e-2 if "accumulation" in changes else 1e-6)


def refusal(case: Case) -> str:
    try:
        make_engine(case)
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("model", "extra", "says"),
    [
        ({**FAMILIES["mixtral"], "num_local_experts": 3}, {}, "num_experts=3 .*autoep_size=2"),
        (FAMILIES["llama"], {}, "LlamaForCausalLM .*experts"),
        (ALL["laguna"], {}, "presets"),
        (ALL["glm4_moe"], {}, r"expert_parallel\.preset_model .*deepseek_v3"),
        (
            ALL["laguna"],
            {"expert_parallel": {"preset_model": "deepseek_v3"}},
            "'deepseek_v3'.* laguna .*: .* off by",
        ),
        (
            ALL["ernie4_5_moe"],
            {"expert_parallel": {"preset_model": "mixtral"}},
            "ernie4_5_moe .*RuntimeError: Index tensor",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_on_all_ranks(pools, small_data, model, extra, says):
    for text in pools(2).run(refusal, Case(data=small_data, model=model, expert=2, stage=1, extra=extra)):
        assert re.search(says, text), text


def grouped_products(case: Case) -> int:
    """Of a step."""
    engine, ranks = make_engine(case)
    counted = Launches()
    with counted:
        train_steps(case, engine, ranks, 0, 1)
    engine.close()
    return counted.ran["_grouped_mm"]


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({"stage": 3, "extra": {"activation_checkpointing": {}}}, 8),  # of two products: 2 forward, 4 backward
        ({"stage": 1, "expert": 2}, 9),  # gate and up apart
        ({"stage": 1, "tensor": 2}, 6),
        ({"stage": 1, "pipeline": 2}, 3),  # two layers on each stage
        ({"stage": 2, "model": {**FAMILIES["mixtral"], "intermediate_size": 50}}, 0),  # rows of 200 bytes
        ({"stage": 1, "pipeline": 2, "model": {**FAMILIES["mixtral"], "intermediate_size": 50}}, 0),
    ],
)
def test_experts_are_grouped_products_in_every_form(pools, small_data, changes, passes):
    """The loop over the experts where torch's product refuses their width: with stages it ended in torch's error."""
    case = Case(data=small_data, **{"model": FAMILIES["mixtral"], **changes})
    assert pools(2).run(grouped_products, case) == [4 * passes] * 2


def launches_of_a_step(case: Case) -> tuple[Counter[str], list[str]]:
    """(operators of a step, the last operator before each wait for numbers of tokens, and what was asked then: whether
    they are there), with the kernel's way to sort what came: DeepSpeed's for a CPU reads each number."""
    from deepspeed.moe import ep_kernels

    def as_the_kernel(
        counts: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, experts: int, ranks: int, length: int
    ) -> torch.Tensor:
        places = torch.arange(length)
        begin_ER = offsets[:, None] + counts.view(ranks, experts).T.cumsum(1) - counts.view(ranks, experts).T
        inside = places - begin_ER.reshape(-1, 1)
        there = (inside >= 0) & (inside < counts.view(ranks, experts).T.reshape(-1, 1))
        rows = starts.view(ranks, experts).T.reshape(-1, 1) + inside
        return torch.where(there, rows, 0).sum(0).add(~there.any(0) * -1).int()

    engine, ranks = make_engine(case)
    counted, before = Launches(), list[str]()
    announce = TravellingTokens._announce

    def announced(block: Any, counts: torch.Tensor, choices: int) -> Any:
        came, numbers = announce(block, counts, choices)

        def waited() -> list[list[int]]:
            before.append(counted.last)
            return numbers()

        return came, waited

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep_kernels, "fill_indices_cpu", as_the_kernel)
        patch.setattr(TravellingTokens, "_announce", announced)
        with counted:
            train_steps(case, engine, ranks, 0, 1)
    engine.close()
    return counted.ran, before


def test_shared_experts_are_as_many_launches_however_many_there_are_and_one_wait_a_layer(pools, small_data):
    """The wait is behind the sorted tokens, which are queued by then."""
    found = []
    for count in (4, 16):
        model = {**FAMILIES["mixtral"], "num_local_experts": count}
        case = Case(data=small_data, model=model, stage=1, expert=2, steps=1)
        ran, before = pools(2).run(launches_of_a_step, case)[0]
        assert before == ["index"] * 4
        found.append(ran)
    assert found[0] == found[1]
    assert found[0]["_grouped_mm"] > 0 and not any(found[0][name] for name in ("nonzero", "bincount", "_unique2"))


def waits_of_a_step(case: Case) -> dict[str, int]:
    engine, ranks = make_engine(case)
    found: Counter[str] = Counter()
    with recorded_waits(found):
        train_steps(case, engine, ranks, 0, 1)
    engine.close()
    return dict(found)


def test_watching_the_routers_never_waits_for_the_device(pools, small_data):
    """What a CPU does at once would be an operator that waits on a GPU: none is in the code that watches."""
    case = Case(data=small_data, model={**FAMILIES["mixtral"], **BALANCED}, stage=1, accumulation=2)
    for waits in pools(2).run(waits_of_a_step, case):
        assert not [where for where in waits if "experts.py" in where], waits
