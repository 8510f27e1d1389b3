"""Fixtures of other folders: a lab of three hosts, a run with checkpoints, and a base for adapters."""

from tests.cluster.conftest import lab3, running_lab, warm
from tests.runs.test_first_step import base
from tests.unit.checkpoint.conftest import run

__all__ = ["base", "lab3", "run", "running_lab", "warm"]
