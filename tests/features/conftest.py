"""Tests of features are of every kind: of units, of ranks, and of runs as tests/runs has them."""

from tests.runs.conftest import _no_launch_outlives_its_test, warm

__all__ = ["_no_launch_outlives_its_test", "warm"]
