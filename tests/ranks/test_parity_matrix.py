"""Every form of parallelism x every family x tied and untied, against plain PyTorch in one process.

The worker, the reference and the tolerances are those of `llmtrain parity`. Most cells are slow tests.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from llmtrain.base.errors import UserError
from llmtrain.config.pages import OPTIONS, against, pair
from llmtrain.parity.worlds import report
from tests.helpers.families import EXPERTS, FAMILIES, FROZEN, VARIANTS
from tests.helpers.parity import Form, check
from tests.helpers.ranks import RankFailed

pytestmark = pytest.mark.needs("peft")

FORMS = {
    "pp2": Form(pipeline=2, accumulation=3),
    "tp2": Form(tensor=2, zero=1),
    "sp2": Form(sequence=2, zero=2),
    "pp2-dp2": Form(pipeline=2, zero=1, ranks=4, accumulation=2),
    "tp2-dp2": Form(tensor=2, zero=3, ranks=4),
    "sp2-dp2": Form(sequence=2, zero=3, ranks=4),
    "pp2-tp2": Form(pipeline=2, tensor=2, zero=1, ranks=4, accumulation=2),
    "ep2": Form(expert=2, zero=1),
    "dp4": Form(zero=3, ranks=4, accumulation=2),
}
ODD = {
    "uneven heads": {"family": "gqa_uneven"},
    "three micro-batches": {"accumulation": 3},
    "documents": {"isolate_documents": True},
    "biases": {"family": "llama_biases"},
}

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}


def refusal(form: Form) -> str | None:
    """Words of the reason for which a cell is refused; None: it has to pass."""
    if form.expert > 1 and form.family not in EXPERTS:
        return "expert"
    if form.tensor > 1 and form.family == "gqa_uneven":
        return "num_key_value_heads is 3"
    return None


def run(pools: Any, form: Form) -> None:
    if (reason := refusal(form)) is not None:
        with pytest.raises((UserError, RankFailed), match=reason):
            check(pools, form)
        return
    outcome = check(pools, form)
    assert outcome.verdict.passed, "\n".join(report(form.name, outcome.verdict, outcome.hint))


TELLING = [
    replace(FORMS["pp2"], family="gemma3", tied=True),
    replace(FORMS["sp2"], family="qwen2", isolate_documents=True),
    replace(FORMS["tp2"], family="qwen3_moe", precision="bf16"),
    replace(FORMS["pp2-tp2"], family="qwen3", tied=True),
    replace(FORMS["ep2"], family="mixtral", changes=json.dumps(BALANCED), accumulation=2),
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
TELLING = [replace(form, steps=5) for form in TELLING]  # `test_matrix` has the same forms for 20
TELLING_SLOW = [
    replace(
        FORMS["ep2"],
        family="glm4_moe",
        extra=json.dumps({"expert_parallel": {"autoep_size": 2, "preset_model": "deepseek_v3"}}),
        steps=6,
    ),
    replace(FORMS["pp2-dp2"], family="gpt2", isolate_documents=True),
    replace(FORMS["tp2"], family="stablelm", precision="bf16"),
    replace(FORMS["sp2-dp2"], family="gemma2", precision="bf16"),
    *dict.fromkeys(PAIRS),
    replace(FORMS["dp4"], family="opt"),
]


@pytest.mark.parametrize(
    "form",
    [*TELLING, *(pytest.param(form, marks=pytest.mark.slow) for form in TELLING_SLOW)],
    ids=lambda form: form.name,
)
def test_telling_cells(pools: Any, form: Form) -> None:
    run(pools, form)


ROUTED = {**FORMS, "zero0": Form(), "zero2": Form(zero=2), "zero3": Form(zero=3), "ep2-zero3": Form(expert=2, zero=3)}
ROUTED_FIRST = [("tp2", "afmoe"), ("ep2", "deepseek_v3")]


@pytest.mark.parametrize(
    ("form", "family"),
    [
        *ROUTED_FIRST,
        *(
            pytest.param(form, family, marks=pytest.mark.slow)
            for form in ROUTED
            for family in FROZEN
            if (form, family) not in ROUTED_FIRST
        ),
    ],
)
def test_tensors_that_do_not_train_are_held_against_plain_pytorch(pools: Any, form: str, family: str) -> None:
    cell = replace(ROUTED[form], family=family, steps=6)
    if "ep2" in form and family != "deepseek_v3":
        with pytest.raises((UserError, RankFailed), match=r"expert_parallel\.autoep_size"):
            check(pools, cell)
        return
    outcome = check(pools, cell)
    assert outcome.verdict.passed, "\n".join(report(cell.name, outcome.verdict, outcome.hint))
    biases = [name for name in outcome.trace.parameters[0] if name.endswith(("correction_bias", "expert_bias"))]
    assert len(biases) >= 3 and all(outcome.trace.parameters[0][name].any() for name in biases)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_matrix(pools: Any, form: str, family: str, tied: bool) -> None:
    run(pools, replace(FORMS[form], family=family, tied=tied))


ADAPTERS = {
    "full": {},
    "LoRA": {"adapter": '{"r": 4, "alpha": 8.0}'},
    "DoRA": {"adapter": '{"r": 4, "alpha": 8.0, "dora": true}'},
}
WAYS = {f"zero{stage}": Form(zero=stage) for stage in range(4)} | {way: FORMS[way] for way in ("pp2", "tp2", "sp2")}


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "ep2"])
def test_odd_models_and_batches(pools: Any, form: str, odd: str) -> None:
    run(pools, replace(FORMS[form], **ODD[odd]))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", ["pp2", "tp2", "sp2"])
def test_variants(pools: Any, form: str, variant: str) -> None:
    run(pools, replace(FORMS[form], family=variant))
