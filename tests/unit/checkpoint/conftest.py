"""What the tests of the checkpoint commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain import cli
from tests.helpers.checkpoints import write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 100, 200 and 300."""
    for step in (100, 200, 300):
        write_checkpoint(tmp_path / "run", step, seed=step)
    return tmp_path / "run"


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`llmtrain checkpoint ...`: exit code, standard output, standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        code = cli.main(["checkpoint", *map(str, words)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call
