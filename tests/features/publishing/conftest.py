"""The Hub of the core's tests."""

from tests.unit.storage.test_hub import hub, tiny

__all__ = ["hub", "tiny"]
