"""Imports a Hugging Face folder as a checkpoint of parameters alone: streamed, restartable, proved."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import CheckpointError, ModelError, UserError
from llmtrain.checkpoint.durable import remove_tree, sync
from llmtrain.checkpoint.format import MANIFEST, step_folder
from llmtrain.checkpoint.hf.exporting import layout_of
from llmtrain.checkpoint.hf.folder_files import DTYPES, SOURCE, beside_weights, copy_into, describe
from llmtrain.checkpoint.hf.proofs import Check, Conversion, Report, check_extents, prove_logits, read_back
from llmtrain.checkpoint.output import Contents, build_checkpoint, claim
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.run import ModelConfig
from llmtrain.models.layout import FolderLayout
from llmtrain.models.source import SafetensorsSource, refuse_escape
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.pieces import DTYPE_OF
from llmtrain.storage.tensorfile import numel

_ASKED_BY = "from-hf"


def import_hf(folder: Path, out: Path, *, check: Check = "auto", trust_remote_code: bool = False) -> Report:
    """Write `out`/checkpoints/step-00000000 with the parameters of a Hugging Face folder in fp32.

    `out` also keeps the folder's other files, so that to-hf can restore the folder byte by byte.

    Raises:
        CheckpointError: `out` exists, or another process writes it.
        ModelError: the folder is no model, does not fit its own configuration, or needs code that is not trusted.
        ProofError: the files differ from their source. Nothing is left at `out`.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already; nothing was written. Give another name or move it away.")
    report = Report(out)
    model, config = _configuration(folder)
    beside = beside_weights(folder, python=trust_remote_code)
    layout = layout_of(model, trust_remote_code=trust_remote_code)
    source = SafetensorsSource(folder, layout, asked_by=_ASKED_BY)
    _check_names(source, layout, report)
    partial = out.with_name(out.name + ".tmp")
    lock = claim(partial)
    try:
        # Of what an earlier start left, only the checkpoint is continued.
        kept_step = step_folder(partial / "checkpoints", 0)
        for child in (*partial.glob("*"), *partial.glob("checkpoints/*")):
            if child not in (kept_step.parent, kept_step, kept_step.with_name(kept_step.name + ".tmp")):
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        step = _write(partial, source, layout, config, report)
        _keep(beside, folder, partial / SOURCE)
        if check != "none":
            made = Conversion(layout=layout, check=check, report=report, trust_remote_code=trust_remote_code)
            _prove(step, source, made)
        sync(partial)
        partial.rename(out)
        sync(out.parent)
    except UserError as error:
        if not isinstance(error.__cause__, OSError):  # after a full disk the same command can continue
            remove_tree(partial)
        raise
    except OSError as error:
        raise CheckpointError(
            f"{partial} cannot be written: {error.strerror}. Fix the cause and start the same command again."
        ) from error
    finally:
        os.close(lock)
        source.close()
    total = 4 * sum(map(numel, layout.shapes.values()))
    report.add("written", f"{step_folder(out / 'checkpoints', 0)}: {units.size(total)}, parameters alone")
    return report


def _configuration(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{_ASKED_BY}: {folder} has no config.json. Give a Hugging Face model folder.")
    try:
        config = untrusted.loads(refuse_escape(folder, path).read_bytes(), infinite=True)
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"{_ASKED_BY}: {path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{_ASKED_BY}: {path} is not a model configuration.")
    if config.get("quantization_config"):
        raise ModelError(f"{_ASKED_BY}: {path}: quantization_config: quantized weights are not read. Dequantize them.")
    return ModelConfig(pretrained=str(folder), attention="eager"), config


