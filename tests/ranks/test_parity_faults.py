"""Faults seeded into the ranks: `parity` has to catch each of them, and to say what it looks like.

More than 20 CPU s: each of the faults is a training of its own on ranks that start anew.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from llmtrain.parity.worlds import report
from tests.helpers.faults import FAULTS
from tests.helpers.parity import check
from tests.helpers.ranks import RankFailed
from tests.helpers.training import Case

STEPS = 4


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(pools: Any, name: str) -> None:
    fault = FAULTS[name]
    form = Case(**fault.form, steps=STEPS)
    if fault.refused:
        with pytest.raises(RankFailed, match=re.escape(fault.words)):
            check(pools, form, name)
        return
    outcome = check(pools, form, name)
    assert not outcome.verdict.passed
    assert fault.words in outcome.hint, outcome.hint
    text = "\n".join(report("fp32", outcome.verdict, outcome.hint))
    assert "FAIL" in text and re.search(r"first parts at step \d+:", text) and fault.words in text
