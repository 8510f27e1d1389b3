"""Finds the Hugging Face folder for a path: itself, a model on the Hub or in a store, or an export of a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import CheckpointError
from llmtrain.base.files import scratch_folder
from llmtrain.checkpoint.format import MANIFEST, complete_checkpoints, hash_file
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.folder_files import MARK
from llmtrain.checkpoint.hf.inference import Answerer
from llmtrain.models.parameters import CONFIG
from llmtrain.storage.addresses import folder_here, is_url


def load(path: str | os.PathLike[str], *, device: Any = "auto") -> tuple[Any, Any]:
    """Load a trained model from a run folder, or from a Hugging Face or PEFT folder.

    Args:
        path: of a run folder the newest checkpoint or export is loaded.
        device: `auto` spreads the model over all accelerators; what does not fit stays on the host.

    Returns: (a transformers model in evaluation mode, its tokenizer).

    Raises: CheckpointError, ModelError, ConfigError.
    """
    with usable_folder(os.fspath(path), "llmtrain.load") as folder:
        answerer = Answerer.load(folder, device)
    return answerer.model, answerer.tokenizer


@contextmanager
def usable_folder(path: str, asked_by: str, *, best: bool = False) -> Iterator[Path]:
    """A context with the Hugging Face folder for `path`: itself, a model on the Hub or in a store, or an export of a
    run's newest (or `best`) checkpoint, made for the duration if need be. Raises CheckpointError, ModelError."""
    with scratch_folder("export") as scratch:
        if is_url(path) and (best or not _is_model_there(path)):
            from llmtrain.checkpoint.listing import best_checkpoints, find_checkpoints
            from llmtrain.checkpoint.remote import checkpoints_at

            checkpoints = checkpoints_at(path, find=best_checkpoints if best else find_checkpoints)
            yield _hf_folder(checkpoints[0], scratch)
        elif (folder := folder_here(path)) is not None:
            yield _hf_folder(folder, scratch, best=best)
        else:
            from llmtrain.storage.hub import model_folder

            yield _hf_folder(model_folder(path, asked_by=asked_by), scratch, best=best)


def _is_model_there(url: str) -> bool:
    from llmtrain.storage.object_store import Store, StoreError

    try:
        names = Store(url).files()
    except StoreError:  # opening the URL as a run reports the error
        return False
    return "config.json" in names or CONFIG in names


def is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", CONFIG))


def _hf_folder(path: Path, scratch: Path, *, best: bool = False) -> Path:
    if is_model(path) and not best:
        return path
    from llmtrain.checkpoint.listing import best_checkpoints, find_checkpoints, read_while_there

    export = path / "export"
    checkpoints = complete_checkpoints(path / "checkpoints")
    exported = None if best else _mark(export)
    # Compare manifests, not steps: a run that was started again reaches the same step with other weights.
    if exported is not None and (not checkpoints or exported.get("manifest") == hash_file(checkpoints[0] / MANIFEST)):
        print(f"model: {export}, of step {untrusted.shown(exported.get('step'), 40)}", file=sys.stderr)
        return export
    older = "" if exported is None else f"; {export} is of step {exported.get('step')}"

    def wanted() -> Path:
        if best:
            return best_checkpoints(path)[0]
        try:
            return find_checkpoints(path)[0]
        except CheckpointError as error:
            raise CheckpointError(f"{error} A Hugging Face folder (with a config.json) can be given too.") from error

    def exported_from(checkpoint: Path) -> None:
        shutil.rmtree(scratch / "export", ignore_errors=True)  # left by an attempt whose checkpoint was deleted
        export_hf(checkpoint, scratch / "export", check="none")

    used, _ = read_while_there(wanted, exported_from)
    print(f"model: {used}{older}", file=sys.stderr)
    return scratch / "export"


def _mark(export: Path) -> dict[str, Any] | None:
    """Return the record of an export, {} if it cannot be read; None: there is no export."""
    if not is_model(export):
        return None
    try:
        mark = untrusted.loads((export / MARK).read_bytes(), infinite=True)
    except (OSError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}
