"""Requirements of a run on its hosts: files, folders and ops. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain.base.errors import DataError, ModelError
from llmtrain.config.load import configs_in
from llmtrain.config.on_disk import has_checkpoints, reads_weights
from llmtrain.config.run import Run, RunConfig
from llmtrain.config.stages import data_of
from llmtrain.data.manifest import SPLITS, read_manifest
from llmtrain.data.stream.reference_and_teacher import column_stem
from llmtrain.features import disks
from llmtrain.features.doctor.checks import Folder, Needs
from llmtrain.optim.optimizers import Optimizer
from llmtrain.storage.addresses import INDEX, is_name, is_url
from llmtrain.storage.hub import weights


def needs(words: Sequence[str], run: Run) -> Needs:
    """Return what a run needs of its hosts. `words`: those of the command line that name the run."""
    config = run.config
    return Needs(
        files=(*configs_in(words), config.deepspeed),
        folders=tuple(_read_by(config)),
        folder=config.checkpoint.dir or run.run_dir,
        own_folders=config.checkpoint.dir is not None,
        ops=Optimizer.CHOICES[run.mix.optimizer].host_ops if run.mix.offload_optimizer and not run.mix.swaps else (),
        disks=disks(run),
    )


def _read_by(config: RunConfig) -> Iterator[Folder]:
    """Yield the folders and files that the ranks on each host read."""
    data: dict[tuple[str, str], set[int]] = {}
    for stage in data_of(config.data):
        for path in stage.folders:
            data.setdefault(("data.path" if stage.path else "data.mixture", path), set()).add(stage.sequence_length)
    for section, folders in {"sets": config.eval.sets, "choices": config.eval.choices}.items():
        data |= {(f"eval.{section}.{name}", path): {config.data.sequence_length} for name, path in folders.items()}
    for (key, path), lengths in data.items():
        if is_url(path):  # the same for all hosts; each rank opens it
            continue
        yield Folder(key=key, path=os.path.abspath(path), files=_of_data(config, Path(path), lengths))
    models = [
        ("model.pretrained", config.model.pretrained, reads_weights(config)),
        ("model.config", config.model.config, False),
        ("objective.teacher", config.objective.teacher, True),
    ]
    for key, model, weights_too in models:
        if isinstance(model, str) and is_url(model):
            continue  # each host fetches it
        if isinstance(model, str) and is_name(model):
            yield Folder(key=key, path=os.path.abspath(model), on_hub=True)
        elif isinstance(model, str):
            file = Path(model) if os.path.isfile(model) else Path(model) / "config.json"
            names = [file.name, *(_weights(file.parent) if weights_too else ())]
            yield Folder(key=key, path=os.path.abspath(file.parent), files=tuple(names))
    if config.adapter.start:
        names = ["adapter_config.json", "adapter_model.safetensors"]
        yield Folder(key="adapter.start", path=os.path.abspath(config.adapter.start), files=tuple(names))
    if config.resume not in ("auto", "none") and not is_url(config.resume) and not has_checkpoints(config):
        yield Folder(key="resume", path=os.path.abspath(config.resume))  # each host may have other files


def _of_data(config: RunConfig, folder: Path, lengths: set[int]) -> tuple[str, ...]:
    """Return the files of a prepared folder that the run opens; only the manifest if it is broken.

    `lengths`: sequence lengths in which the run reads the folder."""
    try:
        manifest = read_manifest(folder)
    except DataError:
        return ("manifest.json",)
    read = [shard for split in SPLITS for shard in manifest.shards[split]]
    rows = [Path(shard.file).with_suffix(".rows").name for shard in read if shard.rows]
    columns = []
    if config.objective.reference == "column":
        columns = ["reference.json", *(f"reference-{split}.f32" for split in SPLITS)]
    if config.objective.top_k is not None:
        for stem in map(column_stem, sorted(lengths) if manifest.chat is None else [None]):
            columns += [f"{stem}.json", *(f"{stem}-{split}.{kind}" for split in SPLITS for kind in ("f32", "words"))]
    return ("manifest.json", "tokenizer/tokenizer.json", *(shard.file for shard in read), *rows, *columns)


def _weights(folder: Path) -> list[str]:
    """Return the weight files of a model's folder; none for a broken folder, on which the run reports the error."""
    with contextlib.suppress(ModelError, OSError):
        names = os.listdir(folder)
        return [name for name in (INDEX,) if name in names] + list(weights(ModelError)(names, folder))
    return []
