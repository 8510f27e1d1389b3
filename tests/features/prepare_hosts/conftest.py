"""A lab of three hosts."""

from tests.cluster.conftest import lab3, running_lab, warm

__all__ = ["lab3", "running_lab", "warm"]
