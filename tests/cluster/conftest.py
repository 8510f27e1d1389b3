"""A lab of three hosts for the tests here; without one they are skipped, and say why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.warm import WarmCommands
from tools.lab.lab import Lab, why_not


@pytest.fixture(scope="module")
def running_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts for a module. They see pytest's temporary folders; the rest of /tmp is each host's own."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Lab(3, tmp_path_factory.mktemp("lab"), share=[tmp_path_factory.getbasetemp()]) as lab:
        yield lab


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmCommands]:
    """Commands without their imports, for the hosts of a lab, too."""
    with WarmCommands(tmp_path_factory.mktemp("warm"), Path(sys.executable)) as commands:
        yield commands


@pytest.fixture
def lab3(running_lab: Lab) -> Lab:
    """Three healthy hosts: node-1, node-2, node-3. Powered off and on, about a second, after a test that used them."""
    if running_lab.used:
        running_lab.reset()
    running_lab.used = True
    return running_lab
