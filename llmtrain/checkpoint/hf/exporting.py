"""Exports a checkpoint to a Hugging Face folder: streamed, restartable, proved. No GPU, no torch.distributed.

An adapter becomes a PEFT folder, or is merged into the model's weights.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from llmtrain import features
from llmtrain.base import log, units, untrusted
from llmtrain.base.errors import CheckpointError, ModelError, UserError
from llmtrain.checkpoint.durable import remove_tree, sync
from llmtrain.checkpoint.format import MANIFEST, OUTER, TRAINER, hash_file, problems
from llmtrain.checkpoint.hf.folder_files import (
    DTYPES,
    MARK,
    MAX_SHARD_BYTES,
    SOURCE,
    Export,
    Shard,
    WeightFiles,
    as_described,
    copy_beside,
    cut,
    run_id,
    write_mark,
    write_others,
)
from llmtrain.checkpoint.hf.proofs import (
    CHUNK,
    Check,
    OtherModel,
    ProofError,
    Report,
    check_extents,
    compare_logits,
    logits_of,
    prove_logits,
    read_back,
)
from llmtrain.checkpoint.hf.serving import chat_folders
from llmtrain.checkpoint.output import OutputFolder, stream_tensors
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.run import AdapterConfig, ModelConfig
from llmtrain.models.layout import FolderLayout
from llmtrain.models.parameters import CONFIG, MAGNITUDE, PREFIX, WEIGHTS, A, B
from llmtrain.models.score import gives_scores
from llmtrain.models.skeleton import load_config, skeleton
from llmtrain.models.source import SafetensorsSource
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.addresses import is_name, is_url
from llmtrain.storage.checksum import checksum
from llmtrain.storage.pieces import DTYPE_OF
from llmtrain.storage.tensorfile import numel

_ROUNDING = 1e-4
"""Allowed difference of logits, relative to the largest: (W + s B A) x and Wx + s B A x round differently."""


def adapter_of(reader: CheckpointReader, trainer: TrainerState) -> AdapterConfig | None:
    """Return the settings of the checkpoint's adapter; None: it holds none. Raises CheckpointError: when trainer.json
    does not record settings that fit the matrices."""
    if not any(name.endswith(A) for name in reader.order()):
        return None
    from llmtrain.models.adapter import scale

    try:
        adapter = AdapterConfig(**trainer.section("adapter"))
        ranks = {reader.shape(name)[0] for name in reader.order() if name.endswith(A)}
        if ranks != {adapter.r}:
            raise ValueError(f"adapter.r is {adapter.r}, but the matrices have rank {sorted(ranks)}")
        scale(adapter)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{reader.folder / TRAINER} does not record the adapter whose matrices the checkpoint holds ({error!r}), "
            "so the scale of the adapter is unknown. Take another checkpoint."
        ) from error
    return adapter


class Merge:
    """Adds the adapter to the model's own weights, in fp32. Several threads may call it."""

    def __init__(
        self,
        reader: CheckpointReader,
        adapter: AdapterConfig | None,
        dtype: torch.dtype = torch.float32,
        saved: Collection[str] = (),
    ) -> None:
        """`adapter`: None leaves all values unchanged. `saved`: the model's own parameters that train with the adapter.
        `dtype`: the type to which the values of the adapter and of `saved` are rounded first."""
        self._reader, self._adapter, self._dtype = reader, adapter, dtype
        names = reader.order() if adapter is not None else []
        self.names = {name for name in names if name.endswith((A, B, MAGNITUDE))}
        """Names of the adapter's tensors."""
        self.trained = self.names | set(saved)
        """Names of the adapter's tensors and of the model's own parameters that train with them."""
        self.paths = [name.removesuffix(A) for name in names if name.endswith(A)]
        """Paths of the linear maps."""
        self._path_of = {f"{path}.weight": path for path in self.paths}
        if adapter is not None:
            from llmtrain.models.adapter import scale

            self._scale = scale(adapter)

    def check(self) -> None:
        """Raise CheckpointError if the adapter, or a parameter that trains with it, differs from its checksum."""
        sums = self._reader.checksums()
        for name in sorted(self.trained):
            if checksum(self._reader.read(name, 0, numel(self._reader.shape(name)))) != sums[PARAM, name]:
                raise CheckpointError(
                    f"{self._reader.folder}: the values of {name} are not those that were saved. Nothing was written. "
                    "Look at it with `llmtrain checkpoint verify`, and take another checkpoint."
                )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements of a flat tensor of the checkpoint as fp32; values that were trained with the adapter are
        first rounded to `dtype`. Raises CheckpointError."""
        values = self._reader.read(name, start, stop)
        return values.to(self._dtype).float() if name in self.trained else values

    def value(self, name: str, start: int, stop: int) -> Tensor:
        return self(name, start, self.read(name, start, stop))

    def __call__(self, name: str, start: int, values: Tensor) -> Tensor:
        """Return `values`, elements of a flat parameter from `start` on, plus the adapter. Raises CheckpointError."""
        if self._adapter is None or name not in self._path_of:
            return values
        path, read = self._path_of[name], self.read
        _, inputs = self._reader.shape(name)
        first, last = start // inputs, -(-(start + values.numel()) // inputs)  # rows of the matrix
        r, _ = self._reader.shape(path + A)
        product = read(path + B, first * r, last * r).view(-1, r) @ read(path + A, 0, r * inputs).view(r, inputs)
        rows = read(name, first * inputs, last * inputs).view(-1, inputs).add_(product, alpha=self._scale)
        if self._adapter.dora:
            magnitude = read(path + MAGNITUDE, first, last)
            rows *= (magnitude / torch.linalg.vector_norm(rows, dim=1)).unsqueeze(1)
        return rows.view(-1)[start - first * inputs :][: values.numel()]


def prove_merge(made: Export, merge: Merge, hf: nn.Module, file: Mapping[str, Tensor] | None = None) -> None:
    """Compare the logits of the merged weights, in fp32, with those of `hf`, the skeleton with peft's layers. `file`:
    tensors of a PEFT folder to take as the adapter's values; None: the checkpoint's. Raises ProofError."""
    from llmtrain.models.adapter import plain_name

    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in (file or {}).items()}

    def value(name: str, start: int, stop: int) -> Tensor:
        plain = plain_name(name)
        return tensors[plain].reshape(-1)[start:stop].float() if plain in tensors else merge.read(plain, start, stop)

    compare_logits(
        made,
        merge.value,
        OtherModel(
            logits=lambda tokens: logits_of(hf, value, tokens),
            title="adapter",
            name="peft's layers on the model's own weights",
            bytes=4 * sum(tensor.numel() for tensor in tensors.values()),
            rounding=_ROUNDING,
        ),
    )


def _as_peft_loads(folder: Path, layout: FolderLayout) -> nn.Module:
    """Return the skeleton with peft's layers, made from the folder. Raises ProofError if peft expects other tensors."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    with warnings.catch_warnings():  # peft 0.21 asks transformers 5.23 for a deprecated name; no user can act on it
        warnings.simplefilter("ignore", FutureWarning)
        model = PeftModel.from_pretrained(copy.deepcopy(layout.skeleton), str(folder), low_cpu_mem_usage=True)
    # By default peft adds embeddings that are longer than the base's, which the folder has under their own names.
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    held_names = load_peft_weights(str(folder), device="cpu").keys()
    if odd := sorted(wanted ^ held_names):
        raise ProofError(f"{folder}: its tensors are not those that peft expects, first {odd[0]}. Nothing was kept.")
    hf: nn.Module = model.get_base_model()
    return hf


