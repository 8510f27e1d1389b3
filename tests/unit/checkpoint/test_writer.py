"""What the checkpoint writer answers when the disk fails."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from llmtrain.checkpoint import writer
from llmtrain.checkpoint.format import MANIFEST, NOWHERE, Manifest, problems
from llmtrain.storage.checksum import checksum_array


@pytest.fixture
def image() -> memoryview:
    return memoryview(np.arange(6 << 20, dtype=np.float32).view(np.uint8))


TABLE = {"own": [[4096, "F32", ["param", "w", 0, (6 << 20) - 1024, 0]]]}


@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate"])
def test_an_io_error_is_an_answer_and_leaves_no_file(tmp_path, monkeypatch, image, call):
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fails)
    answer = writer.perform({"do": "write", "path": str(tmp_path / "file")}, TABLE, image)
    assert "Input/output error" in answer["error"]
    assert os.listdir(tmp_path) == []


def test_a_commit_that_fails_leaves_nothing_and_one_that_works_a_checkpoint(tmp_path, monkeypatch, image):
    numel = (6 << 20) - 1024
    table = {
        **TABLE,
        "frozen": NOWHERE.to_json(),
        "tensors": {"w": [numel]},
        "pieces": {"rank-00000.safetensors": [["param", "w", 0, numel, 0]]},
    }
    partial, final = tmp_path / "step-00000003.aaaa.tmp", tmp_path / "step-00000003"

    def commit() -> dict:
        partial.mkdir()
        written = writer.perform({"do": "write", "path": str(partial / "rank-00000.safetensors")}, table, image)
        assert written["checksums"] == [checksum_array(np.frombuffer(image, np.float32)[1024:])]
        message = {"do": "commit", "partial": str(partial), "final": str(final), "step": 3, "layout": {}, "keep": 1}
        message |= {"written": {"rank-00000.safetensors": written}, "trainer": '{"step": 3}'}
        return writer.perform(message, table, None)

    rename = type(partial).rename
    monkeypatch.setattr(type(partial), "rename", lambda self, to: fail() if to == final else rename(self, to))

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert "Input/output error" in commit()["error"]
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    (tmp_path / "step-00000002.bbbb.tmp").mkdir()  # a discard has failed before: the disk was read-only
    (tmp_path / "step-00000001.trash").mkdir()
    assert commit() == {}
    assert (final / MANIFEST).is_file()
    manifest = Manifest.read(final)
    assert problems(final, manifest, sorted(manifest.files)) == []
    assert os.listdir(tmp_path) == ["step-00000003"]
