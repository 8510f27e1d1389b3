"""What an exported folder has beside its weights: configuration, tokenizer, index, and where it comes from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain import foreign
from llmtrain.checkpoint.format import MANIFEST, hash_file
from llmtrain.checkpoint.hf.proofs import Report
from llmtrain.checkpoint.hf.serving import chat_folders, ends_of
from llmtrain.checkpoint.hf.special_tokens import configure, generation_settings, pad_apart, special_ids
from llmtrain.checkpoint.hf.weight_files import WeightFiles
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.models.layout import FolderLayout
from llmtrain.models.score import gives_scores
from llmtrain.models.source import INDEX, refuse_escape
from llmtrain.tensors.tensorfile import numel

MARK = "llmtrain_export.json"
"""Says which checkpoint a folder was made from; such a folder may be replaced by a later export of the same run."""
SOURCE = "source"
"""Folder beside `checkpoints`: the files of an imported Hugging Face folder that are no weights."""
_HF_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_BESIDE_LIMIT = 256 << 20  # bytes; the largest tokenizers have 40 MB


def run_id(checkpoint: Path, trainer: Mapping[str, Any]) -> str:
    """Which run a checkpoint is of, for its exports."""
    return str(trainer.get("wandb_id") or checkpoint.resolve().parent.parent)


def write_others(
    folder: Path,
    reader: CheckpointReader,
    trainer: Mapping[str, Any],
    layout: FolderLayout,
    files: WeightFiles,
    report: Report,
) -> None:
    """Configuration, generation configuration, tokenizer, index, and where all of it comes from."""
    checkpoint, imported = reader.folder, "source" in trainer
    beside = copy_beside(folder, trainer, checkpoint, report)
    as_they_came = layout.frozen | reader.frozen_types().keys()
    kinds = files.dtype_of().items()
    new = [kind for tensor, kind in kinds if files.parts[tensor].parameter not in as_they_came]
    dtype = _HF_DTYPES[(new or [kind for _, kind in kinds])[0]]
    if imported:
        _keep_config(folder / "config.json", trainer["source"], files, dtype)
    else:
        config = layout.skeleton.config
        config.dtype, config.architectures = dtype, [type(layout.skeleton).__name__]
        ids = special_ids(beside, trainer.get("separator_id"))
        if ids:
            configure(config, ids, ends_of(chat_folders(trainer)))
        if gives_scores(config):
            pad_apart(config, report)
            (folder / "generation_config.json").unlink(missing_ok=True)
        elif ids and not (folder / "generation_config.json").exists():  # else an imported folder's own
            settings = generation_settings(config, ids)
            (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (folder / "config.json").write_text(config.to_json_string())
    index = files.index(sum(map(numel, layout.shapes.values())))
    same_files = imported and files.shards.keys() == trainer["source"]["files"].keys() and (folder / INDEX).is_file()
    if index is None:
        (folder / INDEX).unlink(missing_ok=True)
    elif not same_files or _weight_map((folder / INDEX).read_bytes()) != _weight_map(index):
        (folder / INDEX).write_text(index)
    write_mark(folder, checkpoint, trainer)


def copy_beside(folder: Path, trainer: Mapping[str, Any], checkpoint: Path, report: Report) -> Path | None:
    """The tokenizer's files, or those that came with an imported folder. Returns where they are from."""
    imported, tokenizer = "source" in trainer, trainer.get("tokenizer_dir")
    beside = checkpoint.parent.parent / SOURCE if imported else Path(tokenizer) if tokenizer else None
    if beside is not None and beside.is_dir():
        for file in beside_weights(beside, python=imported):
            shutil.copy2(file, folder / file.name)
    elif beside is not None:
        report.add("tokenizer", f"none: {beside}, where the run found it, is gone")
    return beside


def write_mark(folder: Path, checkpoint: Path, trainer: Mapping[str, Any]) -> None:
    """Say which checkpoint the folder was made from."""
    mark = {
        "run": run_id(checkpoint, trainer),
        "checkpoint": str(checkpoint.resolve()),
        "step": trainer.get("step"),
        "manifest": hash_file(checkpoint / MANIFEST),
    }
    (folder / MARK).write_text(json.dumps(mark, indent=2) + "\n")


def _weight_map(index: str | bytes) -> Any:
    return foreign.loads(index)["weight_map"]


def beside_weights(folder: Path, *, python: bool) -> list[Path]:
    """The files of a model folder that are no weights: configurations, tokenizer, templates, card; code if asked for.

    Raises:
        ModelError: one is a link that leaves the folder.
    """
    found = []
    for file in sorted(folder.iterdir()):
        plain = file.suffix in _BESIDE or file.name.startswith(("LICENSE", "NOTICE"))
        if (plain or (python and file.suffix == ".py")) and file.is_file() and file.stat().st_size <= _BESIDE_LIMIT:
            found.append(refuse_escape(folder, file))
    return found


def _keep_config(path: Path, source: Mapping[str, Any], files: WeightFiles, dtype: str) -> None:
    """The imported config.json, byte by byte unless the weights have another type now."""
    known, config = source["files"], dict(source["config"])
    before = {tensor: kind for shard in known.values() for tensor, kind in shard["tensors"].items()}
    same = all(files.dtype_of().get(tensor) == kind for tensor, kind in before.items())
    try:
        unchanged = foreign.loads(path.read_bytes(), infinite=True) == config
    except (OSError, ValueError):
        unchanged = False
    if not same:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if not same or not unchanged:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
