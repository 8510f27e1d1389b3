"""Object stores in tests: what is fetched from them, what lies in them, and stores that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain.storage import object_store
from llmtrain.storage.object_store import Store


def fetched_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cache of the test's own, stores that are asked once, and a list that gets the names of fetched files."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    monkeypatch.setattr(object_store, "_PAUSES_S", ())
    names: list[str] = []
    get = Store.get

    def counted(self: Store, name: str, path: Path) -> None:
        names.append(name)
        get(self, name, path)

    monkeypatch.setattr(Store, "get", counted)
    return names


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class CutOffError(OSError):
    """A store that is gone."""


class Failing:
    """A store of which the n-th upload, download or deletion fails, before anything, in the middle, or behind it."""

    def __init__(self, files: Any, fails_at: int, how: str) -> None:
        self._files, self._left, self._how = files, fails_at, how

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)
        if name not in ("put_file", "get_file", "rm", "rm_file"):
            return method

        def call(*given: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left:
                return method(*given, **named)
            if self._how == "half" and name == "put_file":
                with self._files.open(given[1], "wb") as stream:
                    stream.write(Path(given[0]).read_bytes()[: Path(given[0]).stat().st_size // 2])
            elif self._how == "behind":
                method(*given, **named)
            raise CutOffError("connection reset")

        return call
