"""Corpora of token ids by their owners' own programs: what they write is read here, what is written here they read."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from llmtrain.commands import data as data_command
from llmtrain.data.shards import PreparedSet
from tests.unit.data.test_token_corpora import bytes_of, documents_of, prepare, texts

__all__ = ["texts"]
pytestmark = pytest.mark.slow


@pytest.fixture
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """MosaicML's package imports it for images; the registries' builds do not load beside a CPU build of torch."""
    for name, names in (("", ()), (".transforms", ("Compose",)), (".transforms.functional", ("to_tensor",)),
                        (".datasets", ("VisionDataset",))):  # fmt: skip
        module = types.ModuleType(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        for each in names:
            setattr(module, each, type(each, (), {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)


def check(folder: Path, given: list[np.ndarray], texts: Path) -> None:
    assert prepare(folder, folder.with_name("set"), texts) == 0
    assert bytes_of(documents_of(folder.with_name("set"))) == bytes_of(given)


@pytest.mark.needs("megatron.core")
def test_megatron_reads_what_is_exported(texts: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    given = documents_of(texts)
    assert data_command.main(["export", str(texts), "--megatron", str(tmp_path / "a")]) == 0
    read = IndexedDataset(str(tmp_path / "a"))
    assert bytes_of([read[index] for index in range(len(read))]) == bytes_of(given)
    (tmp_path / "own").mkdir()
    builder = IndexedDatasetBuilder(str(tmp_path / "own/b.bin"), dtype=np.int32)
    import torch

    for ids in given:
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "own/b.idx"))
    check(tmp_path / "own", given, texts)
    assert PreparedSet(tmp_path / "set").manifest.dtype == "uint32"


@pytest.mark.needs("litdata")
@pytest.mark.parametrize("loader", [True, False])
def test_what_litdata_writes(loader: bool, texts: Path, tmp_path: Path) -> None:
    import torch
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    given, folder = documents_of(texts), tmp_path / "own"
    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes=4096, item_loader=TokensLoader(16) if loader else None)
    for index, ids in enumerate(given):
        writer[index] = torch.tensor(ids.astype(np.int32))
    writer.done()
    writer.merge(1)
    check(folder, given, texts)


@pytest.mark.needs("streaming")
@pytest.mark.parametrize("encoding", ["ndarray:uint16", "ndarray", "bytes"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_mosaicml_streaming_writes(
    encoding: str, compression: str | None, texts: Path, tmp_path: Path, no_torchvision: None
) -> None:
    from streaming import MDSWriter

    given, folder = documents_of(texts), tmp_path / "own"
    columns = {"tokens": encoding, "name": "str"}
    with MDSWriter(out=str(folder), columns=columns, compression=compression, size_limit=4096) as writer:
        for ids in given:
            tokens = ids.astype(np.uint16) if encoding == "ndarray:uint16" else ids
            writer.write({"tokens": tokens.tobytes() if encoding == "bytes" else tokens, "name": "a"})
    check(folder, given, texts)


@pytest.mark.needs("datatrove")
def test_what_datatrove_writes(texts: Path, tmp_path: Path) -> None:
    from datatrove.io import get_datafolder
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    given, folder = documents_of(texts), tmp_path / "own"
    file = TokenizedFile(get_datafolder(str(folder)), "a.ds", token_size=2)
    for ids in given:
        file.write(ids.tolist(), None)
    file.close()
    check(folder, given, texts)
