"""Training data that lies in an object store: the same run, whatever of it fits on the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.commands.config import main
from llmtrain.data.where import Where
from tests.helpers import forked
from tests.helpers.launching import losses, write_recipe
from tests.helpers.prepared import write_prepared
from tests.helpers.s3 import s3, upload

SHARDS, DOCUMENTS, WORDS = 20, 40, 120
"""Training shards of about 10 KB each."""
SMALL = 32 << 10
"""Bytes of manifest and tokenizer at most."""
STEPS = ("--train.max_steps", "12", "--train.eval_every", "6", "--schedule.name", "constant")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_data: str) -> Path:
    """A prepared folder of many shards."""
    rng = np.random.default_rng(7)

    def shards(count: int) -> list[list[list[int]]]:
        return [
            [rng.integers(1, 512, rng.integers(1, 2 * WORDS)).tolist() for _ in range(DOCUMENTS)] for _ in range(count)
        ]

    tokenizer = (Path(small_data) / "tokenizer" / "tokenizer.json").read_text()
    where = tmp_path_factory.mktemp("store") / "prepared"
    return write_prepared(where, shards(SHARDS), shards(2), vocab_size=512, tokenizer=tokenizer)


def trained(where: Path, data: str, *more: str, before: Callable[[int], None] | None = None) -> dict[int, float]:
    """Losses of a run in a folder of its own, which goes on if it was there."""
    where.mkdir(exist_ok=True)
    code, output = forked.finish(write_recipe(where, data), *STEPS, *more, before=before)
    assert code == 0, output
    return losses(where / "run")


def own_cache(folder: Path, rank: int) -> None:
    """Give a rank a user's cache folder of its own."""
    os.environ["LLMTRAIN_CACHE"] = str(folder / f"host-{rank}/llmtrain")


def test_losses_do_not_depend_on_where_the_data_lies(folder: Path, tmp_path: Path) -> None:
    """A folder, a URL whose set fits into the cache, and one of which a tenth does beside the tokenizer; with a resume
    in the middle."""
    wanted = trained(tmp_path / "folder", str(folder))
    url = f"file://{folder}"
    size = sum(file.stat().st_size for file in folder.glob("*.bin"))
    for name, share in (("whole", 2.0), ("tenth", 0.1)):
        cache, room = tmp_path / f"{name}-cache", share * size + SMALL
        bound = ("--data.cache", str(cache), "--data.cache_gib", str(room / 2**30))
        found = trained(tmp_path / name, url, *bound, "--train.max_steps", "5")
        assert trained(tmp_path / name, url, *bound) == found | wanted == wanted
        kept = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        assert 0 < kept <= room


@pytest.mark.slow
@pytest.mark.needs("moto", "s3fs")
def test_s3_behind_a_network_that_cuts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained(tmp_path / "folder", str(folder))
    size = sum(file.stat().st_size for file in folder.glob("*.bin"))
    with s3(monkeypatch) as (client, network):
        upload(client, folder, "prepared")
        network.after_bytes, network.cuts = 2000, 12
        bound = ("--data.cache", str(tmp_path / "cache"), "--data.cache_gib", str(0.1 * size / 2**30))
        words = ("s3://bucket/prepared", *bound)
        found = trained(tmp_path / "s3", *words, "--train.max_steps", "5")
        assert trained(tmp_path / "s3", *words) == found | wanted == wanted
        assert network.cuts == 0


def test_each_host_has_a_cache_of_its_own(small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with caches of different contents train as one run with a folder does; its steps find their documents."""
    folder, url = small_data, f"file://{small_data}"
    wanted = trained(tmp_path / "folder", folder)

    assert trained(tmp_path / "url", url, before=partial(own_cache, tmp_path)) == wanted
    assert all(list((tmp_path / f"host-{rank}").glob("llmtrain/data/*/manifest.json")) for rank in (0, 1))
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "host-2"))
    found = list(Where(url, tmp_path / "url" / "run").at_step(3, None))
    assert found[1:] == list(Where(folder, tmp_path / "folder" / "run").at_step(3, None))[1:] and len(found) > 8


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("file:///nowhere/prepared", "manifest.json"),
        ("s4://bucket/prepared", "is no URL of a store"),
        ("s3://someone:a-secret@bucket/prepared", "has a user or a password in it"),
    ],
)
def test_what_cannot_be_opened_is_told_before_anything_starts(tmp_path: Path, url: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as error:
        main(["check", str(write_recipe(tmp_path, url))])
    assert "data.path" in str(error.value) and "a-secret" not in str(error.value)
