"""Which cases every run of the tests has, and which are doubles of a proof: those are slow tests."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """A case that `make test-slow` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)
