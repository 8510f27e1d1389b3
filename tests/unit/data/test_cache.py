"""A host's cache of prepared folders in object stores: whole or absent, bounded, and never other tokens."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from llmtrain.base.errors import DataError
from llmtrain.base.files import folder_bytes
from llmtrain.base.rank.heartbeat import heart
from llmtrain.base.units import GIB
from llmtrain.config.run import DataConfig
from llmtrain.data import cache as caches
from llmtrain.data.cache import make_room
from llmtrain.data.download import _Download
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.train_data import TrainData
from llmtrain.storage.object_store import Store, Stored
from tests.helpers.prepared import write_prepared

TOKENS = 100


class Lag(LocalFileSystem):
    """`lag:///FOLDER` is a folder of this host whose requests take a while, or fail, as the attributes say."""

    protocol = "lag"
    delay_s = 0.0
    fault: Exception | None = None
    """What each request ends with."""
    asked: list[str] = []  # noqa: RUF012  (of all instances)
    """Requests for content, by the name of the file."""
    under_way = most = 0
    """Requests that wait at present, and the largest number of these."""
    lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return super()._strip_protocol(str(path).removeprefix("lag://"))

    def _trip(self, name: str = "") -> None:
        if name:
            with Lag.lock:
                Lag.asked.append(name.rpartition("/")[2])
        with Lag.lock:
            Lag.under_way += 1
            Lag.most = max(Lag.most, Lag.under_way)
        time.sleep(Lag.delay_s)
        with Lag.lock:
            Lag.under_way -= 1
        if Lag.fault is not None:
            raise Lag.fault

    def cat_file(self, path: str, *args: Any, **more: Any) -> Any:
        self._trip(path)
        return super().cat_file(path, *args, **more)

    def get_file(self, path: str, *args: Any, **more: Any) -> Any:
        self._trip(path)
        return super().get_file(path, *args, **more)

    def info(self, path: str, **more: Any) -> Any:
        self._trip()
        return super().info(path, **more)

    @classmethod
    def reset(cls) -> None:
        """A store at hand."""
        cls.delay_s, cls.fault = 0.0, None
        cls.asked.clear()


fsspec.register_implementation("lag", f"{__name__}.Lag", clobber=True)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of 8 training shards with 100 tokens each and one of validation, 200 bytes each."""
    numbers = iter(range(10**6))
    shards = [[[1 + next(numbers) % 49 for _ in range(TOKENS - 1)]] for _ in range(9)]
    Lag.reset()
    yield write_prepared(tmp_path / "store" / "prepared", shards[:8], shards[8:])
    Lag.reset()


def opened(folder: Path, tmp_path: Path) -> tuple[PreparedSet, str]:
    cache = str(tmp_path / "cache")
    return PreparedSet(f"lag://{folder}", cache), cache


def download(
    prepared: PreparedSet, cache: str, shards: list[str], gib: float = 100.0
) -> list[tuple[str, dict[str, Any]]]:
    told: list[tuple[str, dict[str, Any]]] = []
    [(url, _), *_] = prepared.shards_in_store("train")
    _Download(cache, gib, lambda kind, **fields: told.append((kind, fields))).go_on([(url, file) for file in shards])
    return told


def shards_in(prepared: PreparedSet) -> list[str]:
    return sorted(path.name for path in prepared.folder.glob("*.bin"))


def test_tokens_are_those_of_the_folder_whether_shards_are_here_or_not(folder: Path, tmp_path: Path) -> None:
    prepared, cache = opened(folder, tmp_path)
    wanted = PreparedSet(folder).split("train").read(0, 8 * TOKENS)
    stream = prepared.split("train")
    assert np.array_equal(stream.read(0, 8 * TOKENS), wanted) and not shards_in(prepared)
    download(prepared, cache, ["train-00002.bin", "train-00003.bin"])
    Lag.asked.clear()
    assert np.array_equal(stream.read(150, 400), wanted[150:550])
    assert sorted(Lag.asked) == ["train-00001.bin", "train-00004.bin", "train-00005.bin"]
    stream.fetch([(0, 100), (600, 150)])
    Lag.asked.clear()
    assert np.array_equal(stream.read(600, 150), wanted[600:750]) and not Lag.asked


def test_a_second_opening_fetches_nothing_but_the_manifest(folder: Path, tmp_path: Path) -> None:
    first, _ = opened(folder, tmp_path)
    del first
    Lag.asked.clear()
    again, _ = opened(folder, tmp_path)
    assert Lag.asked == ["manifest.json"]
    again.fetch(["origins"])  # what the store has not is left out


def test_keys_that_lead_elsewhere_are_left_alone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Store(f"lag://{folder}").files()
    odd = {name: Stored(2, "") for name in ("tokenizer/..", "tokenizer/../../../outside", "tokenizer/a/b")}
    monkeypatch.setattr(Store, "files", lambda _: {**listed, **odd})
    prepared, _ = opened(folder, tmp_path)
    assert [path.name for path in prepared.tokenizer_dir.iterdir()] == ["tokenizer.json"]


