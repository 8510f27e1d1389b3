"""`llmtrain checkpoint average A B ... OUT`: the mean of the parameters of several checkpoints of one model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.base import units
from llmtrain.base.errors import CheckpointError
from llmtrain.base.log import Progress
from llmtrain.checkpoint.format import MANIFEST, complete_checkpoints, hash_file, read_trainer, step_folder
from llmtrain.checkpoint.meaning import other_meaning, other_scale
from llmtrain.checkpoint.output import build_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.verify import wrong_frozen
from llmtrain.storage.checksum import checksum
from llmtrain.storage.tensorfile import numel


def average(sources: list[Path], out: Path) -> list[str]:
    """Write OUT/checkpoints/step-N, the mean of the parameters in fp64 without moments; N is the newest source's step.
    Returns the report's lines. Raises CheckpointError: other tensors, another model, a damaged source, or OUT has
    checkpoints already."""
    if len({path.resolve() for path in sources}) != len(sources) or len(sources) < 2:
        raise CheckpointError("average takes two or more different checkpoints, and then the folder to write.")
    if complete_checkpoints(out / "checkpoints"):
        raise CheckpointError(f"{out} holds checkpoints already; nothing was written. Give a new folder.")
    readers = [CheckpointReader(path) for path in sources]
    trainers = [read_trainer(path) for path in sources]
    _refuse_other_models(readers, trainers)
    mean = _Mean(readers)
    newest = max(range(len(sources)), key=lambda i: readers[i].manifest.step)
    step = readers[newest].manifest.step
    first = readers[0]
    shapes = {name: first.shape(name) for name in first.order()}
    total = 4 * sum(map(numel, shapes.values()))
    trainer = {**trainers[newest], "weights_only": True, "averaged": [str(path) for path in sources]}
    for key in ("source", "evaluation", "ema"):
        # A mean has no way back, byte by byte, to the folder of an import, and no evaluation of its own.
        trainer.pop(key, None)
    with Progress("averaging", total) as progress:
        written = build_checkpoint(
            step_folder(out / "checkpoints", step),
            step=step,
            shapes=shapes,
            moments={},
            read=mean.read,
            trainer=trainer,
            layout={"made_by": "average", "precision": readers[newest].manifest.layout.get("precision")},
            plan={"average": [hash_file(path / MANIFEST) for path in sources]},
            advance=progress.advance,
        )
    for reader in readers:
        reader.close()
    return [
        *(
            f"read     {path}, step {reader.manifest.step}: checksums agree"
            for path, reader in zip(sources, readers, strict=True)
        ),
        f"wrote    {written}: {len(shapes)} tensors, {units.size(total)}, the mean of {len(sources)}, no moments",
    ]


def _refuse_other_models(readers: list[CheckpointReader], trainers: list[dict[str, Any]]) -> None:
    first = readers[0]
    for reader, trainer in zip(readers[1:], trainers[1:], strict=True):
        told = trainers[0], trainer
        changed = other_meaning(*(state.get("model_config") for state in told)) + other_scale(*told)
        for key in ("vocab_size", "tokenizer"):
            was, now = (state.get(key) for state in told)
            changed += [f"{key}: {was} -> {now}"] if None not in (was, now) and was != now else []
        if changed:
            raise CheckpointError(f"{first.folder} and {reader.folder} are of different models: {'; '.join(changed)}. "
                                  "Only checkpoints of one model have a mean.")  # fmt: skip
        theirs, ours = ({name: r.shape(name) for name in r.order()} for r in (reader, first))
        if theirs != ours:
            name = sorted(theirs.items() ^ ours.items())[0][0]
            raise CheckpointError(
                f"{name} is {ours.get(name, 'missing')} in {first.folder} and {theirs.get(name, 'missing')} in "
                f"{reader.folder}. Only checkpoints with the same tensors have a mean."
            )


class _Mean:
    """The mean of parameters, chunk by chunk and from several threads; checksums find a source's damage."""

    def __init__(self, readers: list[CheckpointReader]) -> None:
        self._readers = readers
        self._sums = [reader.manifest.checksums() for reader in readers]
        self._left: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the mean in fp32. Raises CheckpointError after the last element of a damaged
        tensor."""
        total = torch.zeros(stop - start, dtype=torch.float64)
        found = []
        for reader in self._readers:
            values = reader.read_kind(kind, name, start, stop)
            found.append(checksum(values, start))
            total += values
        with self._lock:
            left = self._left.get(name, numel(self._readers[0].shape(name))) - (stop - start)
            self._left[name] = left
            for sums, value in zip(self._sums, found, strict=True):
                sums[kind, name] = (sums[kind, name] - value) % 2**64
            damaged = [r for r, sums in zip(self._readers, self._sums, strict=True) if sums[kind, name]]
        if left == 0 and damaged:
            raise wrong_frozen(damaged[0].manifest.frozen, [name]) or CheckpointError(
                f"{damaged[0].folder}: {kind} of {name} is damaged; nothing was written. "
                f"`llmtrain checkpoint verify {damaged[0].folder}` shows the place."
            )
        return (total / len(self._readers)).float()
