"""Make a checkpoint from tensors that come from somewhere else than a live engine. No torch.distributed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.durable import write_durably
from llmtrain.checkpoint.format import MANIFEST, TRAINER, FileEntry, Manifest, Piece
from llmtrain.checkpoint.output import OutputFolder, stream_tensors
from llmtrain.checkpoint.verify import verify
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.checksum import checksum
from llmtrain.storage.region import whole
from llmtrain.storage.tensorfile import numel

_FILE_BYTES = 4 << 30

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name in the file -> (dtype, shape)."""


def build_checkpoint(
    out: Path,
    *,
    step: int,
    shapes: Mapping[str, tuple[int, ...]],
    moments: Mapping[str, set[str]],
    read: Callable[[str, str, int, int], Tensor],
    trainer: dict[str, Any],
    layout: dict[str, Any],
    plan: dict[str, Any],
    advance: Callable[[int], None] = lambda count: None,
    read_again: bool = True,
) -> Path:
    """Write the checkpoint folder `out` (step-00000500, for one) with whole fp32 tensors.

    Args:
        shapes: by Hugging Face name.
        moments: optimizer moments: kind -> the names that have it. Empty for weights alone.
        read: (kind, name, start, stop) -> the flat fp32 elements; called from several threads.
        trainer: what goes into trainer.json.
        plan: identifies the conversion, so that a restart knows whether it continues the same one.
        advance: told the bytes written.
        read_again: read every byte back before it gets its name. For a caller that does not do so itself.

    Raises:
        CheckpointError: as OutputFolder does, or what was written is not what was read.
    """
    keys = {f"{kind}/{name}": (kind, name) for kind, names in {PARAM: set(shapes), **moments}.items() for name in names}
    groups = _files(keys, shapes)

    def write(path: Path, group: Tensors) -> dict[str, Any]:
        sums: dict[str, dict[int, int]] = {key: {} for key in group}  # by chunk: the chunks come from several threads

        def chunk(key: str, start: int, stop: int) -> Tensor:
            values = read(*keys[key], start, stop).float()
            sums[key][start] = checksum(values, start)
            return values

        info = stream_tensors(path, group, chunk, align=4096, advance=advance)
        return {**info, "sums": {key: sum(parts.values()) % 2**64 for key, parts in sums.items()}}

    with OutputFolder(out, plan) as folder:
        folder.need(sum(4 * numel(shape) for group in groups for _, shape in group.values()) + (16 << 20))
        files: dict[str, FileEntry] = {}
        for index, group in enumerate(groups):
            name = f"rank-{index:05d}.safetensors"
            info = folder.file(name, lambda path, group=group: write(path, group))  # type: ignore[misc]
            pieces = [Piece(*keys[key], whole(shape), info["sums"][key]) for key, (_, shape) in group.items()]
            files[name] = FileEntry(bytes=info["bytes"], xxh3=info["xxh3"], pieces=pieces)
        size, xxh3 = write_durably(folder.partial / TRAINER, json.dumps(trainer, indent=1))
        files[TRAINER] = FileEntry(bytes=size, xxh3=xxh3)
        manifest = Manifest(
            step=step, tensors={name: list(s) for name, s in shapes.items()}, files=files, layout=layout
        )
        write_durably(folder.partial / MANIFEST, manifest.to_json())
        if read_again and (wrong := verify(folder.partial)):
            raise CheckpointError(f"{out} was not written as it should be, and nothing was kept: {wrong[0]}.")
        return folder.commit()


def _files(keys: Mapping[str, tuple[str, str]], shapes: Mapping[str, tuple[int, ...]]) -> list[Tensors]:
    """The tensors of each file, in the order of `shapes`."""
    place = {name: index for index, name in enumerate(shapes)}
    groups: list[Tensors] = [{}]
    size = 0
    for key, (_, name) in sorted(keys.items(), key=lambda item: (place[item[1][1]], item[0])):
        grows = 4 * numel(shapes[name])
        if groups[-1] and size + grows > _FILE_BYTES:
            groups.append({})
            size = 0
        groups[-1][key] = ("F32", shapes[name])
        size += grows
    return groups
