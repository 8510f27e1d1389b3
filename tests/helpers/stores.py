"""What a test counts of object stores."""

from __future__ import annotations

from pathlib import Path

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
