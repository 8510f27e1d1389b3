"""Families that differ most in parallelism, against plain PyTorch in one process (docs/developers/families.md).

The worker, the reference and the tolerances are those of `llmtrain parity`.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from llmtrain.parity.worlds import report
from tests.helpers.families import FAMILIES, FROZEN, tied
from tests.helpers.parity import Outcome, check
from tests.helpers.training import Case
from tools.pages import OPTIONS, against, pair

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
TELLING = [
    Case(pipeline=2, accumulation=3, model=tied(FAMILIES["gemma3"]), steps=5),
    Case(sequence=2, stage=2, model=FAMILIES["qwen2"], isolate_documents=True, steps=5),
    Case(tensor=2, stage=1, model=FAMILIES["qwen3_moe"], precision="bf16", steps=5),
    Case(pipeline=2, tensor=2, stage=1, ranks=4, accumulation=2, model=tied(FAMILIES["qwen3"]), steps=5),
    Case(expert=2, stage=1, model=FAMILIES["mixtral"] | BALANCED, accumulation=2, steps=5),
]
ROUTED = [
    Case(tensor=2, stage=1, model=FROZEN["afmoe"], steps=6),
    Case(expert=2, stage=1, model=FROZEN["deepseek_v3"], steps=6),
]


def form_of(sections: dict[str, dict[str, Any]]) -> Case:
    """Return the form of a pair of options, without the adapter's start and dropout, which a small copy lacks."""
    objective, model = sections.get("objective", {}), sections.get("model", {})
    adapter = {key: value for key, value in sections.get("adapter", {}).items() if key not in ("start", "dropout")}
    return Case(
        stage=2,
        model=FAMILIES["llama"],
        adapter=adapter,
        objective={key: objective[key] for key in ("name", "reference", "top_k") if key in objective},
        freeze=tuple(model.get("freeze", ())),
        train_only=tuple(model.get("train_only", ())),
        steps=4,
    )


PAIRS = [
    form_of(both)
    for one, other in combinations(OPTIONS, 2)
    if (both := pair(one, other)) is not None and not against(both)
]
"""Each pair of options that go together by docs/adapters.md. What parity leaves out has proofs of its own: `start` and
`vocabulary` are first values (test_preference.py, test_online.py, test_vocabulary.py), `dropout` test_adapter.py."""


def passed(pools: Any, form: Case) -> Outcome:
    outcome = check(pools, form)
    assert outcome.verdict.passed, "\n".join(report(form.name, outcome.verdict, outcome.hint))
    return outcome


@pytest.mark.parametrize("form", TELLING, ids=lambda form: form.name)
def test_telling_cells(pools: Any, form: Case) -> None:
    passed(pools, form)


@pytest.mark.slow
@pytest.mark.needs("peft")
@pytest.mark.parametrize("form", {repr(form): form for form in PAIRS}.values(), ids=lambda form: form.name)
def test_options_of_post_training_that_go_together(pools: Any, form: Case) -> None:
    passed(pools, form)


@pytest.mark.parametrize("form", ROUTED, ids=lambda form: form.name)
def test_tensors_that_do_not_train_are_held_against_plain_pytorch(pools: Any, form: Case) -> None:
    parameters = passed(pools, form).trace.parameters[0]
    biases = [name for name in parameters if name.endswith(("correction_bias", "expert_bias"))]
    assert len(biases) >= 3 and all(parameters[name].any() for name in biases)
