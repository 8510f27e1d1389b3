"""Makes the files of a Hugging Face folder: weights (split as `save_pretrained` does, or as in an imported folder),
configuration, tokenizer, index, and the record of their origin."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.format import MANIFEST, hash_file
from llmtrain.checkpoint.hf.proofs import Conversion, Report
from llmtrain.checkpoint.hf.serving import (
    chat_folders,
    configure,
    ends_of,
    generation_settings,
    pad_apart,
    pad_within,
    special_ids,
    tokenizer_here,
)
from llmtrain.checkpoint.output import JOURNAL
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.data import tokenizer_folder
from llmtrain.models.layout import FolderLayout, Part
from llmtrain.models.score import gives_scores
from llmtrain.models.source import INDEX, SINGLE, SafetensorsSource, refuse_escape
from llmtrain.storage.tensorfile import ITEM_BYTES, TensorFile, header_bytes, numel

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Our name of a dtype -> its name in safetensors."""
_ORDER = ("F32", "BF16", "F16")  # order of the dtypes in a file that the safetensors library writes
MAX_SHARD_BYTES = 5 * 10**9
"""Default size of the largest weight file. A restart after a kill repeats at most one file."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    tensors: dict[str, str]
    """Tensor -> its dtype in safetensors, in the order of the file."""
    metadata: dict[str, str]
    align: int
    """The data starts at a multiple of this number of bytes."""


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    shards: dict[str, Shard]
    """File name -> its tensors, in the order of writing."""
    parts: dict[str, Part]
    """Tensor -> the part of a parameter that it holds."""

    @property
    def bytes(self) -> int:
        return sum(ITEM_BYTES[d] * self.parts[t].numel for s in self.shards.values() for t, d in s.tensors.items())

    def dtype_of(self) -> dict[str, str]:
        """Return tensor -> its dtype in safetensors."""
        return {tensor: dtype for shard in self.shards.values() for tensor, dtype in shard.tensors.items()}

    def index(self, parameters: int) -> str | None:
        """Return the text of model.safetensors.index.json in the form of `save_pretrained`; None for a single file."""
        if list(self.shards) == [SINGLE]:
            return None
        weight_map = {tensor: file for file, shard in self.shards.items() for tensor in shard.tensors}
        metadata = {"total_parameters": parameters, "total_size": self.bytes}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def cut(layout: FolderLayout, dtypes: Mapping[str, str], max_shard_bytes: int) -> WeightFiles:
    """Return the files that `save_pretrained` would write for parameters of these dtypes (name -> "F32", ...), by the
    rule and names of huggingface_hub, serialization/_base.py. A layer's experts, views of one parameter, count as one
    tensor."""
    dtype_of = {tensor: dtypes[part.parameter] for tensor, part in layout.tensors.items()}
    members: dict[int, list[str]] = {}
    for tensor in layout.tensors:
        members.setdefault(layout.together[tensor][0], []).append(tensor)
    groups: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for tensors in members.values():
        size = layout.together[tensors[0]][1] * ITEM_BYTES[dtype_of[tensors[0]]]
        if size > max_shard_bytes:
            groups.append(tensors)
            continue
        if filled + size > max_shard_bytes:
            groups.append(current)
            current, filled = [], 0
        current += tensors
        filled += size
    groups += [current] if current else []
    total = len(groups)
    names = [SINGLE] if total == 1 else [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    shards = {}
    for name, group in zip(names, groups, strict=True):
        in_order = sorted(group, key=lambda tensor: (_ORDER.index(dtype_of[tensor]), tensor))  # as safetensors does
        shards[name] = Shard(tensors={t: dtype_of[t] for t in in_order}, metadata={"format": "pt"}, align=8)
    return WeightFiles(shards=shards, parts=layout.tensors)


def describe(source: SafetensorsSource) -> tuple[dict[str, Any], list[str]]:
    """Return (a record of the imported folder, weight files that an export cannot restore byte by byte)."""
    left_out = {*source.placement.derived, *source.placement.twins}
    files: dict[str, TensorFile] = {file.path.name: file for file in source.file_of.values()}
    record, changed = {}, []
    for name, file in sorted(files.items()):
        entries = sorted(file.entries.items(), key=lambda item: (item[1].begin, item[1].end))
        types = {tensor: entry.dtype for tensor, entry in entries if tensor not in left_out}
        header = {tensor: (entry.dtype, entry.shape) for tensor, entry in entries}
        written = next((a for a in (8, 1) if _begins(file, header_bytes(header, file.metadata, a))), None)
        if written is None or len(types) < len(entries):
            changed.append(name)
        if types:
            record[name] = {"tensors": types, "metadata": file.metadata, "align": written or 8}
    return record, changed


def _begins(file: TensorFile, header: bytes) -> bool:
    with open(file.path, "rb") as handle:
        return handle.read(file.bytes - sum(e.end - e.begin for e in file.entries.values())) == header


def as_described(layout: FolderLayout, record: Mapping[str, Any]) -> WeightFiles:
    """Return the weight files in a record that `describe` made."""
    shards = {name: Shard(**fields) for name, fields in record.items()}
    placement = layout.place(tensor for shard in shards.values() for tensor in shard.tensors)
    parts = {tensor: part for parts in placement.parts.values() for tensor, part in parts}
    return WeightFiles(shards=shards, parts=parts)


MARK = "llmtrain_export.json"
"""File in an exported folder that records its checkpoint; a later export of the same run may replace such a folder."""
SOURCE = "source"
"""Folder next to `checkpoints` with the files of an imported Hugging Face folder, except its weights."""
_LOCAL_BASES = {
    "gemma3": ("rope_theta", "rope_local_base_freq"),
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "olmo3": ("rope_theta", ""),
}
"""Families with a rope for each kind of layer in transformers 4 -> keys of the rotary bases: (full, local)."""
_HF_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_BESIDE_LIMIT = 256 << 20  # bytes; the largest tokenizers have 40 MB


@dataclass(frozen=True, kw_only=True)
class Export(Conversion):
    reader: CheckpointReader
    trainer: TrainerState


def run_id(checkpoint: Path, trainer: TrainerState) -> str:
    return str(trainer.run_id or checkpoint.resolve().parent.parent)


def write_others(folder: Path, made: Export, files: WeightFiles) -> None:
    layout, report, trainer, checkpoint = made.layout, made.report, made.trainer, made.reader.folder
    source = trainer.source
    beside = copy_beside(folder, trainer, checkpoint, report)
    as_they_came = layout.frozen | made.reader.frozen_types().keys()
    kinds = files.dtype_of().items()
    new = [kind for tensor, kind in kinds if files.parts[tensor].parameter not in as_they_came]
    dtype = _HF_DTYPES[(new or [kind for _, kind in kinds])[0]]
    if source is not None:
        _keep_config(folder / "config.json", source, files, dtype)
    else:
        config = layout.skeleton.config
        config.dtype, config.architectures = dtype, [type(layout.skeleton).__name__]
        ids, sampling = special_ids(beside, trainer.separator_id), trainer.sampling or {}
        pad_within(config, ids, report)
        if ids:
            configure(config, ids, ends_of(chat_folders(trainer)))
        if gives_scores(config):
            pad_apart(config, report)
            (folder / "generation_config.json").unlink(missing_ok=True)
        elif (ids or sampling) and not (folder / "generation_config.json").exists():  # else an imported folder's own
            settings = generation_settings(config, ids, sampling)
            (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        fields = json.loads(config.to_json_string())  # infinite numbers as the installed transformers writes them
        for_older_readers(fields)
        (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    index = files.index(sum(map(numel, layout.shapes.values())))
    same_files = source is not None and files.shards.keys() == source["files"].keys() and (folder / INDEX).is_file()
    if index is None:
        (folder / INDEX).unlink(missing_ok=True)
    elif not same_files or _weight_map((folder / INDEX).read_bytes()) != _weight_map(index):
        (folder / INDEX).write_text(index)
    write_mark(folder, checkpoint, trainer)


def for_older_readers(fields: dict[str, Any]) -> None:
    """Add the rotary keys of transformers 4 to config.json, also in nested sections: version 4 ignores
    `rope_parameters`, and silently computes with the family's default base."""
    for section in [value for value in fields.values() if isinstance(value, dict)]:
        for_older_readers(section)
    rope, family = fields.get("rope_parameters"), str(fields.get("model_type"))
    if not isinstance(rope, dict):
        return
    if isinstance(rope.get("full_attention"), dict):  # one rope for each kind of layer
        full, local = rope["full_attention"], rope.get("sliding_attention") or {}
        bases = next((names for begin, names in _LOCAL_BASES.items() if family.startswith(begin)), None)
        if bases is None:  # unknown to transformers 4, and 5 reads `rope_scaling` as the rope of all layers
            return
        older = {bases[0]: full.get("rope_theta"), bases[1]: local.get("rope_theta")}
    else:
        full = rope
        older = {"rope_theta": rope.get("rope_theta"), "partial_rotary_factor": rope.get("partial_rotary_factor")}
        if family.startswith("gpt_neox"):
            older |= {"rotary_emb_base": rope.get("rope_theta"), "rotary_pct": rope.get("partial_rotary_factor")}
    kind, length = full.get("rope_type", "default"), full.get("original_max_position_embeddings")
    scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if kind == "longrope" and length:
        older["original_max_position_embeddings"] = length  # at this level; the factor is then the ratio
        factor, most = full.get("factor"), fields.get("max_position_embeddings")
        if factor and most and factor * length != most and "attention_factor" not in scaling:
            scaling["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    if family.startswith("phi3"):  # phi3 reads only these three keys
        scaling = {"type": kind} | {key: scaling.get(key) for key in ("short_factor", "long_factor")}
    elif family in ("olmo", "olmo2") and kind in ("linear", "dynamic"):
        scaling = {"type": kind, "factor": full.get("factor")}
    elif family == "gpt_oss" and kind == "default":
        fields.setdefault("rope_scaling", None)  # its own default there is YaRN
    if kind != "default" and not family.startswith("modernbert"):  # modernbert has no scaling in transformers 4
        older["rope_scaling"] = scaling
    for key, value in older.items():
        if key and value is not None:
            fields.setdefault(key, value)


def copy_beside(folder: Path, trainer: TrainerState, checkpoint: Path, report: Report) -> Path | None:
    """Copy the tokenizer, or the files of an imported folder other than weights. Returns the folder that they come
    from, or None. Raises CheckpointError: when the tokenizer is not the run's."""
    imported = trainer.source is not None
    source = checkpoint.parent.parent / SOURCE if imported else tokenizer_here(trainer)
    if source is not None and source.is_dir():
        if not imported:
            _refuse_other_tokenizer(source, trainer)
        for file in beside_weights(source, python=imported):
            copy_into(folder, source, file)
    elif source is not None:
        report.add("tokenizer", f"none: {source}, where the run had it, is gone")
    return source


def _refuse_other_tokenizer(folder: Path, trainer: TrainerState) -> None:
    wanted = trainer.tokenizer
    if wanted is not None and wanted != tokenizer_folder.fingerprint(folder):
        raise CheckpointError(
            f"{folder / 'tokenizer.json'} is not the one that the run was trained with: it was changed or is damaged. "
            "Nothing was written. Put the right one there, or move the folder away to export without a tokenizer."
        )


def copy_into(folder: Path, source: Path, file: Path) -> Path:
    """Copy a file that `beside_weights(source)` lists; returns the copy."""
    target = folder / file.relative_to(source)
    target.parent.mkdir(exist_ok=True)
    shutil.copy2(file, target)
    return target


def write_mark(folder: Path, checkpoint: Path, trainer: TrainerState, **more: Any) -> None:
    mark = {
        "run": run_id(checkpoint, trainer),
        "checkpoint": str(checkpoint.resolve()),
        "step": trainer.step,
        "manifest": hash_file(checkpoint / MANIFEST),
        "files": sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and f.name != JOURNAL),
        **more,
    }
    (folder / MARK).write_text(json.dumps(mark, indent=2) + "\n")


