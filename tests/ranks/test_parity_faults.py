"""Faults seeded into the ranks: `parity` has to catch each of them, and to say what it looks like."""

from __future__ import annotations

import re
from typing import Any

import pytest

from llmtrain.parity.worlds import report
from tests.helpers.faults import FAULTS
from tests.helpers.marks import slow_but
from tests.helpers.parity import Form, check
from tests.helpers.ranks import RankFailed

STEPS = 4
DOUBLES = [
    "words_of_other_chances",
    "others_without_mass",
    "rewards_per_micro_batch",
    "pairs_per_micro_batch",
    "divergence_of_a_micro_batch",
    "frozen_score",
    "prompts_counted",
    "adapter_without_gradient",
    "lost_micro_batch",
    "raw_router_weights",
    "decayed_norms",
]
"""The same fault beside another objective, or one that another shows in the same place."""


@pytest.mark.slow  # any two settings of them pass in test_cells.py
@pytest.mark.parametrize("form", dict.fromkeys(Form(**fault.form, steps=STEPS) for fault in FAULTS.values()))
def test_the_same_without_a_fault(pools: Any, form: Form) -> None:
    clean = check(pools, form)
    assert clean.verdict.passed, report(form.name, clean.verdict, clean.hint)


@pytest.mark.parametrize("name", slow_but(FAULTS, [name for name in FAULTS if name not in DOUBLES]))
def test_a_fault_is_caught(pools: Any, name: str) -> None:
    fault = FAULTS[name]
    form = Form(**fault.form, steps=STEPS)
    if fault.refused:
        with pytest.raises(RankFailed, match=re.escape(fault.words)):
            check(pools, form, name)
        return
    outcome = check(pools, form, name)
    assert not outcome.verdict.passed
    assert fault.words in outcome.hint, outcome.hint
    text = "\n".join(report("fp32", outcome.verdict, outcome.hint))
    assert "FAIL" in text and "first parts at step" in text and fault.words in text
