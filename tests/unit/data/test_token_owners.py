"""Corpora of token ids by their owners' own programs: what they write is read here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmtrain.data.shards import PreparedSet
from tests.unit.data.test_token_corpora import bytes_of, documents_of, prepare, texts

__all__ = ["texts"]
pytestmark = pytest.mark.slow


def check(folder: Path, given: list[np.ndarray], texts: Path) -> None:
    assert prepare(folder, folder.with_name("set"), texts) == 0
    assert bytes_of(documents_of(folder.with_name("set"))) == bytes_of(given)


@pytest.mark.needs("megatron.core")
def test_what_megatron_writes(texts: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    given = documents_of(texts)
    (tmp_path / "own").mkdir()
    builder = IndexedDatasetBuilder(str(tmp_path / "own/b.bin"), dtype=np.int32)
    import torch

    for ids in given:
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "own/b.idx"))
    check(tmp_path / "own", given, texts)
    assert PreparedSet(tmp_path / "set").manifest.dtype == "uint32"


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
