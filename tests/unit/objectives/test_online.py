"""What a reference that is computed at each step asks of a run."""

from __future__ import annotations

from typing import Any

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.config.objective import check_objective
from llmtrain.config.problems import Problems
from llmtrain.config.run import AdapterConfig, RunConfig
from llmtrain.objectives.objective import Objective

pytestmark = pytest.mark.needs("peft")


@pytest.mark.parametrize(
    ("name", "adapter", "words"),
    [
        ("dpo", {}, "with its adapter switched off, and the run has none"),
        ("dpo", {"r": 4, "alpha": 8.0, "start": "folder"}, "without the adapter of adapter.start"),
    ],
)
def test_what_has_no_such_reference_is_refused(name: Any, adapter: dict[str, Any], words: str) -> None:
    problems = Problems()
    objective = Objective.of(name, reference="online")
    run = RunConfig(deepspeed="ds.json", adapter=AdapterConfig(**adapter), objective=objective)
    check_objective(run, problems)
    with pytest.raises(ConfigError) as error:
        problems.raise_if_any()
    assert "objective.reference" in str(error.value) and words in str(error.value)


def test_it_wants_no_column() -> None:
    run = RunConfig(deepspeed="ds.json", adapter=AdapterConfig(r=4, alpha=8.0),
                    objective=Objective.of("kto", reference="online"))  # fmt: skip
    check_objective(run, problems := Problems())
    problems.raise_if_any()
    assert run.objective.reference == "online" and Objective.of("kto").reference == "column"
