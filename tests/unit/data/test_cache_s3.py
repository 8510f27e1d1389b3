"""Prepared folders in S3, as a local server plays it, behind a network that cuts connections."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.base.child import child_environment
from llmtrain.data.cache import Cache
from llmtrain.data.shards import PreparedSet
from tests.helpers.prepared import write_prepared
from tests.helpers.s3 import Network, s3, upload

pytestmark = [pytest.mark.slow, pytest.mark.needs("moto", "s3fs")]
TOKENS = 4 << 20
URL = "s3://bucket/prepared"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Network, Path]]:
    """(client, network, the folder that was uploaded): four training shards of 8 MiB."""
    rng = np.random.default_rng(3)
    shards = [[rng.integers(1, 50, TOKENS - 1).tolist()] for _ in range(4)]
    folder = write_prepared(tmp_path / "prepared", shards, [[[1, 2, 3]]])
    with s3(monkeypatch) as (client, network):
        upload(client, folder, "prepared")
        yield client, network, folder


def test_a_network_that_cuts_changes_nothing(store: tuple[Any, Network, Path], tmp_path: Path) -> None:
    _, network, folder = store
    prepared, wanted = PreparedSet(URL, Cache(str(tmp_path / "cache"))), PreparedSet(folder).split("train")
    stream = prepared.split("train")
    network.after_bytes, network.cuts = 50_000, 5
    spans = [(start, 60_000) for start in range(0, 4 * TOKENS, TOKENS // 2)]
    stream.fetch(spans)
    assert network.cuts == 0
    for start, length in spans:
        assert np.array_equal(stream.read(start, length), wanted.read(start, length))
    network.after_bytes, network.cuts = 5_000_000, 1
    prepared.fetch_shard("train-00002.bin")
    assert network.cuts == 0
    assert (prepared.folder / "train-00002.bin").read_bytes() == (folder / "train-00002.bin").read_bytes()


def test_a_download_that_is_killed_leaves_whole_files_or_none(store: tuple[Any, Network, Path], tmp_path: Path) -> None:
    _, network, folder = store
    network.pause_s = 0.01
    cache = tmp_path / "cache"
    files = [f"train-0000{number}.bin" for number in range(4)]
    asked = {"folder": str(cache), "gib": 1.0, "shards": [(URL, file) for file in files]}

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-P", "-m", "llmtrain.data.download"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, env=child_environment())  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.flush()
        return process

    killed, deadline = start(), time.monotonic() + 60
    while not any(path.stat().st_size for path in cache.rglob("*.bin.*partial")):
        assert time.monotonic() < deadline and killed.poll() is None
    killed.kill()
    killed.wait()
    assert list(cache.rglob("*.partial"))
    for path in cache.rglob("*.bin"):
        assert path.read_bytes() == (folder / path.name).read_bytes()
    network.pause_s = 0.0
    again = start()
    again.wait(120)
    assert not list(cache.rglob("*.partial"))
    assert sorted(path.name for path in cache.rglob("*.bin")) == files
    waits = start()
    assert waits.stdin is not None
    waits.stdin.close()  # as when the run is gone
    waits.wait(30)
