"""The drivers of S3, Google's and Azure's stores against servers that play them: each has ways of its own."""

from __future__ import annotations

import importlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.storage.object_store import Store, StoreError
from tests.helpers.s3 import s3

pytestmark = pytest.mark.slow

_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's own, which Microsoft publishes."""


def _need(*names: str) -> None:
    for name in names:
        pytest.importorskip(name)


def _s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _need("moto", "s3fs")
    with s3(monkeypatch):
        yield


def _gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _need("gcp_storage_emulator", "gcsfs")
    make = importlib.import_module("gcp_storage_emulator.server").create_server
    server = make("localhost", port := _free_port(), in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
    yield
    server.stop()


def _az(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _need("adlfs")
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("needs azurite (npm)")
    port = _free_port()
    server = subprocess.Popen([program, "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck"])
    text = (
        f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={_KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
    )
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    try:
        for _ in range(300):
            if socket.socket().connect_ex(("127.0.0.1", port)) == 0:
                break
            time.sleep(0.1)
        client = importlib.import_module("azure.storage.blob").BlobServiceClient.from_connection_string(text)
        client.create_container("bucket")
        yield
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


_SERVERS = {"s3": _s3, "gs": _gs, "az": _az}


@pytest.fixture(params=list(_SERVERS))
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for _ in _SERVERS[request.param](monkeypatch):
        yield request.param
        type(Store(f"{request.param}://bucket/x")._files).clear_instance_cache()


def test_files(protocol: str, tmp_path: Path) -> None:
    store = Store(f"{protocol}://bucket/folder")
    assert store.files() == {}
    odd = "a name+%25 é#?.txt"
    for name, content in {"a": b"0123456789", "empty": b"", "d/e/f.bin": b"x", odd: b"y"}.items():
        store.write(content, name)
    assert {name: found.bytes for name, found in store.files().items()} == {"a": 10, "d/e/f.bin": 1, "empty": 0, odd: 1}
    assert (store.read("a"), store.read("a", 2, 5), store.read("empty"), store.read(odd)) == (
        b"0123456789",
        b"234",
        b"",
        b"y",
    )
    assert list(store.matching("**/*.bin")) == ["d/e/f.bin"]
    for missing in ("b", "d"):
        with pytest.raises(FileNotFoundError):
            store.stat(missing)
    before = store.stat("a").version
    store.write(b"9876543210", "a")
    assert store.stat("a").version not in ("", before)
    assert Store(f"{protocol}://bucket/fold").files() == {}  # a prefix of a name is no folder
    store.remove(["a", "b"])
    assert "a" not in store.files()
    big = tmp_path / "big"
    big.write_bytes(bytes(range(256)) * (130 << 12))  # in parts
    store.put(big, "big")
    store.get("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == big.read_bytes()


def test_a_bucket_that_is_not_there_is_no_empty_folder(protocol: str) -> None:
    with pytest.raises(StoreError, match="bucket another"):
        Store(f"{protocol}://another/folder").files()
    with pytest.raises(StoreError):
        Store(f"{protocol}://another/folder", again=False).write(b"x", "a")