def test_an_object_that_changes_is_named_and_not_read(folder: Path, tmp_path: Path) -> None:
    prepared, _ = opened(folder, tmp_path)
    stream = prepared.split("train")
    shard = folder / "train-00003.bin"
    shard.write_bytes(bytes(2 * TOKENS))
    os.utime(shard, (1, 1))
    with pytest.raises(DataError, match=r"prepared/train-00003\.bin: .*changed"):
        stream.read(300, 10)
    shard.unlink()
    with pytest.raises(DataError, match=r"prepared/train-00003\.bin: .*gone"):
        stream.read(300, 10)
    stream.read(200, 10)


def test_a_damaged_shard_is_fetched_twice_and_named(folder: Path, tmp_path: Path) -> None:
    (folder / "train-00005.bin").write_bytes(bytes(2 * TOKENS))
    prepared, cache = opened(folder, tmp_path)
    Lag.asked.clear()
    with pytest.raises(DataError, match=r"prepared/train-00005\.bin: .*checksum"):
        download(prepared, cache, ["train-00005.bin"])
    assert Lag.asked == ["train-00005.bin"] * 2
    assert not shards_in(prepared) and not list(prepared.folder.glob("*.partial"))


def test_what_a_killed_download_left_is_removed(folder: Path, tmp_path: Path) -> None:
    prepared, cache = opened(folder, tmp_path)
    left = prepared.folder / "train-00001.bin.4194305.partial"
    left.write_bytes(b"half")
    download(prepared, cache, ["train-00001.bin"])
    assert not left.exists() and shards_in(prepared) == ["train-00001.bin"]


def test_the_bound_holds_and_sets_in_use_stay(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sets of 1800 bytes of shards: the one that was out of use for longest goes, and none that is open."""
    copies = [shutil.copytree(folder, folder.with_name(f"copy-{number}")) for number in range(3)]
    files = [f"train-0000{number}.bin" for number in range(8)]
    paths = []
    other = tmp_path / "cache" / "thesis"
    other.mkdir(parents=True)
    (other / "text").write_bytes(bytes(10_000))
    for number, copy in enumerate(copies[:2]):
        prepared, cache = opened(copy, tmp_path)
        download(prepared, cache, files)
        os.utime(prepared.folder / ".used", (number, number))
        paths.append(prepared.folder)
        del prepared
    live, _ = opened(copies[1], tmp_path)
    os.utime(paths[1] / ".used", (0, 0))
    root = Path(cache)
    bound = folder_bytes(root) - 10_000 + 1000
    monkeypatch.setattr("llmtrain.data.download._AGAIN_S", 0.0)
    third, cache = opened(copies[2], tmp_path)
    assert len(download(third, cache, files, bound / GIB)) == 8
    assert not paths[0].exists() and len(shards_in(live)) == 8 and folder_bytes(root) - 10_000 <= bound
    assert not make_room(root, bound, bound)  # both are open: nothing goes, and it does not fit
    assert len(shards_in(live)) == len(shards_in(third)) == 8
    del live, third
    assert make_room(root, 0, 0) and [path.name for path in root.iterdir() if path.is_dir()] == ["thesis"]


def test_the_shards_of_a_step_are_asked_for_at_once(folder: Path, tmp_path: Path) -> None:
    """64 sequences over all shards, none of which is here: none of them waits for another one."""
    config = DataConfig(path=f"lag://{folder}", cache=str(tmp_path / "cache"), sequence_length=10)
    data, plain = TrainData(config), TrainData(DataConfig(path=str(folder), sequence_length=10))
    Lag.delay_s = 0.1
    Lag.most = 0
    data.fetch(range(64))
    assert Lag.most > 4, "shards were asked for one after the other"
    Lag.delay_s = 10.0
    for index in range(64):
        assert np.array_equal(data.sequence(index)[0], plain.sequence(index)[0])


def test_a_wait_for_the_store_is_told_and_is_no_hang(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that does not answer, and then does; and one that does not for long."""
    from tests.helpers.loaders import loader_of

    for name, value in {"_AGAIN_S": 0.05, "_GIVE_UP_S": 60.0}.items():
        monkeypatch.setattr(caches, name, value)
    monkeypatch.setattr("llmtrain.data.stream.loader._WARN_S", 0.3)
    monkeypatch.setattr("llmtrain.data.stream.loader._BEAT_S", 0.1)
    monkeypatch.setattr("llmtrain.storage.object_store._PAUSES_S", ())
    data = TrainData(DataConfig(path=f"lag://{folder}", cache=str(tmp_path / "cache"), sequence_length=10))
    beats: list[float] = []
    Lag.fault = OSError("connection reset")
    form: dict[str, Any] = {"global_batch": 4, "micro_batch": 4, "accumulation": 1, "rank": 0, "data_parallel": 1}
    with loader_of(data, **form) as loader:
        back = threading.Timer(1.0, Lag.reset)
        back.start()
        monkeypatch.setattr(heart, "beat", lambda: beats.append(time.monotonic()))
        next(loader)
        back.join()
    assert "answer" in capsys.readouterr().err
    assert beats
    monkeypatch.setattr(caches, "_GIVE_UP_S", 0.2)
    Lag.fault = OSError("connection reset")
    refused = pytest.raises(DataError, match=f"lag://{folder}.*connection reset")
    with loader_of(data, **form, start_index=40) as loader, refused:
        next(loader)
