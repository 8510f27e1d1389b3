"""Families that differ most in parallelism, against plain PyTorch in one process (docs/developers/families.md).

The worker, the reference and the tolerances are those of `llmtrain parity`.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from llmtrain.config.pages import OPTIONS, against, pair
from llmtrain.parity.worlds import report
from tests.helpers.parity import Form, Outcome, check

BALANCED = json.dumps({"output_router_logits": True, "router_aux_loss_coef": 0.1})
TELLING = [
    Form(pipeline=2, accumulation=3, family="gemma3", tied=True, steps=5),
    Form(sequence=2, zero=2, family="qwen2", isolate_documents=True, steps=5),
    Form(tensor=2, zero=1, family="qwen3_moe", precision="bf16", steps=5),
    Form(pipeline=2, tensor=2, zero=1, ranks=4, accumulation=2, family="qwen3", tied=True, steps=5),
    Form(expert=2, zero=1, family="mixtral", changes=BALANCED, accumulation=2, steps=5),
]
ROUTED = [
    Form(tensor=2, zero=1, family="afmoe", steps=6),
    Form(expert=2, zero=1, family="deepseek_v3", steps=6),
]


def form_of(sections: dict[str, dict[str, Any]]) -> Form:
    """Return the form of a pair of options, without the adapter's start and dropout, which a small copy lacks."""
    objective, model = sections.get("objective", {}), sections.get("model", {})
    adapter = {key: value for key, value in sections.get("adapter", {}).items() if key not in ("start", "dropout")}
    return Form(
        zero=2,
        adapter=json.dumps(adapter),
        objective=objective.get("name", "next_token"),
        reference=objective.get("reference", "column"),
        top_k=objective.get("top_k"),
        freeze=tuple(model.get("freeze", ())),
        train_only=tuple(model.get("train_only", ())),
        steps=4,
    )


PAIRS = [form_of(both) for one, other in combinations(OPTIONS, 2)
         if (both := pair(one, other)) is not None and not against(both)]  # fmt: skip
"""Each pair of options that go together by docs/adapters.md. What parity leaves out has proofs of its own: `start` and
`vocabulary` are first values (test_preference.py, test_online.py, test_vocabulary.py), `dropout` test_adapter.py."""


def passed(pools: Any, form: Form) -> Outcome:
    outcome = check(pools, form)
    assert outcome.verdict.passed, "\n".join(report(form.name, outcome.verdict, outcome.hint))
    return outcome


@pytest.mark.parametrize("form", TELLING, ids=lambda form: form.name)
def test_telling_cells(pools: Any, form: Form) -> None:
    passed(pools, form)


@pytest.mark.slow
@pytest.mark.needs("peft")
@pytest.mark.parametrize("form", dict.fromkeys(PAIRS), ids=lambda form: form.name)
def test_options_of_post_training_that_go_together(pools: Any, form: Form) -> None:
    passed(pools, form)


@pytest.mark.parametrize("form", ROUTED, ids=lambda form: form.name)
def test_tensors_that_do_not_train_are_held_against_plain_pytorch(pools: Any, form: Form) -> None:
    parameters = passed(pools, form).trace.parameters[0]
    biases = [name for name in parameters if name.endswith(("correction_bias", "expert_bias"))]
    assert len(biases) >= 3 and all(parameters[name].any() for name in biases)
