"""Files in object stores, whose network fails now and then."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from llmtrain.storage import object_store
from llmtrain.storage.object_store import Store, StoreError, problem_of


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(object_store, "_PAUSES_S", (0.0, 0.0))
    return Store(f"memory://{uuid.uuid4().hex}/folder/")


class Flaky:
    """A driver whose next calls of one method fail."""

    def __init__(self, store: Store, method: str, errors: list[Exception]) -> None:
        self._driver, self._method, self._errors = store._files, method, errors
        store._files = self

    def __getattr__(self, name: str) -> Any:
        if name == self._method and self._errors:
            raise self._errors.pop()
        return getattr(self._driver, name)


def test_a_folder_of_files(store: Store, tmp_path: Path) -> None:
    assert store.files() == {}
    (tmp_path / "a").write_bytes(b"0123456789")
    store.put(tmp_path / "a", "b/a.bin")
    store.write(b"x", "c.txt")
    assert {name: stored.bytes for name, stored in store.files().items()} == {"b/a.bin": 10, "c.txt": 1}
    assert list(store.matching("**/*.bin")) == ["b/a.bin"] and list(store.matching("*.bin")) == []
    assert store.read("b/a.bin", 2, 5) == b"234" and store.read("c.txt") == b"x"
    assert store.stat("c.txt").bytes == 1 == Store(f"{store.url}c.txt").stat().bytes
    store.get("b/a.bin", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"0123456789"
    store.remove(["c.txt", "b/a.bin"])
    store.remove(["c.txt"])
    assert store.files() == {}


def test_faults_of_the_network_are_tried_again_and_refusals_are_not(store: Store, tmp_path: Path) -> None:
    store.write(b"0123456789", "a")
    Flaky(store, "cat_file", [TimeoutError(), ConnectionResetError()])
    assert store.read("a", 2, 5) == b"234"
    Flaky(store, "get_file", [OSError("https://me:word@host/a is cut off") for _ in range(3)])
    with pytest.raises(StoreError, match=r"https://\[redacted\]@host/a"):
        store.get("a", tmp_path / "a")
    refused: list[Exception] = [PermissionError("denied"), PermissionError("denied")]
    Flaky(store, "cat_file", refused)
    with pytest.raises(StoreError, match=r"^PermissionError: denied$"):
        store.read("a")
    assert len(refused) == 1
    refused.clear()
    assert not any(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        store.read("b")
    with pytest.raises(StoreError, match=r"^OSError: 5 .*7$"):
        store.read("a", 5, 12)


def test_a_connection_that_never_answers_ends(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that moves on, however slowly, does not."""
    monkeypatch.setattr(object_store, "_SILENCE_S", 0.2)
    monkeypatch.setattr(object_store, "_PAUSES_S", ())
    store = Store(f"{store.url}x")
    (tmp_path / "a").write_bytes(b"0123456789")
    silent, ended = threading.Event(), threading.Event()

    class Stalled:
        def __getattr__(self, name: str) -> Any:
            return getattr(driver, name)

        def put_file(self, path: str, target: str, callback: Any) -> None:
            for _ in range(4):
                time.sleep(0.1)
                callback.relative_update(1)
            if target.endswith("never"):
                silent.wait(30)
                ended.set()
            driver.put_file(path, target)

    driver = store._files
    store._files = Stalled()
    store.put(tmp_path / "a", "slow")
    with pytest.raises(StoreError, match=r"^TimeoutError: "):
        store.put(tmp_path / "a", "never")
    assert not ended.is_set()
    silent.set()


def test_what_is_no_file_is_missing(store: Store, tmp_path: Path) -> None:
    store.write(b"", "folder/empty")
    assert store.read("folder/empty") == b""
    with pytest.raises(FileNotFoundError):
        store.stat("folder")
    Flaky(store, "put_file", [FileNotFoundError("no such bucket")])
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(StoreError, match="no such bucket"):
        store.put(tmp_path / "a", "a")


def test_a_size_that_a_listing_lacks_is_asked_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(b"012", "a")
    find = store._files.find
    monkeypatch.setattr(store._files, "find", lambda *given, **more: {path: {} for path in find(*given, **more)})
    assert {name: stored.bytes for name, stored in store.files().items()} == {"a": 3}
    monkeypatch.setattr(store._files, "info", lambda path: {"name": path, "type": "file", "size": None})
    with pytest.raises(StoreError, match=" size of "):
        store.stat("a")


def test_what_is_no_folder_in_a_store_is_told_before_anything_begins() -> None:
    for wrong in ("bucket/run", "s4://bucket/run", "s3://"):
        assert (problem_of(wrong) or [""])[0] == "is no URL of a store", wrong
    assert (problem_of("memory://user:secret@bucket/run") or [""])[0] == "has a user or a password in it"
    assert (problem_of("s3://bucket/run?token=secret") or [""])[0] == "has a user or a password in it"
    assert problem_of("hf://org/name/run", writes=True) is not None
    assert problem_of("hf://org/name/run") is None is problem_of("hf://buckets/org/name/run", writes=True)
    assert problem_of("memory://bucket/run") is None
