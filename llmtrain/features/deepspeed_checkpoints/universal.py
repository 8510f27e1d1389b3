"""DeepSpeed's universal checkpoints, imported and exported: a folder per parameter, with fp32.pt and the moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.base import units
from llmtrain.base.errors import CheckpointError
from llmtrain.base.log import Progress
from llmtrain.checkpoint.durable import DurableFile, write_durably
from llmtrain.checkpoint.format import OUTER, step_of
from llmtrain.checkpoint.output import OutputFolder
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.features.deepspeed_checkpoints.pickles import PickleFile, write_pickle
from llmtrain.features.deepspeed_checkpoints.saved_files import Files
from llmtrain.features.deepspeed_checkpoints.state import MOMENTS, Span, State
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.checksum import checksum
from llmtrain.storage.tensorfile import numel

_VERSION = "0.19.8"
_FILE_OF = {PARAM: "fp32"}
_GROUPS = 64  # more parameter groups than anyone has: DeepSpeed loads as many as the file lists, and ignores the rest
_PARALLEL = {"dp_world_size": 1, "mp_world_size": 1, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}}


def add_universal(state: State, files: Files, kinds: tuple[str, ...]) -> None:
    """Add masters and moments: flat, one a file, if made from ZeRO 3, else a dictionary. Raises CheckpointError."""
    shapes: dict[str, Any] = {}
    for model in files.models:
        for group in model.tree.get("param_shapes") or []:
            shapes.update(group)
    for name, files_of in files.parameters.items():
        for kind in (PARAM, *kinds):
            file = files_of.get(_FILE_OF.get(kind, kind))
            if file is None:
                raise CheckpointError(
                    f"{files.folder / 'zero' / name} has no {kind}.pt. The weights alone can be imported, with "
                    "--weights-only."
                )
            tensor = file.tensor(file.tree["param"] if isinstance(file.tree, dict) else file.tree)
            if kind == PARAM:
                state.shapes[name] = tuple(int(size) for size in shapes.get(name, tensor.shape))
            state.add(kind, name, Span(file, tensor, 0, 0, tensor.numel()))
        if kinds and "step" in files_of:
            state.note_step(files_of["step"], files_of["step"].tree)
    for file in files.shared if kinds else []:
        inner = file.tree.get("optimizer_state_dict") or {}
        for entry in (inner.get("state") or {}).values():
            state.note_step(file, entry["step"])
    if kinds and not state.steps:
        raise CheckpointError(f"{files.folder / 'zero'} records no optimizer step. Import with --weights-only.")


def export_universal(checkpoint: Path, out: Path) -> list[str]:
    """Write `out` for DeepSpeed 0.19.8 with "load_universal": true, at any ZeRO stage; checksums are compared. Returns
    a report's lines. Raises CheckpointError: it is damaged, has no Adam moments or a frozen tensor, or `out` exists."""
    reader, trainer = CheckpointReader(checkpoint), TrainerState.read(checkpoint)
    kinds = (PARAM, *MOMENTS)
    if {kind for kind in reader.kinds() if not kind.startswith(OUTER)} != set(kinds):
        raise CheckpointError(
            f"{checkpoint} holds {', '.join(sorted(reader.kinds()))}; DeepSpeed's universal format is for Adam: "
            f"{', '.join(kinds)}."
        )
    saved = reader.tensors()
    if lost := [name for name in reader.order() if (MOMENTS[0], name) not in saved]:
        raise CheckpointError(
            f"{checkpoint} holds {len(lost)} frozen tensors, first {lost[0]}. DeepSpeed's universal format has only "
            "trained tensors, so these would be lost: nothing was written. Use `llmtrain checkpoint to-hf`."
        )
    for name in reader.order():
        if Path(name).name != name or name in (".", ".."):
            raise CheckpointError(
                f"{checkpoint}: {name!r} cannot be the name of a folder, as the universal format has it."
            )
    tag = f"step-{step_of(checkpoint) or trainer.step:08d}"
    sums, names = reader.manifest.checksums(), reader.order()
    applied = trainer.step if trainer.optimizer_step is None else trainer.optimizer_step
    count = torch.tensor(float(applied))
    total = 4 * sum(numel(reader.shape(name)) for name in names) * len(kinds)
    with OutputFolder(out, {"universal": str(checkpoint.resolve()), "sums": sorted(sums.values())}) as folder:
        folder.need(total + 4096 * (8 * len(names) + 8))
        with Progress(f"writing {out}", total) as bar:
            for name in names:
                home = folder.partial / tag / "zero" / name
                home.mkdir(parents=True, exist_ok=True)
                for kind in kinds:
                    path = f"{tag}/zero/{name}/{_FILE_OF.get(kind, kind)}.pt"
                    folder.file(path, _writer(lambda k=kind, n=name: {"param": _whole(reader, k, n, sums)}))  # type: ignore[misc]
                    file = PickleFile(folder.partial / path)
                    tensor = file.tensor(file.tree["param"])
                    if checksum(file.read(tensor, 0, tensor.numel())) != sums[kind, name]:
                        wrong = f"{folder.partial / path} was not written as it should be"
                        raise CheckpointError(f"{wrong}: its values are others when read back.")
                    bar.advance(4 * numel(reader.shape(name)))
                folder.file(f"{tag}/zero/{name}/step.pt", _writer(lambda: count))
        groups: list[dict[str, Any]] = [{} for _ in range(_GROUPS)]
        optimizer = {  # ZeRO 1 and 2 look at the top, ZeRO 3 one level below
            "ds_version": _VERSION,
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: {"step": count}}, "param_groups": groups[:1]},
        }
        folder.file(f"{tag}/zero/optimizer_state.pt", _writer(lambda: optimizer))
        model = _model_state(reader, trainer)
        for state in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # ZeRO 0-2, and 3
            folder.file(f"{tag}/{state}", _writer(lambda: model))
        write_durably(folder.partial / "latest_universal", tag)
        folder.commit()
    return [
        f"{checkpoint}: step {trainer.step}, optimizer step {applied}",
        f"{len(sums)} tensors of {len(names)} parameters ({units.size(total)}): all agree with the manifest, "
        "and again when read back",
        f'wrote {out}; load it with "checkpoint": {{"load_universal": true}} and load_checkpoint("{out}")',
    ]


def _writer(tree: Callable[[], Any]) -> Callable[[Path], dict[str, Any]]:
    def write(path: Path) -> dict[str, Any]:
        with DurableFile(path) as file:
            write_pickle(tree(), file.write)
            size, _ = file.close()
        return {"bytes": size}

    return write


def _whole(reader: CheckpointReader, kind: str, name: str, sums: dict[tuple[str, str], int]) -> Tensor:
    shape = reader.shape(name)
    values = reader.read_kind(kind, name, 0, numel(shape))
    if checksum(values) != sums[kind, name]:
        raise CheckpointError(
            f"{reader.folder}: {kind} of {name} differs from the manifest's checksum. Run verify on it."
        )
    return values.reshape(shape)


def _model_state(reader: CheckpointReader, trainer: TrainerState) -> dict[str, Any]:
    step = trainer.step
    return {
        "module": None,
        "param_shapes": [{name: torch.Size(reader.shape(name)) for name in reader.order()}],
        "lr_scheduler": {"last_batch_iteration": step - 1, "last_epoch": step},
        "global_steps": step,
        "global_samples": trainer.sample_index,
        "skipped_steps": trainer.skipped_steps,
        **_PARALLEL,
        "ds_config": {},
        "ds_version": _VERSION,
    }