def _check_names(source: SafetensorsSource, layout: FolderLayout, report: Report) -> None:
    model, names = type(layout.skeleton).__name__, set(source.order())
    if lacking := sorted(layout.shapes.keys() - names):
        raise ModelError(
            f"{source.origin} lacks {len(lacking)} of the {len(layout.shapes)} parameters of {model}, first "
            f"{', '.join(lacking[:3])}. Does config.json belong to these weights (tie_word_embeddings, "
            "num_hidden_layers)?"
        )
    if surplus := source.placement.surplus:
        raise ModelError(
            f"{source.origin} holds {len(surplus)} tensors for which {model} has no place, first "
            f"{', '.join(surplus[:3])}. Does config.json belong to these weights?"
        )
    for name, shape in layout.shapes.items():
        if source.shape(name) != shape:
            raise ModelError(
                f"{source.origin}: {name} has the shape {list(source.shape(name))}, but {list(shape)} by config.json."
            )
        if odd := source.dtypes(name) - set(DTYPES.values()):
            raise ModelError(f"{source.origin}: {name} has the type {odd.pop()}; it must be F32, BF16 or F16.")
    tied = f", {layout.tied} tied" if layout.tied else ""
    report.add("parameters", f"{len(layout.shapes)}: names and shapes are those of {model}{tied}")
    dropped = source.placement.derived
    if dropped:
        report.add("dropped", f"{len(dropped)} that the model computes itself, first {', '.join(dropped[:3])}")


def _write(
    partial: Path, source: SafetensorsSource, layout: FolderLayout, config: Mapping[str, Any], report: Report
) -> Path:
    """Write the checkpoint, unless an earlier start of the same conversion has finished it. Returns its folder."""
    step = step_folder(partial / "checkpoints", 0)
    files, changed = describe(source)
    described = _described(source, files, config)
    settings = layout.skeleton.config
    trainer = TrainerState(
        vocab_size=settings.get_text_config().vocab_size,
        separator_id=settings.eos_token_id,
        tokenizer_dir=str((partial.with_name(partial.name.removesuffix(".tmp")) / SOURCE).absolute()),
        model_config=settings.to_dict(),
        entries={"weights_only": True, "source": described},
    ).to_json()
    if (step / MANIFEST).is_file() and TrainerState.read(step).to_json() == json.loads(json.dumps(trainer)):
        log.info(f"continuing {partial}: the checkpoint is finished")
    else:
        remove_tree(step)
        with log.Progress("writing", 4 * sum(map(numel, layout.shapes.values()))) as progress:
            contents = Contents(
                step=0,
                shapes={name: layout.shapes[name] for name in source.order()},
                read=lambda _, name, start, stop: source.read(name, start, stop).float(),
                trainer=trainer,
                layout={"made_by": _ASKED_BY, "precision": described["precision"]},
            )
            plan = {_ASKED_BY: described["identity"]}
            # `_prove` reads it again, unless the check is off
            build_checkpoint(step, contents, plan, advance=progress.advance, read_again=False)
    twins = source.placement.twins
    if twins:
        report.add("ties", f"{', '.join(sorted(twins))} repeats a tied weight; to-hf writes it once")
    report.add(
        "way back",
        f"to-hf writes other bytes for {', '.join(changed[:3])}" if changed else "to-hf writes the same weight files",
    )
    return step


def _described(source: SafetensorsSource, files: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `to-hf` needs to write the folder again."""
    kinds = [kind for file in files.values() for kind in file["tensors"].values()]
    most = max(sorted(set(kinds)), key=kinds.count)
    stats = {file.path: os.stat(file.path) for file in source.file_of.values()}
    return {
        "folder": str(source.folder.resolve()),
        "identity": {str(path.resolve()): [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()},
        "config": dict(config),
        "files": files,
        "precision": next(own_name for own_name, stored_name in DTYPES.items() if stored_name == most),
    }


def _keep(files: list[Path], folder: Path, target: Path) -> None:
    target.mkdir()
    for file in files:
        sync(copy_into(target, folder, file))
    sync(target)


def _prove(step: Path, source: SafetensorsSource, made: Conversion) -> None:
    """Read the checkpoint back and compare it with its source. Raises ProofError."""
    reader, layout = CheckpointReader(step), made.layout
    expected = {name: value for (kind, name), value in reader.manifest.checksums().items() if kind == PARAM}
    check_extents(read_back(reader, layout, expected, "reading back"), made)
    made.report.add("round trip", f"{len(expected)} parameters read back, equal to the source bit by bit")

    def values(name: str, start: int, stop: int) -> Tensor:
        kinds = source.dtypes(name)
        return reader.read(name, start, stop).to(DTYPE_OF[kinds.pop()] if len(kinds) == 1 else torch.float32).float()

    dtypes = {DTYPE_OF[kind] for name in layout.shapes for kind in source.dtypes(name)}
    prove_logits(made, values, source.folder, dtypes)
    reader.close()
