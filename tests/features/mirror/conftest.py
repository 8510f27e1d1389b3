"""Servers of object stores."""

from tests.unit.storage.test_drivers import protocol

__all__ = ["protocol"]
