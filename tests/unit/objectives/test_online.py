"""What a reference that is computed at each step asks of a run."""

from __future__ import annotations

import pytest

from llmtrain.config.pages import BASE
from llmtrain.config.problems import Problems
from llmtrain.config.reader import read
from llmtrain.config.rules import check_values
from llmtrain.config.run import RunConfig
from llmtrain.objectives.objective import Objective

pytestmark = pytest.mark.needs("peft")


def test_it_wants_no_column() -> None:
    chosen = {"adapter": {"r": 4, "alpha": 8.0}, "objective": {"name": "kto", "reference": "online"}}
    run = read(RunConfig, {**BASE, **chosen}, "", problems := Problems())
    check_values(run, problems)
    problems.raise_if_any()
    assert run.objective.reference == "online" and Objective.of("kto").reference == "column"
