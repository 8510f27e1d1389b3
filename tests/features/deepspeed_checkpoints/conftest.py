"""`llmtrain checkpoint ...`, as the core's tests call it."""

from tests.unit.checkpoint.conftest import say

__all__ = ["say"]
