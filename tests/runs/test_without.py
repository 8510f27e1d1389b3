"""A feature's folder can be deleted: the rest imports, checks a configuration, trains, saves and resumes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launching import environment, write_recipe
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
    "tests/unit/config/test_migrate.py",
    "tests/unit/config/test_recipes.py",
)
"""Tests of recipes and pages that name features."""


THAT_ASK_FEATURES = [
    *(
        "tests/unit/" + part
        for part in ("checkpoint", "commands", "config", "parity", "reports", "tracking", "training")
    ),
    *("tests/unit/" + name for name in ("test_cli.py", "test_imports.py")),
]
"""Tests of the parts of the core that ask the registry of features."""


@pytest.mark.timeout(1800)
def test_the_units_of_the_core_pass_without_any_feature(tmp_path: Path) -> None:
    copy(FEATURES, tmp_path / "clone")
    left_out = [word for each in OF_FEATURES_TOO for word in ("--deselect", each)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not (slow or more or cluster or sites or long)"]
    command += [*THAT_ASK_FEATURES, *left_out]
    done = subprocess.run(command, cwd=tmp_path / "clone", env=environment(PYTHONPATH=str(tmp_path / "clone")),
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
