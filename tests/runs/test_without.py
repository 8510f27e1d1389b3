"""A feature's folder can be deleted: the rest imports, checks a configuration, trains, saves and resumes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launching import environment, write_recipe
from tools.without import FEATURES, Trials, copy


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as trials:
        yield trials


@pytest.mark.parametrize("name", [*FEATURES, "all"])
def test_a_clone_without_the_feature_trains(name: str, trials: Trials, small_data: str, tmp_path: Path) -> None:
    assert trials.attempt(FEATURES if name == "all" else [name], write_recipe(tmp_path, small_data)) == "passed"


OF_FEATURES_TOO = (
    "tests/unit/config/test_config_docs.py::test_every_command_on_the_pages",
    "tests/unit/config/test_json_schema.py::test_every_recipe_is_valid",
    "tests/unit/config/test_migrate.py",
    "tests/unit/config/test_recipes.py",
)
"""Tests of recipes and pages that name features."""


@pytest.mark.timeout(1800)
def test_the_units_of_the_core_pass_without_any_feature(tmp_path: Path) -> None:
    copy(FEATURES, tmp_path / "clone")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not (slow or more or cluster or sites or long)",
               "tests/unit", *(word for each in OF_FEATURES_TOO for word in ("--deselect", each))]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path / "clone", env=environment(PYTHONPATH=str(tmp_path / "clone")),
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
