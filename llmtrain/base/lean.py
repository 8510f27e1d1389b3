"""Imports without packages that a run does not use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(package: str) -> Iterator[None]:
    """Context in which Python does not find a package, unless it is already imported.

    DeepSpeed's autotuner imports mlflow wherever it is installed: one CPU second in each process.
    """
    if hidden := package not in sys.modules:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]
