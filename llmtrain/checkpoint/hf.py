"""From a checkpoint to a Hugging Face folder. No GPU, no torch.distributed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmtrain.checkpoint.durable import sync
from llmtrain.checkpoint.format import read_trainer, remove_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.errors import CheckpointError
from llmtrain.models.tensorfile import numel

_SHARD_BYTES = 4 << 30
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export_hf(checkpoint: Path, out: Path, dtype: str | None = None) -> Path:
    """Write `out` so that AutoModelForCausalLM.from_pretrained loads it; a tied weight is written once.

    Args:
        dtype: fp32, bf16 or fp16; default: the precision that the checkpoint was trained in.

    Raises:
        CheckpointError: `checkpoint` is none, or `out` exists and is no earlier export.
    """
    reader = CheckpointReader(checkpoint)
    trainer = read_trainer(checkpoint)
    precision = dtype or reader.manifest.layout["precision"]
    if out.exists() and not (out / "config.json").is_file():
        raise CheckpointError(f"{out} exists and is no Hugging Face folder; nothing was written. Give another name.")
    partial = out.with_name(out.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_shards(reader, partial, _DTYPES[precision])
        config = {**trainer["model_config"], "dtype": _HF_DTYPES[precision]}
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
        separator = trainer["separator_id"]
        generation = {"eos_token_id": separator, "pad_token_id": separator}
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=2))
        tokenizer = Path(trainer["tokenizer_dir"])
        if tokenizer.is_dir():
            for file in sorted(tokenizer.iterdir()):
                shutil.copy2(file, partial / file.name)
        for file in partial.iterdir():
            sync(file)
        if out.exists():
            remove_checkpoint(out.rename(out.with_name(out.name + ".old.tmp")))
        partial.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def _write_shards(reader: CheckpointReader, folder: Path, dtype: torch.dtype) -> None:
    """model.safetensors, or numbered shards with an index. At most one shard is in memory."""
    plan = list(_shards(reader, torch.empty((), dtype=dtype).element_size()))
    weight_map: dict[str, str] = {}
    for index, names in enumerate(plan, 1):
        file = "model.safetensors" if len(plan) == 1 else f"model-{index:05d}-of-{len(plan):05d}.safetensors"
        tensors = {name: _tensor(reader, name, dtype) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if len(plan) > 1:
        total = sum(numel(reader.shape(name)) for name in weight_map) * torch.empty((), dtype=dtype).element_size()
        index_json: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1))


def _tensor(reader: CheckpointReader, name: str, dtype: torch.dtype) -> Tensor:
    shape = reader.shape(name)
    return reader.read(name, 0, numel(shape)).reshape(shape).to(dtype)


def _shards(reader: CheckpointReader, element_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name in reader.order():
        grows = numel(reader.shape(name)) * element_bytes
        if names and size + grows > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += grows
    yield names
