"""Exports in an object store: complete or absent, and nobody else's files are lost."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.hf.export_store import ExportStore
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.folder_files import MARK
from llmtrain.storage import object_store
from llmtrain.storage.object_store import Store
from tests.helpers.checkpoints import WHOLE_LLAMA, write_checkpoint
from tests.helpers.stores import Failing, contents

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "_PAUSES_S", ())


def test_to_hf_writes_to_a_url(tmp_path: Path, say: Say) -> None:
    write_checkpoint(tmp_path / "run", 1, seed=1, shapes=WHOLE_LLAMA)
    there = tmp_path / "bucket/model"
    code, out, err = say("to-hf", tmp_path / "run", f"file://{there}", "--check", "none")
    assert code == 0, err
    assert f"written     file://{there}: " in out and f"uploaded    file://{there}: 4 files" in out
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert say("to-hf", tmp_path / "run", tmp_path / "local", "--check", "none")[0] == 0
    assert contents(there) == contents(tmp_path / "local")
    write_checkpoint(tmp_path / "run", 2, seed=2, shapes=WHOLE_LLAMA)
    code, out, _ = say("to-hf", tmp_path / "run", f"file://{there}", "--check", "none", "--max-shard-size", "1KB")
    assert code == 0 and "instead of the export of step 1" in out
    assert not (there / "model.safetensors").exists() and len(list(there.glob("*.safetensors"))) > 2
    (there / "notes.md").write_text("mine")
    code, _, err = say("to-hf", tmp_path / "run", f"file://{there}", "--check", "none")
    assert code == 2 and "notes.md" in err and "nothing was written" in err
    (there / MARK).unlink()
    code, _, err = say("to-hf", tmp_path / "run", f"file://{there}")
    assert code == 2 and f"to-hf file://{there}: its files are no earlier export of this run" in err
    assert (there / "config.json").exists()


def test_a_fault_of_any_transfer_leaves_no_export_that_seems_whole(tmp_path: Path) -> None:
    """Of an export beside nothing, and of one in the place of another: each transfer fails, and the next start ends."""
    first = write_checkpoint(tmp_path / "run", 1, seed=1, shapes=WHOLE_LLAMA)
    second = write_checkpoint(tmp_path / "run", 2, seed=2, shapes=WHOLE_LLAMA)
    folders = [tmp_path / "one", tmp_path / "two"]
    for checkpoint, folder in zip((first, second), folders, strict=True):
        export_hf(checkpoint, folder, check="none")
    faults = 0
    for replaces, how in itertools.product((False, True), ("before", "behind")):
        for fails_at in itertools.count(1):
            url = f"memory://{uuid.uuid4().hex}/model"
            if replaces:
                ExportStore(url, first, "to-hf").put(folders[0])
            store = ExportStore(url, second, "to-hf")
            files = store._store._files
            store._store._files = Failing(files, fails_at, how)
            try:
                store.put(folders[1])
                break
            except CheckpointError as error:
                assert f"complete copy is in {folders[1]}" in str(error)
            faults += 1
            there = Store(url).files()
            if "config.json" in there:  # all or nothing, of one of them
                Store(url).get("model.safetensors", tmp_path / "got")
                whole = folders[0] if fails_at == 1 and replaces and how != "behind" else folders[1]
                assert (tmp_path / "got").read_bytes() == (whole / "model.safetensors").read_bytes()
                assert {n: f.bytes for n, f in there.items()} == {p.name: p.stat().st_size for p in whole.iterdir()}
            ExportStore(url, second, "to-hf").put(folders[1])
            assert {n: Store(url).read(n) for n in Store(url).files()} == contents(folders[1])
    assert faults >= 16, faults
    assert load_file(folders[1] / "model.safetensors")
