"""The make target of each test, read from tests/targets.txt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "targets.txt"
MARKS = {"test": None, "test-all": "more", "test-cluster": "cluster", "test-sites": "sites"}
"""Target -> the marker by which the Makefile selects its tests."""


def name_of(item: pytest.Item) -> str:
    """Return the name that rows begin; helpers/seeded.py adds its faults to the names of pytest."""
    return item.nodeid


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark each test by the last row that fits."""
    rows = _rows()
    for item in items:
        test = name_of(item)
        fits = [target for name, target in rows if test == name or test.startswith(_longer(name))]
        if fits and (marker := MARKS[fits[-1]]) is not None:
            item.add_marker(marker)


def unused(items: Sequence[pytest.Item], folders: Sequence[Path]) -> list[str]:
    """Rows for these folders that no test fits."""
    root, names = TABLE.parents[1], [name_of(item) for item in items]
    rows = [row for row, _ in _rows() if any((root / row.partition("::")[0]).is_relative_to(at) for at in folders)]
    return [row for row in rows if not any(name == row or name.startswith(_longer(row)) for name in names)]


def _longer(name: str) -> tuple[str, ...]:
    """Return the beginnings of the tests in a folder, a file or a function, or of the cases that a row begins."""
    return (name,) if "[" in name else (f"{name}/", f"{name}::", f"{name}[")


def _rows() -> list[tuple[str, str]]:
    """(beginning of a name, target)."""
    found, target = [], ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("["):
            target = line.strip("[]")
        elif line and not line.startswith("#"):
            found.append((line, target))
    return found
