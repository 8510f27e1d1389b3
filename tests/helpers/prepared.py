"""Prepared folders made from lists of token ids, without tokenizing: what the loader's tests need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtrain.data import manifest as manifests
from llmtrain.data import tokenizer_folder
from llmtrain.data.manifest import SPLITS, Manifest, Shard


def write_prepared(
    folder: Path,
    train: list[list[list[int]]],
    validation: list[list[list[int]]],
    *,
    vocab_size: int = 50,
    separator_id: int = 0,
    tokenizer: str = "{}",
) -> Path:
    """A complete prepared folder. `train` and `validation` are shards of documents of token ids, without separators."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(tokenizer)
    tokenizer_fingerprint = tokenizer_folder.fingerprint(folder / "tokenizer")
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    shards: dict[str, tuple[Shard, ...]] = {}
    for split, documents_of in zip(SPLITS, (train, validation), strict=True):
        made = []
        for index, documents in enumerate(documents_of):
            data = np.array([t for doc in documents for t in (*doc, separator_id)], dtype=dtype).tobytes()
            name = f"{split}-{index:05d}.bin"
            (folder / name).write_bytes(data)
            made.append(
                Shard(
                    file=name,
                    tokens=len(data) // dtype.itemsize,
                    documents=len(documents),
                    xxh3=xxhash.xxh3_64_hexdigest(data),
                )
            )
        shards[split] = tuple(made)
    name = "uint16" if dtype.itemsize == 2 else "uint32"
    manifests.write_manifest(
        folder,
        Manifest(
            dtype=name,
            vocab_size=vocab_size,
            separator_id=separator_id,
            tokens={split: sum(shard.tokens for shard in shards[split]) for split in SPLITS},
            documents={split: sum(shard.documents for shard in shards[split]) for split in SPLITS},
            rejected=0,
            tokenizer_fingerprint=tokenizer_fingerprint,
            data_fingerprint=manifests.data_fingerprint(name, vocab_size, separator_id, tokenizer_fingerprint, shards),
            source={"files": 1, "bytes": 1, "stat": ""},
            settings={},
            shards=shards,
        ),
    )
    return folder


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a folder's manifest with the values that `change` gives it, and the fingerprint that follows from them."""
    path = folder / manifests.NAME
    told = json.loads(path.read_text())
    change(told)
    shards = {split: tuple(Shard(**shard) for shard in told["shards"][split]) for split in SPLITS}
    of = (told[key] for key in ("dtype", "vocab_size", "separator_id", "tokenizer_fingerprint"))
    first = tuple(told.get("first_tokens", ()))
    path.write_text(json.dumps(told | {"data_fingerprint": manifests.data_fingerprint(*of, shards, first)}))


def random_shards(seed: int, shards: int, documents: int, vocab_size: int = 50) -> list[list[list[int]]]:
    """Shards of documents of 1 to 40 random ids in [1, vocab_size)."""
    random = np.random.default_rng(seed)
    return [
        [random.integers(1, vocab_size, random.integers(1, 41)).tolist() for _ in range(documents)]
        for _ in range(shards)
    ]
