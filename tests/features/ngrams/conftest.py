"""Data of other tests."""

from tests.unit.data.test_data_loader import data, folder

__all__ = ["data", "folder"]
