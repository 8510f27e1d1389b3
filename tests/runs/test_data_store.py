"""Training data that lies in an object store: the same run, whatever of it fits on the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import forked
from tests.helpers.launching import losses, write_recipe
from tests.helpers.prepared import write_prepared

SHARDS, DOCUMENTS, WORDS = 20, 40, 120
"""Training shards of about 10 KB each."""
STEPS = ("--train.max_steps", "12", "--train.eval_every", "6", "--schedule.name", "constant")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_data: str) -> Path:
    """A prepared folder of many shards."""
    rng = np.random.default_rng(7)

    def shards(count: int) -> list[list[list[int]]]:
        return [[rng.integers(1, 512, rng.integers(1, 2 * WORDS)).tolist() for _ in range(DOCUMENTS)]
                for _ in range(count)]  # fmt: skip

    tokenizer = (Path(small_data) / "tokenizer" / "tokenizer.json").read_text()
    where = tmp_path_factory.mktemp("store") / "prepared"
    return write_prepared(where, shards(SHARDS), shards(2), vocab_size=512, tokenizer=tokenizer)


def trained(where: Path, data: str, *more: str) -> dict[int, float]:
    """Losses of a run in a folder of its own, which goes on if it was there."""
    where.mkdir(exist_ok=True)
    forked.train(write_recipe(where, data), *STEPS, *more)
    return losses(where / "run")


def test_losses_do_not_depend_on_where_the_data_lies(folder: Path, tmp_path: Path) -> None:
    """A folder, a URL whose set fits into the cache, and one of which a tenth does; with a resume in the middle."""
    wanted = trained(tmp_path / "folder", str(folder))
    url = f"file://{folder}"
    size = sum(file.stat().st_size for file in folder.glob("*.bin"))
    for name, share in (("whole", 2.0), ("tenth", 0.1)):
        cache = tmp_path / f"{name}-cache"
        bound = ("--data.cache", str(cache), "--data.cache_gib", str(share * size / 2**30))
        found = trained(tmp_path / name, url, *bound, "--train.max_steps", "5")
        assert trained(tmp_path / name, url, *bound) == found | wanted == wanted
        arrived = sum(file.stat().st_size for file in cache.glob("*/*.bin"))
        assert arrived <= share * size and not list(cache.rglob("*.partial"))
