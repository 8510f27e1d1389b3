"""Folders by URL in the cache: fetched once, known by their contents."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmtrain.base.errors import ModelError, UserError
from llmtrain.data.prepare.settings import PrepareSettings
from llmtrain.data.prepare.sources import fetched
from llmtrain.storage import object_store
from llmtrain.storage.addresses import local_folder, place_of
from llmtrain.storage.folders import fetch
from llmtrain.storage.hub import model_folder
from llmtrain.storage.object_store import Store
from tests.helpers.stores import fetched_files


@pytest.fixture(autouse=True)
def got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were fetched."""
    return fetched_files(tmp_path, monkeypatch)


def _model(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "optimizer.bin").write_bytes(b"not for us")
    return f"file://{folder}"


def _all(url: str, revision: str | None = None) -> tuple[Path, str]:
    return fetch(url, revision, [lambda names, _: names], UserError)


def test_a_model_is_fetched_once_and_what_it_needs_alone(tmp_path: Path, got: list[str]) -> None:
    url = _model(tmp_path / "bucket/model")
    folder = model_folder(url, asked_by="from-hf")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert model_folder(f"{url}/", asked_by="from-hf") == folder == local_folder(url, folder.name)
    assert sorted(got) == ["config.json", "model.safetensors"]
    for damaged in ("", "{", "[]", "{}", "4", '["config.json"]', '{"config.json": "many"}', '{"a": {}}'):
        folder.with_name(f"{folder.name}.json").write_text(damaged)
        assert model_folder(url, folder.name, asked_by="from-hf") == folder
    shutil.rmtree(tmp_path / "bucket")
    assert model_folder(url, folder.name, asked_by="from-hf") == folder  # the store is not asked
    for wrong in (url, "s4://bucket/model"):
        with pytest.raises(ModelError, match=f"from-hf: {wrong}"):
            model_folder(wrong, asked_by="from-hf")


def test_an_adapter_and_a_tokenizer(tmp_path: Path, got: list[str]) -> None:
    folder = tmp_path / "bucket/adapter"
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "optimizer.pt"):
        (folder / name).write_text("{}")
    here = model_folder(f"file://{folder}", asked_by="generate")
    assert sorted(path.name for path in here.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    ]
    got.clear()
    settings = PrepareSettings(sources=("a.txt",), out=tmp_path / "out", tokenizer=f"file://{folder}")
    assert fetched(settings).tokenizer == str(here) and got == []


def test_what_changes_in_the_store_is_another_revision(tmp_path: Path) -> None:
    url = _model(tmp_path / "bucket/model")
    first, revision = _all(url)
    (tmp_path / "bucket/model/model.safetensors").write_bytes(b"other weights")
    second, other = _all(url)
    assert revision != other and (second / "model.safetensors").read_bytes() == b"other weights"
    assert _all(url, revision) == (first, revision) and (first / "model.safetensors").read_bytes() == b"weights"
    shutil.rmtree(place_of(url))
    with pytest.raises(UserError, match="changed since"):
        _all(url, revision)


def test_what_is_cut_off_or_changed_meanwhile_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = _model(tmp_path / "bucket/model")
    get = Store.get

    def changing(self: Store, name: str, path: Path) -> None:
        get(self, name, path)
        (tmp_path / "bucket/model/config.json").write_text('{"changed": 1}')

    def cut_off(self: Store, name: str, path: Path) -> None:
        if name == "model.safetensors":
            raise object_store.StoreError("cut off")
        get(self, name, path)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "get", changing)
        with pytest.raises(UserError, match="changed while"):
            _all(url)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "get", cut_off)
        with pytest.raises(UserError, match=r"\(cut off\)"):
            _all(url)
    folder, _ = _all(url)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (folder / "config.json").read_text() == '{"changed": 1}'
