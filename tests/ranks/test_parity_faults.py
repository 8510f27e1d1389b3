"""Faults seeded into the ranks: `parity` has to catch each of them, and to say what it looks like."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from llmtrain.parity.worlds import report
from tests.helpers.faults import FAULTS
from tests.helpers.marks import slow_but
from tests.helpers.parity import Form, Outcome, check
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


@pytest.fixture(scope="module")
def without_fault(pools: Any) -> Callable[[Form], Outcome]:
    """The outcome of a form, trained once for all faults that are seeded into it."""
    return cache(partial(check, pools))


@pytest.mark.parametrize("name", slow_but(FAULTS, [name for name in FAULTS if name not in DOUBLES]))
def test_a_fault_is_caught(pools: Any, without_fault: Callable[[Form], Outcome], name: str) -> None:
    fault = FAULTS[name]
    form = Form(**fault.form, steps=STEPS)
    clean = without_fault(form)
    assert clean.verdict.passed, report(name, clean.verdict, clean.hint)
    if fault.refused:
        with pytest.raises(RankFailed, match=re.escape(fault.words)):
            check(pools, form, name)
        return
    outcome = check(pools, form, name)
    assert not outcome.verdict.passed
    assert fault.words in outcome.hint, outcome.hint
    text = "\n".join(report("fp32", outcome.verdict, outcome.hint))
    assert "FAIL" in text and "first parts at step" in text and fault.words in text
