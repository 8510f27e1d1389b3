"""A feature's folder can be deleted: the rest imports, checks a configuration, trains, saves and resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import environment, write_recipe
from tools.without import FEATURES, attempt, copy


@pytest.mark.parametrize("name", [*FEATURES, "all"])
def test_a_clone_without_the_feature_trains(name: str, small_data: str, tmp_path: Path) -> None:
    attempt(FEATURES if name == "all" else [name], write_recipe(tmp_path, small_data))


@pytest.mark.parametrize("words", [("tests/unit/test_imports.py",), ("tests/unit", "--collect-only")], ids=str)
def test_the_units_of_the_core_import_no_feature(words: tuple[str, ...], tmp_path: Path) -> None:
    copy(FEATURES, tmp_path / "clone")
    command = [sys.executable, "-m", "pytest", "-q", *words]
    done = subprocess.run(command, cwd=tmp_path / "clone", env=environment(PYTHONPATH=str(tmp_path / "clone")),
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
