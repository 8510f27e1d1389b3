"""A feature's folder can be deleted: the rest imports, checks a configuration, trains, saves and resumes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launching import environment, write_recipe
from tests.helpers.marks import slow
from tools.without import FEATURES, Trials, copy, sets_of_features


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as trials:
        yield trials


@pytest.mark.parametrize("names", sets_of_features(), ids=" ".join)
def test_a_clone_without_the_features_trains(names: list[str], trials: Trials, small_data: str, tmp_path: Path) -> None:
    """Each feature is there without each other one in one of these sets: none needs another, and the core none."""
    assert trials.attempt(names, write_recipe(tmp_path, small_data)) == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_a_clone_without_one_feature_trains(name: str, trials: Trials, small_data: str, tmp_path: Path) -> None:
    assert trials.attempt([name], write_recipe(tmp_path, small_data)) == "passed"


OF_FEATURES_TOO = (
    "tests/unit/config/test_config_docs.py::test_every_command_on_the_pages",
    "tests/unit/config/test_json_schema.py::test_every_recipe_is_valid",
    "tests/unit/config/test_reader.py::test_a_beginner_is_answered",
    "tests/unit/config/test_recipes.py",
)
"""Tests of recipes and pages that name features, and of answers to other stacks' names."""


THAT_ASK_FEATURES = [
    *("tests/unit/" + part for part in ("commands", "config", "tracking", "training")),
    "tests/unit/test_cli.py",
]
"""Tests of what asks the registry of features most: sections, rules, commands, parts, metrics and pages."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tests", [THAT_ASK_FEATURES, slow(["tests/unit"])], ids=["some", "all"])
def test_the_units_of_the_core_pass_without_any_feature(tests: list[str], tmp_path: Path) -> None:
    copy(FEATURES, tmp_path / "clone")
    left_out = [word for each in OF_FEATURES_TOO for word in ("--deselect", each)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not (slow or more or cluster or sites or long)"]
    clone = environment(PYTHONPATH=str(tmp_path / "clone"))
    done = subprocess.run(
        [*command, *tests, *left_out], cwd=tmp_path / "clone", env=clone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