def base_fields(model: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the fields of adapter_config.json that name the base; one on the Hub by name and commit, for any host."""
    base, commit = model.get("pretrained"), model.get("revision")
    if base and is_url(base):  # `llmtrain generate` reads a URL; peft would need a folder
        return {"base_model_name_or_path": base, "revision": None}
    if base and commit and is_name(base):
        return {"base_model_name_or_path": base, "revision": commit}
    return {"base_model_name_or_path": base and str(Path(base).absolute()), "revision": None}


def write_peft(folder: Path, made: Export, adapter: AdapterConfig, dtype: str) -> int:
    """Write the adapter's two files in the form of `PeftModel.save_pretrained`, and prove them. Returns the bytes of
    the weights. Raises ProofError: when the file or peft's logits differ; ConfigError: when peft is not installed."""
    from safetensors.torch import load_file, save_file

    from llmtrain.models.adapter import aliases, lora_config, saved_names, saved_paths

    layout, reader, report, model = made.layout, made.reader, made.report, made.trainer.section("model")
    saved = saved_names(layout.skeleton, adapter)
    merge, tensors = Merge(reader, adapter, DTYPE_OF[dtype], saved), {}
    for name in sorted(merge.trained):
        values = reader.read(name, 0, numel(reader.shape(name))).view(reader.shape(name))
        tensors[PREFIX + name] = values.to(DTYPE_OF[dtype])
    for other, name in aliases(layout.skeleton).items():
        if name in saved:  # peft requires a tied tensor under each of its names
            tensors[PREFIX + other] = tensors[PREFIX + name].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    back = load_file(folder / WEIGHTS)
    if bad := [name for name, values in tensors.items() if not torch.equal(back[name], values)]:
        raise ProofError(f"{folder / WEIGHTS}: {bad[0]} differs when it is read back. Nothing was kept.")
    modules = saved_paths(layout.skeleton, adapter)
    config = lora_config(layout.skeleton, adapter, merge.paths, modules).to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    if gives_scores(layout.skeleton.config):
        config["task_type"] = "SEQ_CLS"
        report.add("head", "the score is in the folder; load the base with num_labels=1")
    config |= {**base_fields(model), "inference_mode": True}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    unmoved = [name for name in merge.names if name.endswith(B) and not bool(tensors[PREFIX + name].any())]
    moved = f"; {len(unmoved)} of the lora_B are still zero" if unmoved else ""
    also = f" and of {len(modules)} complete modules" if modules else ""
    report.add("read back", f"{len(tensors)} tensors of {len(merge.paths)} maps{also}, equal bit by bit{moved}")
    if made.check != "none":
        prove_merge(made, merge, _as_peft_loads(folder, layout), back)
    if vocabulary := model.get("vocabulary"):
        report.add("tokens", f"first call resize_token_embeddings({vocabulary}) of the base; `llmtrain generate` does")
    if adapter.dora:
        report.add("vLLM", "does not load DoRA: serve the merged model there (--merge)")
    elif modules:
        report.add("vLLM", "does not load modules_to_save: serve the merged model there (--merge)")
    elif (r := adapter.r or 0) > 16:
        report.add("vLLM", f"start it with --max-lora-rank {r}: by default it takes adapter ranks up to 16")
    return (folder / WEIGHTS).stat().st_size


_SPACE = 64 << 20  # bytes for the files other than weights


def export_hf(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    *,
    max_shard_bytes: int | None = None,
    check: Check = "auto",
    merge: bool = False,
    weights: str | None = None,
    trust_remote_code: bool = False,
) -> Report:
    """Write the folder `out`, which AutoModelForCausalLM.from_pretrained loads (a reward model:
    AutoModelForSequenceClassification). A tied weight is written once.

    Args:
        dtype: fp32, bf16 or fp16; None: the precision of the training, or the dtypes of the imported folder.
        max_shard_bytes: largest weight file; None: 5 GB, or the files of the imported folder.
        merge: write the complete model with the adapter added to its weights, in fp32, rounded once.
        weights: write this variant (training/parts.py) of the trained parameters instead of their last values.

    Raises:
        CheckpointError: `checkpoint` is no checkpoint, is damaged, or lacks the variant; `out` exists and is no earlier
            export of the same run; or a value does not fit into the dtype.
        ModelError: the model cannot be built, or its files cannot be written.
        ProofError: the files differ from their source. Nothing is left at `out`.
    """
    reader = CheckpointReader(checkpoint, parameters=PARAM if weights is None else OUTER + weights)
    if weights is not None:
        _refuse_other_weights(reader, weights)
    if wrong := problems(checkpoint, reader.manifest, [TRAINER]):
        raise CheckpointError(f"{checkpoint}: {wrong[0]}. Take another checkpoint.")
    trainer = TrainerState.read(checkpoint)
    report, adapter = Report(out), adapter_of(reader, trainer)
    target = _target(checkpoint, out, trainer, report)
    layout = layout_of(_model(checkpoint, trainer), trust_remote_code=trust_remote_code)
    if merge and adapter is None:
        raise CheckpointError(f"{checkpoint}: it holds no adapter, so there is nothing to merge. Leave out --merge.")
    saved: set[str] = set()
    if adapter is not None:
        from llmtrain.models.adapter import adapted, saved_names

        saved = saved_names(layout.skeleton, adapter)
    merged = Merge(reader, adapter, saved=saved)
    merged.check()
    made = Export(
        reader=reader, trainer=trainer, layout=layout, check=check, report=report, trust_remote_code=trust_remote_code
    )
    _check_names(made, merged.names)
    if adapter is not None and not merge:
        return _export_adapter(made, adapter, dtype, target, weights)
    files = _weight_files(made, dtype, max_shard_bytes)
    with OutputFolder(target, _plan(checkpoint, files, check, merge=merge, weights=weights)) as folder:
        folder.need(files.bytes + _SPACE)
        rounded = _write_weights(folder, made, files, merged)
        whose = f", with {weights} in place of what trains" if weights is not None else ""
        report.add("source", f"{len(layout.shapes)} checksums are those of the manifest{whose}")
        if merge:
            report.add("merged", f"{len(merged.paths)} maps, computed in fp32 and rounded once")
        write_others(folder.partial, made, files)
        if adapter is not None and check != "none":
            prove_merge(made, merged, adapted(layout.skeleton, adapter))
        if check != "none":
            _prove(folder.partial, made, _Rounding(reader, files, merged, rounded=False).value, files, rounded)
        _finish(folder, made)
    report.add("written", f"{out}: {units.size(files.bytes)} of weights in {len(files.shards)} file(s)")
    return report


def _refuse_other_weights(reader: CheckpointReader, name: str) -> None:
    """Raise CheckpointError if the checkpoint has no such variant."""
    variants = [variant for variant in features.variants() if OUTER + variant in reader.kinds()]
    if name not in variants:
        remedy = f"Give {' or '.join(variants)}" if variants else "Leave it out"
        raise CheckpointError(f"{reader.folder}: --weights {name}: the checkpoint has no such values. {remedy}.")


def _plan(checkpoint: Path, files: WeightFiles, check: Check, *, merge: bool, weights: str | None) -> dict[str, str]:
    """Return the plan of the export; a restart with an equal plan continues it."""
    shards = json.dumps({name: asdict(shard) for name, shard in files.shards.items()})
    plan = {"to-hf": str(checkpoint.resolve()), "manifest": hash_file(checkpoint / MANIFEST), "check": check}
    return (
        plan
        | {"files": xxhash.xxh3_64_hexdigest(shards.encode())}
        | {name: value for name, value in (("merge", "yes" * merge), ("weights", weights)) if value}
    )


def _finish(folder: OutputFolder, made: Export) -> None:
    if made.check != "none" and (chats := chat_folders(made.trainer)):
        from llmtrain.checkpoint.hf.serving_proof import prove_serving  # runs on plain texts have no conversations

        prove_serving(folder.partial, chats, made.report)
    folder.commit()
    if folder.out != made.report.path:
        _replace(made.report.path, folder.out)
    made.reader.close()


def _export_adapter(
    made: Export, adapter: AdapterConfig, dtype: str | None, target: Path, weights: str | None
) -> Report:
    """Write a PEFT folder. `target`: the folder to write into."""
    reader, trainer, report = made.reader, made.trainer, made.report
    kind = DTYPES[dtype or reader.manifest.layout.get("precision") or "fp32"]
    plan = {"to-hf": str(reader.folder.resolve()), "adapter": kind, "weights": str(weights)}
    with OutputFolder(target, plan) as folder:
        size = write_peft(folder.partial, made, adapter, kind)
        copy_beside(folder.partial, trainer, reader.folder, report)
        write_mark(folder.partial, reader.folder, trainer, model_config=trainer.model_config)
        from llmtrain.checkpoint.meaning import refuse_other_base

        try:
            base = trainer.section("model")
            base_config = load_config(ModelConfig(pretrained=base.get("pretrained"), revision=base.get("revision")))
            refuse_other_base(folder.partial / MARK, base_config)
        except ModelError as error:  # or the base is not on this host
            log.warn(str(error).replace(str(folder.partial), str(report.path)))
        _finish(folder, made)
    report.add("written", f"{report.path}: {units.size(size)} for peft")
    return report


def layout_of(model: ModelConfig, *, trust_remote_code: bool) -> FolderLayout:
    """Return the layout of a model's parameters. Raises ModelError: when transformers cannot build the model."""
    try:
        config = load_config(model, trust_remote_code=trust_remote_code)
        return FolderLayout(skeleton(config, trust_remote_code=trust_remote_code))
    except UserError:
        raise
    except Exception as error:  # a configuration is input: any error of a constructor is a message
        raise ModelError(
            f"transformers cannot build the model of {model.pretrained or 'trainer.json'}: {error!r}."
        ) from error


def _target(checkpoint: Path, out: Path, trainer: TrainerState, report: Report) -> Path:
    """Return the folder to write into: `out`, or if an earlier export is there, a folder next to it that will replace
    it. Raises CheckpointError: when `out` is something else, or has files that the export did not write."""
    if not out.exists():
        return out
    in_run_folder = out.resolve().parent == checkpoint.resolve().parent.parent  # the run's own export, by any command
    try:
        mark = untrusted.loads((out / MARK).read_bytes(), infinite=True)
        marked = mark["run"] == run_id(checkpoint, trainer)
    except (OSError, ValueError, KeyError, TypeError):
        mark, marked = {}, False
    if not marked and not (in_run_folder and (out / "config.json").is_file()):
        raise CheckpointError(
            f"{out} exists and is no earlier export of this run; nothing was written. Give another name."
        )
    if not in_run_folder:  # a file added to a run's own export must not make its end fail
        refuse_more(str(out), mark, {str(file.relative_to(out)) for file in out.rglob("*") if not file.is_dir()})
    report.add("replaced", f"{out}: the export of step {mark.get('step')}" if marked else str(out))
    target = out.with_name(out.name + ".new")
    if (target / MARK).is_file():  # left by a kill in `_replace`
        remove_tree(target)
    return target


def refuse_more(out: str, mark: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise CheckpointError if files were added to an earlier export. `mark`: its record. `names`: its files now."""
    written = mark.get("files")
    if isinstance(written, list) and (more := sorted(set(names).difference(written, [MARK]))):
        others = f" and {len(more) - 1} more" if len(more) > 1 else ""
        raise CheckpointError(
            f"{out} is an earlier export of this run, but {more[0]}{others} was added since and would be lost; "
            "nothing was written. Move it away, or give another name."
        )


def _replace(out: Path, new: Path) -> None:
    old = out.with_name(out.name + ".old.trash")
    try:
        remove_tree(old)
        out.rename(old)
        new.rename(out)
        sync(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be replaced: {error.strerror}. The new export is {new}.") from error
    remove_tree(old)


def _model(checkpoint: Path, trainer: TrainerState) -> ModelConfig:
    if trainer.model_config is None:
        raise CheckpointError(f"{checkpoint / TRAINER} does not record model_config, so no model can be written.")
    config = {key: value for key, value in trainer.model_config.items() if key != "use_cache"}  # off in training
    if "auto_map" in config:  # the code is in the imported folder
        return ModelConfig(pretrained=str(checkpoint.parent.parent / SOURCE), attention="eager")
    return ModelConfig(config=config, attention="eager")


def _check_names(made: Export, adapter: Collection[str]) -> None:
    """Raise CheckpointError unless the parameters are those of the model class, besides the adapter's tensors."""
    reader, layout, report = made.reader, made.layout, made.report
    model = type(layout.skeleton).__name__
    shapes = {name: reader.shape(name) for name in reader.order() if name not in adapter}
    lacking, surplus = sorted(layout.shapes.keys() - shapes.keys()), sorted(shapes.keys() - layout.shapes.keys())
    if lacking or surplus:
        raise CheckpointError(
            f"{reader.folder} does not fit its own configuration, {model}: it lacks {len(lacking)} parameters "
            f"({', '.join(lacking[:3])}) and holds {len(surplus)} others ({', '.join(surplus[:3])}). Was it made with "
            "another version of transformers? Convert with that one."
        )
    outer: list[Any] = [layout.skeleton.get_input_embeddings(), layout.skeleton.get_output_embeddings()]
    ends = {id(module.weight) for module in outer if module is not None}  # a reward model has no output embeddings
    padded = {name for name, parameter in layout.skeleton.named_parameters() if id(parameter) in ends}
    for name, shape in layout.shapes.items():
        if name in padded and shapes[name][1:] == shape[1:] and shapes[name][0] > shape[0]:
            report.add("padding", f"{shapes[name][0] - shape[0]} rows beyond the vocabulary removed from {name}")
        elif shapes[name] != shape:
            raise CheckpointError(
                f"{reader.folder}: {name} has the shape {list(shapes[name])}, but {list(shape)} by its configuration."
            )
    tied = f", {layout.tied} tied and written once" if layout.tied else ""
    report.add("parameters", f"{len(shapes)}: names and shapes are those of {model}{tied}")


def _weight_files(made: Export, dtype: str | None, max_shard_bytes: int | None) -> WeightFiles:
    reader, layout, trainer = made.reader, made.layout, made.trainer
    dtypes = dict.fromkeys(layout.shapes, DTYPES[dtype or reader.manifest.layout.get("precision") or "fp32"])
    if dtype is None:
        dtypes |= reader.frozen_types()  # frozen ones as in their source
    dtypes |= dict.fromkeys(layout.frozen, "F32")  # unchanged: transformers keeps router biases in fp32, too
    if trainer.source is not None:
        imported = as_described(layout, trainer.source["files"])
        if dtype is None:
            dtypes |= {imported.parts[tensor].parameter: kind for tensor, kind in imported.dtype_of().items()}
        same = all(dtypes[imported.parts[tensor].parameter] == kind for tensor, kind in imported.dtype_of().items())
        if max_shard_bytes is None and same:
            return imported
    return cut(layout, dtypes, max_shard_bytes or MAX_SHARD_BYTES)


class _Rounding:
    """Reads a file's tensors from the checkpoint, adds the adapter, rounds to the file's dtype, and records the
    checksum of each chunk before and after."""

    def __init__(self, reader: CheckpointReader, files: WeightFiles, merge: Merge, *, rounded: bool) -> None:
        self._reader, self._files, self._merge = reader, files, merge
        self._dtype_of = files.dtype_of()
        self._dtype_of_parameter = {files.parts[tensor].parameter: kind for tensor, kind in self._dtype_of.items()}
        self._rounded = rounded
        self.sums: dict[str, dict[int, tuple[int, int]]] = {}
        """Tensor -> {first element of a chunk: (checksum in the source, checksum after rounding)}."""

    def read(self, tensor: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a tensor of the file, for stream_tensors. Raises CheckpointError."""
        part, dtype = self._files.parts[tensor], DTYPE_OF[self._dtype_of[tensor]]
        at = part.start + start
        read = self._reader.read(part.parameter, at, part.start + stop)
        values = self._merge(part.parameter, at, read)
        out = values.to(dtype)
        if out.numel() and dtype != torch.float32 and not bool(torch.isfinite(torch.stack(out.aminmax())).all()):
            self._refuse_overflow(part.parameter, values, out)
        before = checksum(read, at)
        after = checksum(out, at) if self._rounded and out is not read else before
        self.sums.setdefault(tensor, {})[start] = (before, after)
        return out

    def value(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements of a parameter with the file's rounding, as fp32."""
        values = self._merge(name, start, self._reader.read(name, start, stop))
        return values.to(DTYPE_OF[self._dtype_of_parameter[name]]).float()

    def _refuse_overflow(self, name: str, values: Tensor, out: Tensor) -> None:
        lost = values[torch.isinf(out) & torch.isfinite(values)]
        if lost.numel():
            kind = str(out.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{name} holds {float(lost[0]):g}, which {kind} cannot hold (largest {torch.finfo(out.dtype).max:g}). "
                "Nothing was written. Use --dtype bf16 or fp32."
            )


def _write_weights(folder: OutputFolder, made: Export, files: WeightFiles, merge: Merge) -> dict[str, int]:
    """Write the files, and compare what was read with the manifest. Returns each parameter's checksum as written."""
    reader, layout = made.reader, made.layout
    rounding = _Rounding(reader, files, merge, rounded=made.check != "none")

    def write(path: Path, shard: Shard, progress: log.Progress) -> dict[str, Any]:
        tensors = {tensor: (dtype, files.parts[tensor].shape) for tensor, dtype in shard.tensors.items()}
        info = stream_tensors(
            path, tensors, rounding.read, metadata=shard.metadata, align=shard.align, advance=progress.advance
        )
        chunks = {tensor: list(rounding.sums.pop(tensor, {}).values()) for tensor in tensors}
        sums = {tensor: [sum(column) % 2**64 for column in zip(*c, strict=True)] for tensor, c in chunks.items() if c}
        return {**info, "sums": sums}

    before, after = dict.fromkeys(layout.shapes, 0), dict.fromkeys(layout.shapes, 0)
    with log.Progress("writing", files.bytes) as progress:
        for name, shard in files.shards.items():
            info = folder.file(name, partial(write, shard=shard, progress=progress))
            for tensor, (one, two) in info["sums"].items():
                before[files.parts[tensor].parameter] += one
                after[files.parts[tensor].parameter] += two
    expected = reader.checksums()
    for name, shape in layout.shapes.items():
        beyond = range(numel(shape), numel(reader.shape(name)), CHUNK)  # padding is not written, but in the checksum
        stops = [min(start + CHUNK, numel(reader.shape(name))) for start in beyond]
        before[name] += sum(checksum(reader.read(name, a, b), a) for a, b in zip(beyond, stops, strict=True))
        if before[name] % 2**64 != expected[PARAM, name]:
            from llmtrain.checkpoint.verify import wrong_frozen

            where = [f for f, e in reader.manifest.files.items() if any(p.name == name for p in e.pieces)]
            raise wrong_frozen(reader.manifest.frozen, [name]) or CheckpointError(
                f"{reader.folder}: the values of {name} are not those that were saved (in {', '.join(where[:3])}). "
                "Nothing was written. Look at it with `llmtrain checkpoint verify`, and take another checkpoint."
            )
    return {name: value % 2**64 for name, value in after.items()}


def _prove(
    folder: Path,
    made: Export,
    values: Callable[[str, int, int], Tensor],
    files: WeightFiles,
    rounded: Mapping[str, int],
) -> None:
    """Compare the written weights, loaded by themselves and by transformers, with their source. Raises ProofError."""
    layout = made.layout
    written = SafetensorsSource(folder, layout, asked_by="to-hf")
    if odd := sorted(written.file_of.keys() ^ files.parts.keys()):
        raise ProofError(f"{folder}: the tensor {odd[0]} is missing or superfluous. Nothing was kept.")
    if odd := [name for name, shape in layout.shapes.items() if written.shape(name) != shape]:
        found, right = list(written.shape(odd[0])), list(layout.shapes[odd[0]])
        raise ProofError(f"{folder}: {odd[0]} has the shape {found} instead of {right}. Nothing was kept.")
    check_extents(read_back(written, layout, rounded, "reading back"), made)
    written.close()
    made.report.add("round trip", f"{len(rounded)} parameters read back, equal to the source bit by bit once rounded")
    prove_logits(made, values, folder, {DTYPE_OF[kind] for kind in files.dtype_of().values()})
