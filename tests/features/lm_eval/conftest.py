"""The run of docs/evaluation.md."""

from tests.runs.test_multiple_choice import place

__all__ = ["place"]
