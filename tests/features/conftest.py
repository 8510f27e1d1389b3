"""Tests of features are of every kind: of units, of ranks, and of runs as tests/runs has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from tests.helpers.config_workplace import write
from tests.runs.conftest import _no_launch_outlives_its_test, warm

__all__ = ["_no_launch_outlives_its_test", "warm"]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[dict[str, Any]], str]:
    """What `config check` says of a run that it refuses, by the sections that are unlike the standard ones."""

    def check(run: dict[str, Any]) -> str:
        monkeypatch.chdir(tmp_path)
        write(tmp_path, run)
        assert main(["config", "check", "run.yaml", "--world-size=2"]) == 2
        return capsys.readouterr().err

    return check
