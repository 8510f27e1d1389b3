"""The files of a DeepSpeed 0.19.8 checkpoint, with a check that all are there and of one step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint.format import open_file
from llmtrain.features.deepspeed_checkpoints.pickles import PickleFile, shown

_MODEL = re.compile(r"mp_rank_([0-9]+)_model_states\.pt")
_MODEL_3 = re.compile(r"zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
_ZERO = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
_LAYER = re.compile(r"layer_([0-9]+)-model_states\.pt")
_TAG_BYTES = 4096


@dataclass
class Files:
    """The files of one tag, open and loaded without tensor values."""

    folder: Path
    models: list[PickleFile] = field(default_factory=list)
    """Model files by pipeline stage; under ZeRO 3 by rank."""
    zero: list[list[PickleFile]] = field(default_factory=list)
    """ZeRO's optimizer files, by pipeline stage, then by data-parallel rank. Empty: without ZeRO, or left out."""
    layers: dict[int, PickleFile] = field(default_factory=dict)
    """A PipelineModule's layer files."""
    parameters: dict[str, dict[str, PickleFile]] = field(default_factory=dict)
    """A universal checkpoint's files by parameter, then by kind: fp32, exp_avg, exp_avg_sq, step."""
    shared: list[PickleFile] = field(default_factory=list)
    """A universal checkpoint's optimizer_state.pt."""

    def all(self) -> list[PickleFile]:
        zero = [file for stage in self.zero for file in stage]
        parameters = [file for kinds in self.parameters.values() for file in kinds.values()]
        return [*self.models, *zero, *self.layers.values(), *self.shared, *parameters]

    def verify(self, advance: Callable[[int], None]) -> None:
        """Raises CheckpointError."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for job in [pool.submit(file.verify, advance) for file in self.all()]:
                job.result()

    @property
    def universal(self) -> bool:
        return bool(self.parameters)

    def ranks(self) -> int:
        """Ranks of the training that saved. Raises CheckpointError."""
        return _count(self, "dp_world_size") * (len(self.models) if self.layers else 1)

    @property
    def state(self) -> dict[str, Any]:
        """Entries that all model files share: global_steps, ..."""
        return self.models[0].tree


def find_tag(folder: Path, tag: str | None) -> Path:
    """The folder of one step in `folder`, or `folder` itself. Raises CheckpointError: there is none."""
    if tag is None:
        for name in ("latest", "latest_universal"):
            if (folder / name).is_symlink() or (folder / name).exists():
                tag = _read_tag(folder / name)
                break
        else:
            if any(_MODEL.fullmatch(p.name) or _MODEL_3.fullmatch(p.name) for p in _list(folder)):
                return folder
            raise CheckpointError(
                f"{folder} is not a DeepSpeed checkpoint: it has no file `latest` and no *_model_states.pt. Give the "
                "folder that engine.save_checkpoint was given, and --tag for a step that `latest` does not name."
            )
    if not tag.isprintable() or tag in ("", ".", "..") or Path(tag).name != tag:
        raise CheckpointError(f"{folder}: the tag {tag!r} is no name of a folder in it. Give another one with --tag.")
    chosen = folder / tag
    if chosen.is_symlink() or not chosen.is_dir():
        names = ", ".join(sorted(p.name for p in _list(folder) if p.is_dir())) or "none"
        raise CheckpointError(f"{chosen} is not a folder (folders there: {names}). Name one of them with --tag.")
    return chosen


def _read_tag(path: Path) -> str:
    try:
        with open(open_file(path), "rb") as file:
            return file.read(_TAG_BYTES).decode().strip()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not a text file. Give the step's folder with --tag.") from None


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error


def open_files(tag: Path, *, weights_only: bool) -> Files:
    """Load all files of a tag. Raises CheckpointError: one is missing, left over, refused or of another step, or has an
    unsupported form (tensor-parallel, mixture of experts)."""
    names = sorted(p.name for p in _list(tag) if p.name.endswith(".pt"))
    odd = [name for name in names if "_expert_" in name or re.match(r"layer_[0-9]+-.*model_[0-9]", name)]
    if odd:
        raise CheckpointError(f"{tag / odd[0]}: experts and tensor-parallel layers of DeepSpeed's are not read.")
    files = Files(tag)
    _open_universal(files)
    _open_models(files, names)
    _same_step(files)
    if not files.universal:
        _open_layers(files, names)
        _open_zero(files, names, weights_only)
    return files


def _open_universal(files: Files) -> None:
    folder = files.folder / "zero"
    if not folder.exists():
        return
    for path in sorted(_list(folder)):
        if path.name == "optimizer_state.pt":
            files.shared.append(PickleFile(path))
        elif path.is_symlink() or not path.is_dir() or not path.name.isprintable():
            raise CheckpointError(f"{path} is no folder of a parameter; a universal checkpoint has nothing else there.")
        else:
            parts = {part.stem: PickleFile(part) for part in sorted(_list(path)) if part.suffix == ".pt"}
            if "fp32" not in parts:
                raise CheckpointError(
                    f"{path} has no fp32.pt: the conversion to this universal checkpoint was cut short."
                )
            files.parameters[path.name] = parts


def _open_models(files: Files, names: list[str]) -> None:
    plain = {int(m[1]): name for name in names if (m := _MODEL.fullmatch(name))}
    zero_3 = {(int(m[2]), int(m[1])): name for name in names if (m := _MODEL_3.fullmatch(name))}
    if not plain and not zero_3:
        raise CheckpointError(f"{files.folder} holds no *_model_states.pt.")
    if plain and zero_3 and not files.universal:
        raise CheckpointError(
            f"{files.folder} holds {plain[min(plain)]} and {zero_3[min(zero_3)]}: files of ZeRO 3 and of another "
            "stage. One of them is left over from another save; move it away."
        )
    for name in ([plain[key] for key in sorted(plain)]) or [zero_3[key] for key in sorted(zero_3)]:
        files.models.append(_open(files.folder / name))
    state = files.state
    degrees = state.get("checkpoint_parallel_dimensions") or {}
    if degrees.get("tp_degree", 1) != 1 or any(stage for stage, _ in zero_3):
        raise CheckpointError(f"{files.models[0].path}: tensor-parallel checkpoints of DeepSpeed's are not read.")
    if not plain:
        _complete(files, "model_states", {rank for _, rank in zero_3}, _count(files, "dp_world_size"))
    elif not files.universal:
        _complete(files, "model_states", set(plain), _count(files, "mp_world_size"))


def _same_step(files: Files) -> None:
    first = files.models[0]
    for file in files.models[1:]:
        for key in ("global_steps", "skipped_steps", "dp_world_size"):
            first_value, value = first.tree.get(key), file.tree.get(key)
            if first_value != value:
                raise CheckpointError(
                    f"{files.folder} mixes files of two saves: {key} is {shown(first_value)} in {first.path.name} and "
                    f"{shown(value)} in {file.path.name}. Nothing can be taken from it."
                )


def _open_layers(files: Files, names: list[str]) -> None:
    for name in names:
        if match := _LAYER.fullmatch(name):
            files.layers[int(match[1])] = _open(files.folder / name)
    if files.state.get("module") is None and not files.layers:
        raise CheckpointError(f"{files.folder} holds no weights: neither in its model files nor as layer_*.pt.")
    if files.state.get("module") is not None and len(files.models) > 1 and "module" in files.models[1].tree:
        first = files.models[1].path
        if not _MODEL_3.fullmatch(first.name):
            raise CheckpointError(f"{first}: tensor-parallel checkpoints of DeepSpeed's are not read.")


def _open_zero(files: Files, names: list[str], weights_only: bool) -> None:
    names_of = {(m[1], int(m[3]), int(m[2])): name for name in names if (m := _ZERO.fullmatch(name))}
    uses_zero = files.state.get("optimizer") is None
    if not names_of:
        if uses_zero and not weights_only:
            raise CheckpointError(
                f"{files.folder} has no optimizer files (*_optim_states.pt): the weights alone can be imported, with "
                "--weights-only."
            )
        return
    prefixes = {prefix for prefix, _, _ in names_of}
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{files.folder} holds optimizer files of two precisions ({', '.join(sorted(names_of.values())[:2])}, ..). "
            "Some are left over from another save; move them away."
        )
    (prefix,) = prefixes
    stages = len(files.models) if files.layers else 1
    ranks = _count(files, "dp_world_size")
    if {stage for _, stage, _ in names_of} != set(range(stages)):
        raise CheckpointError(f"{files.folder}: optimizer files are not those of {stages} pipeline stage(s).")
    for stage in range(stages):
        _complete(files, f"optim_states of stage {stage}", {rank for _, s, rank in names_of if s == stage}, ranks)
        files.zero.append([_open(files.folder / names_of[prefix, stage, rank]) for rank in range(ranks)])


def _complete(files: Files, what: str, have: set[int], count: int) -> None:
    want = set(range(count))
    if have == want:
        return
    missing, extra = sorted(want - have), sorted(have - want)
    text = f"rank {missing[0]} is missing" if missing else f"rank {extra[0]} is left over from another number of ranks"
    raise CheckpointError(f"{files.folder}: of the {count} {what} files, {text}. Nothing was imported.")


def _count(files: Files, key: str) -> int:
    value = files.state.get(key)
    if type(value) is not int or not 0 < value < 1_000_000:
        raise CheckpointError(f"{files.models[0].path}: {key} is {shown(value)}, not a number of ranks.")
    return value


def _open(path: Path) -> PickleFile:
    file = PickleFile(path)
    if not isinstance(file.tree, dict):
        raise CheckpointError(f"{path} holds no dictionary: it is no file of a DeepSpeed checkpoint.")
    return file
