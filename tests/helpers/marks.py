"""Which cases every run of the tests has, and which are doubles of a proof: those are slow tests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """A case that `make test-slow` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def slow_but(cases: Collection[Any], first: Collection[Any]) -> list[Any]:
    """All cases of one parameter; those that are not in `first` are slow."""
    assert all(case in cases for case in first), [case for case in first if case not in cases]
    return [case if case in first else slow(case) for case in cases]