def _weight_map(index: str | bytes) -> Any:
    return untrusted.loads(index)["weight_map"]


def beside_weights(folder: Path, *, python: bool) -> list[Path]:
    """Return the files of a model folder except weights: configurations, tokenizer, templates, model card, and with
    `python` also code. Raises ModelError: when a file is a link that leaves the folder."""
    files = []
    for file in (*sorted(folder.iterdir()), *tokenizer_folder.named_templates(folder)):
        plain = file.suffix in _BESIDE or file.name.startswith(("LICENSE", "NOTICE"))
        if (plain or (python and file.suffix == ".py")) and file.is_file() and file.stat().st_size <= _BESIDE_LIMIT:
            files.append(refuse_escape(folder, file))
    return files


def _keep_config(path: Path, source: Mapping[str, Any], files: WeightFiles, dtype: str) -> None:
    """Keep the imported config.json byte by byte, unless the weights now have another dtype."""
    shards, config = source["files"], dict(source["config"])
    before = {tensor: kind for shard in shards.values() for tensor, kind in shard["tensors"].items()}
    same = all(files.dtype_of().get(tensor) == kind for tensor, kind in before.items())
    try:
        unchanged = untrusted.loads(path.read_bytes(), infinite=True) == config
    except (OSError, ValueError):
        unchanged = False
    if not same:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        for_older_readers(config)
    if not same or not unchanged:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
