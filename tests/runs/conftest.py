"""A run that a failed test leaves behind would slow down every test after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.forked import LAUNCHED
from tests.helpers.warm import WarmCommands


@pytest.fixture(autouse=True)
def _no_launch_outlives_its_test() -> Iterator[None]:
    yield
    while LAUNCHED:
        for rank in LAUNCHED.pop().ranks:
            rank.kill()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmCommands]:
    """`llmtrain` commands without their imports."""
    with WarmCommands(tmp_path_factory.mktemp("warm")) as commands:
        yield commands
