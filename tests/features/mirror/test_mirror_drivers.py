"""A mirror by the drivers of S3, Google's and Azure's stores, against servers that play them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.features.mirror.upload import Mirrored, fetch_newest
from llmtrain.storage.object_store import Store
from tests.features.mirror.test_mirror import mirroring
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.stores import contents

pytestmark = pytest.mark.slow


def test_a_mirror(protocol: str, tmp_path: Path) -> None:
    url = f"{protocol}://bucket/runs/one"
    mirror, told = mirroring(tmp_path, Mirrored(url), keep=1)
    for step in (1, 2):
        folder = write_checkpoint(tmp_path, step, seed=step)
        mirror.go_on()
    assert [kind for kind, _ in told] == ["mirrored", "mirrored"], told
    assert list(Mirrored(url).complete()) == [2] and all("step-00000002/" in name for name in Store(url).files())
    fetched = fetch_newest(url, tmp_path / "elsewhere", "run", lambda: None)
    assert fetched is not None and contents(fetched) == contents(folder)
