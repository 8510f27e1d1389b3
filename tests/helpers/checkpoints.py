"""Small checkpoints as a run leaves them, made without an engine; and the same written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from llmtrain.checkpoint.durable import DurableFile
from llmtrain.checkpoint.format import (
    MANIFEST,
    NOWHERE,
    TRAINER,
    FileEntry,
    FrozenSource,
    Manifest,
    Piece,
    hash_file,
    keys,
    step_folder,
)
from llmtrain.storage.checksum import checksum, checksum_part
from llmtrain.storage.pieces import pick
from llmtrain.storage.region import Region, shard

SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
    "model.norm.weight": (8,),
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
WHOLE_LLAMA = {
    **SHAPES,
    **{f"model.layers.0.self_attn.{letter}_proj.weight": (8, 8) for letter in "qkvo"},
    "model.layers.0.mlp.gate_proj.weight": (16, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "lm_head.weight": (32, 8),
}
"""All parameters of the model that LLAMA describes."""
KINDS = ("param", "exp_avg", "exp_avg_sq")


def tensors(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[tuple[str, str], torch.Tensor]:
    """By (kind, name); one moment as Muon keeps it, in bf16."""
    draw = torch.Generator().manual_seed(seed)
    made = {(kind, name): torch.randn(shape, generator=draw) for name, shape in shapes.items() for kind in KINDS}
    first = next(iter(shapes))
    made[("momentum_buffer", first)] = torch.randn(shapes[first], generator=draw).bfloat16()
    return made


def trainer_state(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": 1024 * step,
        "sample_index": 8 * step,
        "skipped_steps": 0,
        "optimizer_step": step,
        "loss_scale": {},
        "run_id": "abcdefgh",
        "optimizer": "adamw",
        "vocab_size": 32,
        "data_fingerprint": "0" * 32,
        "separator_id": 0,
        "tokenizer_dir": "",
        "model_config": dict(LLAMA),
        "run": {"optim": {"name": "adamw", "lr": 0.003}, "train": {"max_steps": 100}},
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "versions": {"torch": "2.13.0"},
        "layout": {"world_size": 2, "zero_stage": 1},
        **changes,
    }


def write_checkpoint(
    where: Path,
    step: int,
    seed: int,
    *,
    ranks: int = 2,
    strided: bool = False,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    values: dict[tuple[str, str], torch.Tensor] | None = None,
    frozen: FrozenSource = NOWHERE,
    **trainer: Any,
) -> Path:
    """WHERE/checkpoints/step-N with each tensor cut into a slice for each rank. `trainer`: other values there.

    `strided`: as tensor-parallel ranks leave it: of each matrix but the embedding, columns, in two pieces.
    """
    folder = step_folder(where / "checkpoints", step)
    folder.mkdir(parents=True)
    whole = values or tensors(seed, shapes)
    whole = {key: value for key, value in whole.items() if key[1] not in frozen.parts}
    files = {}
    for rank in range(ranks):
        held, pieces = {}, []
        for (kind, name), values in whole.items():
            flat = values.reshape(-1)
            low, high = flat.numel() * rank // ranks, flat.numel() * (rank + 1) // ranks
            parts = [Region(low, high - low)]
            if strided and values.dim() == 2 and "embed" not in name:
                columns, _ = shard(values.shape, 1, rank, ranks)
                third = columns.numel // 3
                parts = [columns.part(0, third), columns.part(third, columns.numel)]
            for region in parts:
                part = pick(flat, region).clone()
                pieces.append(Piece(kind, name, region, checksum_part(part, region)))
                held[keys(pieces)[-1]] = part
        path = folder / f"rank-{rank:05d}.safetensors"
        save_file(held, path)
        files[path.name] = FileEntry(bytes=path.stat().st_size, xxh3=hash_file(path), pieces=pieces)
    (folder / TRAINER).write_text(json.dumps(trainer_state(step, **trainer), indent=1))
    files[TRAINER] = FileEntry(bytes=(folder / TRAINER).stat().st_size, xxh3=hash_file(folder / TRAINER))
    manifest = Manifest(
        step=step,
        tensors={name: list(shape) for name, shape in shapes.items()},
        files=files,
        layout={"world_size": ranks, "zero_stage": 1, "precision": "fp32"},
        frozen=frozen,
    )
    (folder / MANIFEST).write_text(manifest.to_json())
    return folder


def frozen_folder(
    folder: Path, names: list[str], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> FrozenSource:
    """A folder that has these parameters, one a file."""
    folder.mkdir()
    made = {name: torch.randn(shapes[name], generator=torch.Generator().manual_seed(5)).to(dtype) for name in names}
    for index, (name, value) in enumerate(made.items()):
        save_file({name: value}, folder / f"model-{index}.safetensors")
    return FrozenSource(
        folder=folder,
        checksums={name: checksum(value) for name, value in made.items()},
        parts={n: [(f"model-{i}.safetensors", n, Region(0, v.numel()))] for i, (n, v) in enumerate(made.items())},
    )


def sign(raw: Any) -> str:
    """A manifest with a signature that fits, whatever it says: what somebody with bad intent writes."""
    digest = xxhash.xxh3_64_hexdigest(json.dumps(raw, separators=(",", ":")).encode())
    return json.dumps({"manifest": raw, "xxh3": digest})


def resign(folder: Path) -> None:
    """Make sizes and hashes in the manifest fit the files again."""
    raw = json.loads((folder / MANIFEST).read_text())["manifest"]
    for name, entry in raw["files"].items():
        entry.update(bytes=(folder / name).stat().st_size, xxh3=hash_file(folder / name))
    (folder / MANIFEST).write_text(sign(raw))


def at(run: Path, step: int) -> Path:
    """The folder of a step."""
    return run / "checkpoints" / f"step-{step:08d}"


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


_close = DurableFile.close


def close_and_change(self: DurableFile) -> tuple[int, str]:
    """DurableFile.close on a disk that changes a byte of a large file."""
    told = _close(self)
    if told[0] > 2000:
        flip(self.path, told[0] // 2)
    return told
