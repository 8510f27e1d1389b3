"""Bytes that ranks send in a step, counted at torch's collectives, are those that `doctor` reckons with."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmtrain.training.host_needs import sent_bytes
from tests.helpers.launching import REPO
from tests.helpers.training import LLAMA, Case, make_engine, resolved_run, train_steps

_PASSES = {"allreduce_": 2, "reduce_": 1, "_reduce_scatter_base_": 1, "_allgather_base_": 1}
"""How often a ring passes (P - 1) / P of the whole tensor. Gloo's own ways differ: it scatters by an all-reduce."""


class Sent(TorchDispatchMode):
    """Bytes that a rank of a ring would send for the collectives within it, in the mean over the ranks."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.bytes, self._share = 0.0, (ranks - 1) / ranks

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            whole = max(x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            self.bytes += _PASSES[operator.overloadpacket.__name__] * self._share * whole
        return operator(*args, **(kwargs or {}))


def sent_in_a_step(case: Case) -> float:
    engine, ranks = make_engine(case)
    train_steps(case, engine, ranks, 0, 2)
    with Sent(ranks.world_size) as sent:
        train_steps(case, engine, ranks, 2, 4)
    engine.close()
    return sent.bytes / 2


def shipped(stage: int, **more: int) -> dict[str, Any]:
    """The sums and the section of ZeRO in the shipped JSON, with which small parameters are split, too."""
    tree = json.loads((REPO / f"ds_configs/zero{stage}.json").read_text())
    zero = {**tree["zero_optimization"], **more, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    return {key: tree[key] for key in ("data_types", "communication_data_type")} | {"zero_optimization": zero}


NOTHING_STAYS = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
"""Between the forward and the backward pass, as of a model of many times a billion elements."""


@pytest.mark.parametrize(
    ("stage", "precision", "extra"),
    [
        pytest.param(0, "fp32", {"zero_optimization": {"stage": 0}}, id="zero0"),
        *(pytest.param(stage, "bf16", shipped(stage), id=f"zero{stage}-shipped") for stage in (1, 2, 3)),
        pytest.param(3, "bf16", shipped(3, **NOTHING_STAYS), id="zero3-as-a-large-model"),
    ],
)
def test_a_step_sends_what_is_reckoned_with(pools, small_data, stage, precision, extra):
    case = Case(data=small_data, stage=stage, steps=4, accumulation=3, precision=precision, extra=extra,
                model={**LLAMA, "hidden_size": 256, "intermediate_size": 512})  # fmt: skip
    sent = statistics.mean(pools(2).run(sent_in_a_step, case))
    assert sent == pytest.approx(sent_bytes(resolved_run(case, 2)), rel=0.01)
