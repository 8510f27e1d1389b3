"""Imports DeepSpeed's own checkpoints. No GPU, no torch.distributed, and no DeepSpeed."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.base import units, untrusted
from llmtrain.base.errors import CheckpointError, ModelError, UserError
from llmtrain.base.log import Progress
from llmtrain.checkpoint.format import read_file, step_folder
from llmtrain.checkpoint.meaning import other_meaning
from llmtrain.checkpoint.output import Contents, build_checkpoint
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.run import ModelConfig
from llmtrain.features.deepspeed_checkpoints.pickles import Record, shown
from llmtrain.features.deepspeed_checkpoints.saved_files import Files, find_tag, open_files
from llmtrain.features.deepspeed_checkpoints.state import (
    MOMENTS,
    State,
    add_copies,
    add_copies_as_masters,
    add_unnamed,
    add_zero,
    place_tied,
    read_spans,
)
from llmtrain.features.deepspeed_checkpoints.universal import add_universal
from llmtrain.models.parameters import frozen_tensors, named_tensors, tensor_shapes
from llmtrain.models.skeleton import decoder_layers, load_config, skeleton
from llmtrain.optim.optimizers import PARAM
from llmtrain.storage.tensorfile import numel

_LAYER_NAME = re.compile(r"([0-9]+)\.(.+)")
_TIED = "tied_modules."

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Target:
    model: Any
    shapes: Shapes
    """Shapes of the parameters, in order; a tied one once."""
    aliases: dict[str, str]
    """A tied parameter's other names -> its name."""
    frozen: set[str]
    """Names in `shapes` that no optimizer holds."""

    @classmethod
    def of(cls, config: Path) -> Target:
        """Read the shapes of a model. `config`: a folder with config.json, or the file. Raises CheckpointError."""
        try:
            model = skeleton(load_config(ModelConfig(config=str(config))))
        except ModelError as error:
            raise CheckpointError(str(error).replace("model.config:", "--model:", 1)) from error
        first = {id(p): name for name, p in named_tensors(model)}
        every = named_tensors(model, remove_duplicate=False)
        aliases = {name: first[id(p)] for name, p in every if first[id(p)] != name}
        return cls(model, tensor_shapes(model), aliases, set(frozen_tensors(model)))


def hf_names(saved: Shapes, target: Target, listed: dict[str, str], where: Path) -> dict[str, str]:
    """Return DeepSpeed's name -> Hugging Face name of every parameter: from `listed` (`read_names`), or else by
    matching the names. Shapes are compared. Raises CheckpointError: one is missing, left over, of another shape, or
    ambiguous."""
    names = listed
    if listed:
        if unknown := [name for name in listed if name not in saved]:
            raise CheckpointError(
                f"--names: {unknown[0]!r} is no parameter of {where}; it has {', '.join(list(saved)[:5])}, ..."
            )
    elif all(_LAYER_NAME.fullmatch(name) or name.startswith(_TIED) for name in saved):
        names = _pipeline(saved, target, where)
    else:
        names = _prefixed(saved, target, where)
    _check(names, saved, target, where)
    return names


def _check(names: dict[str, str], saved: Shapes, target: Target, where: Path) -> None:
    kind = type(target.model).__name__
    missing = sorted(target.shapes.keys() - names.values())
    if missing or len(set(names.values())) != len(names):
        wrong = f"it lacks {', '.join(missing[:3])}" if missing else "two of its parameters have the same name"
        raise CheckpointError(f"{where}: for {kind} {wrong}. {_REMEDY}")
    for name, hf in names.items():
        if hf not in target.shapes:
            raise CheckpointError(f"{where}: {name} corresponds to {hf}, which {kind} does not have. {_REMEDY}")
        if saved[name] != target.shapes[hf]:
            raise CheckpointError(
                f"{where}: {name} has the shape {list(saved[name])}, but {hf} of {kind} has {list(target.shapes[hf])}. "
                "Give the configuration that this checkpoint was trained with."
            )


_REMEDY = "Is --model the configuration that it was trained with? If names differ: --names FILE, JSON {its name: ours}."


def read_names(file: Path | None) -> dict[str, str]:
    """A user's JSON object {their name: Hugging Face name}; empty without a file. Raises CheckpointError."""
    if file is None:
        return {}
    try:
        names = untrusted.loads(read_file(file))
        assert isinstance(names, dict) and all(isinstance(value, str) for value in names.values())
    except (OSError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{file}: it is no JSON object of names: {error}.") from error
    return names


def _prefixed(saved: Shapes, target: Target, where: Path) -> dict[str, str]:
    first = next(iter(target.shapes))
    prefixes = {name[: len(name) - len(first)] for name in saved if name.endswith(first)}
    fitting = [prefix for prefix in sorted(prefixes) if all(prefix + name in saved for name in target.shapes)]
    if len(fitting) != 1:
        have = list(saved)[:3]
        raise CheckpointError(
            f"{where}: its parameters ({', '.join(have)}, ...) are not those of {type(target.model).__name__} "
            f"({', '.join(list(target.shapes)[:3])}, ...), whatever prefix is taken off. {_REMEDY}"
        )
    names = {fitting[0] + name: name for name in target.shapes}
    expected = names.keys() | {fitting[0] + alias for alias in target.aliases}
    extra = [name for name in saved if name not in expected]
    if extra:
        raise CheckpointError(
            f"{where}: {extra[0]} belongs to no parameter of {type(target.model).__name__}. {_REMEDY}"
        )
    return names


def _pipeline(saved: Shapes, target: Target, where: Path) -> dict[str, str]:
    """Match decoder layers by suffixes and shapes, in order; the few other parameters by their place before or after,
    and shape."""
    layers: dict[int, Shapes] = {}
    for name, shape in saved.items():
        if match := _LAYER_NAME.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = shape
    blocks = _blocks(target)
    matched = {index: pairs for index, layer in layers.items() if (pairs := _same(layer, blocks[0][1]))}
    if len(matched) != len(blocks):
        raise CheckpointError(
            f"{where}: {len(matched)} of its pipeline layers match the {len(blocks)} decoder layers of "
            f"{type(target.model).__name__}. {_REMEDY}"
        )
    names = {}
    for index, (prefix, _) in zip(sorted(matched), blocks, strict=True):
        names.update({f"{index}.{inner_name}": prefix + suffix for inner_name, suffix in matched[index].items()})
    first, last = min(matched), max(matched)
    inside = next(i for i, name in enumerate(target.shapes) if name.startswith(blocks[0][0]))
    outer = [(i, name) for i, name in enumerate(target.shapes) if not any(name.startswith(p) for p, _ in blocks)]
    rest = {name: shape for name, shape in saved.items() if name not in names}
    before = {n: s for n, s in rest.items() if n.startswith(_TIED) or int(n.split(".")[0]) < first}
    after = {n: s for n, s in rest.items() if not n.startswith(_TIED) and int(n.split(".")[0]) > last}
    if len(before) + len(after) != len(rest):
        raise CheckpointError(f"{where}: it has layers between the decoder layers. {_REMEDY}")
    names |= _only_way(before, {name: target.shapes[name] for i, name in outer if i < inside}, where)
    return names | _only_way(after, {name: target.shapes[name] for i, name in outer if i > inside}, where)


def _blocks(target: Target) -> list[tuple[str, Shapes]]:
    """(prefix of the names, shapes by suffix) of each layer."""
    layers: nn.ModuleList = decoder_layers(target.model)
    (base,) = [name for name, module in target.model.named_modules() if module is layers]
    return [(f"{base}.{index}.", tensor_shapes(layer)) for index, layer in enumerate(layers)]


def _same(layer: Shapes, block: Shapes) -> dict[str, str]:
    """Suffix in a pipeline layer -> suffix in a decoder layer; empty if the two differ."""
    pairs = {}
    for suffix, shape in block.items():
        ends = [name for name in layer if (name == suffix or name.endswith(f".{suffix}")) and layer[name] == shape]
        if len(ends) != 1:
            return {}
        pairs[ends[0]] = suffix
    return pairs if len(pairs) == len(layer) else {}


def _only_way(saved: Shapes, wanted: Shapes, where: Path) -> dict[str, str]:
    """Pair names of equal shape and equal last component, if there is only one way."""
    names: dict[str, str] = {}
    left = dict(wanted)
    while left:
        for name, shape in left.items():
            last = name.rpartition(".")[2]
            fitting = [t for t, s in saved.items() if t not in names and s == shape and t.rpartition(".")[2] == last]
            if len(fitting) == 1:
                names[fitting[0]] = name
                del left[name]
                break
        else:
            raise CheckpointError(f"{where}: {next(iter(left))} may be any of {', '.join(saved) or 'none'}. {_REMEDY}")
    extra = [name for name in saved if name not in names]
    if extra:
        raise CheckpointError(f"{where}: {extra[0]} belongs to no parameter of the model. {_REMEDY}")
    return names


# Settings of a DeepSpeed checkpoint's optimizer, as YAML for a run that continues from it.


def optimizer_lines(files: Files) -> list[str]:
    """Return lines of a report: the settings of the checkpoint's optimizer as YAML, or that its files lack them."""
    groups = _groups(files)
    if not groups or not all(map(_complete, groups)):
        return ["it lacks the optimizer's settings: set lr, betas, eps and weight decay in the run"]
    first = max(groups, key=lambda group: group["weight_decay"])
    rates = [group.get("initial_lr", group["lr"]) for group in groups]
    peak = "" if "initial_lr" in first else "  # of the last step: a schedule's peak is not recorded"
    lines = ["its optimizer, for the YAML of the run:", "  optim:", "    name: adamw"]
    lines.append(f"    lr: {shown(first.get('initial_lr', first['lr']))}{peak}")
    lines.append(f"    betas: [{', '.join(map(shown, first['betas']))}]")
    lines += [f"    {key}: {shown(first[key])}" for key in ("eps", "weight_decay")]
    if decays := _decay(files, groups):
        lines.append(f"    decay: {decays}")
    else:
        by_group = ", ".join(shown(group["weight_decay"]) for group in groups)
        lines.append(f"  # weight_decay of its groups: {by_group}; set it by parameter with optim.weight_decay_of")
    if len(set(rates)) > 1:
        lines.append(
            f"  # learning rates of its groups: {', '.join(map(shown, rates))}; set them with optim.lr_factor_of"
        )
    if len({(*group["betas"], group["eps"]) for group in groups}) > 1:
        lines.append("  # its groups have different betas or eps, and llmtrain has one value for all")
    return lines


def _complete(group: dict[str, Any]) -> bool:
    betas = group.get("betas")
    numbers = [group.get("lr"), group.get("initial_lr", 0.0), group.get("eps"), group.get("weight_decay")]
    numbers += betas if isinstance(betas, (list, tuple)) and len(betas) == 2 else [None]
    return all(type(number) in (int, float) for number in numbers)


def _groups(files: Files) -> list[dict[str, Any]]:
    holders: list[Any] = [files.state.get("optimizer")]
    holders += [file.tree.get("optimizer_state_dict") for stage in files.zero for file in stage[:1]]
    holders += [file.tree for file in files.shared]
    for holder in holders:
        while isinstance(holder, dict):
            groups = holder.get("param_groups")
            if isinstance(groups, list) and groups and all(isinstance(group, dict) and group for group in groups):
                return groups
            holder = holder.get("optimizer_state_dict") or holder.get("base_optimizer_state")
    return []


def _decay(files: Files, groups: list[dict[str, Any]]) -> str | None:
    """Return what weight decay applies to, `all` or `matrices`; None: neither is true, or the files lack the shapes."""
    values = {group["weight_decay"] for group in groups}
    if len(values) == 1:
        return "all"
    if len(values) != 2 or min(values) != 0:
        return None
    for group, dimensions in zip(groups, _dimensions(files, groups), strict=True):
        if not dimensions or any((group["weight_decay"] > 0) != (count >= 2) for count in dimensions):
            return None
    return "matrices"


def _dimensions(files: Files, groups: list[dict[str, Any]]) -> list[list[int]]:
    """The number of dimensions of each parameter, by group; an empty list if the files lack the shapes."""
    named = files.state.get("param_shapes")
    if isinstance(named, list) and len(named) == len(groups):
        return [[len(shape) for shape in group.values()] for group in named]
    optimizer = files.state.get("optimizer")
    inner = optimizer.get("optimizer_state_dict", optimizer) if isinstance(optimizer, dict) else {}
    dimensions = []
    for group in groups:
        entries = [(inner.get("state") or {}).get(number) for number in group.get("params") or []]
        moments = [entry.get("exp_avg") for entry in entries if isinstance(entry, dict)]
        dimensions.append([moment.dim() for moment in moments if isinstance(moment, Tensor)])
    return dimensions


_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class _Import:
    files: Files
    state: State
    names: dict[str, str]
    """Hugging Face name -> DeepSpeed's."""
    target: Target
    kinds: tuple[str, ...]
    """Moments to import."""

    def moments(self) -> dict[str, set[str]]:
        return {
            kind: {hf for hf, name in self.names.items() if (kind, name) in self.state.spans} for kind in self.kinds
        }

    def precision(self) -> str:
        tensors = [span.tensor for span in self.state.copies.values()]
        tensors += [value for value in (self.files.state.get("module") or {}).values() if isinstance(value, Tensor)]
        for tensor in tensors:
            if tensor.dtype in _PRECISIONS:
                return _PRECISIONS[tensor.dtype]
        return "fp32"


def import_deepspeed(
    folder: Path,
    out: Path,
    *,
    model: Path | None = None,
    tag: str | None = None,
    names: Path | None = None,
    weights_only: bool = False,
) -> list[str]:
    """Write `out`/checkpoints/step-N from a DeepSpeed checkpoint: ZeRO 0-3, PipelineModule, or universal. `folder`: of
    engine.save_checkpoint, or one step's. `model`: Hugging Face folder or config.json; default: in `folder`. `tag`:
    default: by the file `latest`. `names`: JSON {their name: Hugging Face name}. Returns a report's lines. Raises
    CheckpointError, ModelError: in any doubt; then nothing is written."""
    chosen = find_tag(folder, tag)
    places = [place for place in (folder, chosen, chosen.parent) if (place / "config.json").is_file()][:1]
    config = _config(folder, places, model)
    target = Target.of(config)
    for place in places:  # Trainer writes one there
        recorded, chosen_model = load_config(ModelConfig(config=str(place))).to_dict(), target.model.config.to_dict()
        if changes := other_meaning(recorded, chosen_model):
            rule = f"the weights would not compute the same: {place}/config.json has {'; '.join(changes)}"
            raise CheckpointError(f"--model {model}: {rule}. Leave --model out.")
    with _understood(chosen):
        files = open_files(chosen, weights_only=weights_only)
        with Progress(f"checking {chosen}", sum(file.bytes for file in files.all())) as bar:
            files.verify(bar.advance)
        source = _resolve(files, target, names, weights_only=weights_only)
        step = _step(files, source.state, weights_only=weights_only)
        trainer = _trainer(source, step, config)
        optimizer = ["weights only: no optimizer state was taken"] if weights_only else optimizer_lines(files)
        layout = {"world_size": files.ranks(), "zero_stage": _stage(files), "precision": source.precision()}
    reader = _Reader(source)
    moments = {} if weights_only else source.moments()
    total = 4 * sum(numel(shape) for shape in target.shapes.values()) * (1 + len(moments))
    with Progress(f"writing {out}", total) as bar:
        contents = Contents(
            step=step,
            shapes=target.shapes,
            moments=moments,
            read=reader.read,
            trainer=trainer.to_json(),
            layout=layout,
        )
        plan = {
            "from": [[str(file.path), file.bytes, file.path.stat().st_mtime_ns] for file in files.all()],
            "weights_only": weights_only,
            "names": source.names,
        }
        path = build_checkpoint(step_folder(out / "checkpoints", step), contents, plan, advance=bar.advance)
    return _report(reader, path, layout, trainer, optimizer)


@contextlib.contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Report an error in a foreign dictionary, which may hold anything, as the file's mistake."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, AssertionError) as error:
        raise CheckpointError(
            f"{folder} is not what DeepSpeed 0.19.8 writes: {type(error).__name__}: {str(error)[:200]}. Nothing was "
            "imported."
        ) from error


def _config(folder: Path, places: list[Path], model: Path | None) -> Path:
    if model is not None or places:
        return model or places[0]
    raise CheckpointError(
        f"{folder} has no config.json: which model is it? Give its Hugging Face folder or config.json with --model; "
        "every name and shape is checked against that."
    )


def _resolve(files: Files, target: Target, names: Path | None, *, weights_only: bool) -> _Import:
    state, kinds = State(), () if weights_only else MOMENTS
    listed = read_names(names)
    add_copies(state, files, target.frozen | listed.keys())
    if files.universal:
        add_universal(state, files, kinds)
    elif files.zero:
        add_zero(state, files, kinds)
        place_tied(state, files)
    matched = hf_names(state.shapes, target, listed, files.folder)
    if not (files.universal or files.zero or weights_only):
        trained = [name for name in state.copies if name in matched and matched[name] not in target.frozen]
        add_unnamed(state, files, trained, kinds)
    lacking = [name for name in matched if (PARAM, name) not in state.spans]
    absent = [name for name in lacking if name not in state.copies]
    if absent:
        raise CheckpointError(f"{files.folder}: no file holds the values of {absent[0]} ({len(absent)} in all).")
    add_copies_as_masters(state, lacking)
    state.check_gaps()
    name_of = {hf: name for name, hf in matched.items()}
    for alias, hf in target.aliases.items():
        alias_name = name_of[hf].removesuffix(hf) + alias
        if alias_name in state.copies:
            state.aliases.setdefault(name_of[hf], []).append(state.copies[alias_name])
    return _Import(files, state, name_of, target, kinds)


class _Reader:
    """Values by Hugging Face name, each checked. Called from several threads."""

    def __init__(self, source: _Import) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._seen: dict[str, list[float]] = {}
        self.compared = 0
        """Elements of masters that were compared with another copy."""

    def read(self, kind: str, hf: str, start: int, stop: int) -> Tensor:
        """fp32 elements [start, stop). Raises CheckpointError: they differ from another copy, or are no numbers."""
        state, name = self.source.state, self.source.names[hf]
        values = read_spans(state.spans[kind, name], start, stop)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{state.spans[kind, name][0].file.path.parent}: {kind} of {name} is not finite.")
        others = [state.twins[kind, name]] if (kind, name) in state.twins else []
        if kind == PARAM:
            copy = state.copies.get(name)
            copies = [copy] if copy is not None and copy.tensor is not state.spans[kind, name][0].tensor else []
            others += [[copy] for copy in (*copies, *state.aliases.get(name, []))]
            self._refuse_constant(hf, values)
        for spans in others:
            copied = read_spans(spans, start, stop)
            if not torch.equal(values.to(spans[0].tensor.dtype).float(), copied):
                at = start + int((values.to(spans[0].tensor.dtype).float() != copied).nonzero()[0])
                first, second = state.spans[kind, name][0].file.path, spans[0].file.path
                raise CheckpointError(
                    f"{first.parent}: element {at} of {kind} of {name} contradicts another copy of it ({first.name} "
                    f"and {second.name}): the files are of different steps, one is damaged, or DeepSpeed made a "
                    "universal checkpoint of a run with round_robin_gradients, whose masters it confuses (import the "
                    "checkpoint itself). DeepSpeed would load them without a word; nothing was imported."
                )
            with self._lock:
                self.compared += values.numel()
        return values

    def _refuse_constant(self, hf: str, values: Tensor) -> None:
        """Refuse a matrix with equal elements, which no training leaves. Raises CheckpointError."""
        shape = self.source.target.shapes[hf]
        if len(shape) < 2 or values.numel() == 0 or hf in self.source.target.frozen:
            return
        low, high = float(values.min()), float(values.max())
        with self._lock:
            seen = self._seen.setdefault(hf, [0, low, high])
            seen[:] = [seen[0] + values.numel(), min(low, seen[1]), max(high, seen[2])]
        if seen[0] == numel(shape) > 1 and seen[1] == seen[2]:
            raise CheckpointError(
                f"{self.source.files.folder}: every element of {self.source.names[hf]} is {low}: it was never "
                "filled. Nothing was imported."
            )


def _step(files: Files, state: State, *, weights_only: bool) -> int:
    """The step for the checkpoint's name. Raises CheckpointError: the files have different steps."""
    step, skipped = files.state.get("global_steps"), files.state.get("skipped_steps") or 0
    if type(step) is not int or type(skipped) is not int or not 0 <= skipped <= step < 10**18:
        raise CheckpointError(
            f"{files.models[0].path}: global_steps is {shown(step)} and skipped_steps {shown(skipped)}, but both "
            "must be whole numbers, and the first not the smaller one."
        )
    if weights_only:
        return step
    counted = state.step()
    if not state.copies and counted != step - skipped:
        raise CheckpointError(
            f"{files.folder}: the optimizer counts {counted} steps, but {files.models[0].path.name} counts {step}, of "
            f"which {skipped} were skipped. They may be files of two saves, and no second copy of the weights can "
            "tell. If the optimizer was restarted in between, import the weights alone, with --weights-only."
        )
    return step


def _stage(files: Files) -> int:
    config = files.state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    return stage if type(stage) is int and 0 <= stage <= 3 else 0


def _trainer(source: _Import, step: int, config: Path) -> TrainerState:
    """Facts that DeepSpeed does not record are None; tokens count from here."""
    state, folder = source.files.state, config if config.is_dir() else config.parent
    fields = source.target.model.config.to_dict()
    samples = state.get("global_samples")
    return TrainerState(
        step=step,
        sample_index=samples if type(samples) is int and samples >= 0 else 0,
        skipped_steps=state.get("skipped_steps") or 0,
        optimizer_step=source.state.step() if source.kinds else 0,
        loss_scale=_loss_scale(source),
        model_config=fields,
        optimizer="adamw" if source.kinds else None,
        vocab_size=source.target.model.config.get_text_config().vocab_size,
        separator_id=fields.get("eos_token_id") if isinstance(fields.get("eos_token_id"), int) else None,
        tokenizer_dir=str(folder.resolve()) if any(folder.glob("tokenizer*.json")) else None,
        entries={"imported": {"from": str(source.files.folder.resolve()), "deepspeed": _version(state)}},
    )


def _version(state: dict[str, Any]) -> str | None:
    version = state.get("ds_version")
    return version[:50] if isinstance(version, str) else None


def _loss_scale(source: _Import) -> dict[str, float]:
    """Return the loss scaler's numbers; empty outside of fp16 training."""
    if source.precision() != "fp16" or not source.kinds:
        return {}
    if source.files.zero:
        scaler = source.files.zero[0][0].tree["optimizer_state_dict"].get("loss_scaler")
        numbers = vars(scaler) if isinstance(scaler, Record) else {}
    else:
        numbers = source.files.state.get("optimizer") or {}
    return {key: numbers[key] for key in _SCALER_KEYS if type(numbers.get(key)) in (int, float)}


def _report(
    reader: _Reader, path: Path, layout: dict[str, Any], trainer: TrainerState, optimizer: list[str]
) -> list[str]:
    source, files, shapes = reader.source, reader.source.files, reader.source.target.shapes
    form = "universal" if files.universal else f"ZeRO {layout['zero_stage']} x {layout['world_size']} ranks"
    stages = f", {len(files.models)} pipeline stages" if files.layers else ""
    lines = [
        f"{files.folder}: {form}{stages}, {layout['precision']}, step {trainer.step}, "
        f"optimizer step {trainer.optimizer_step}, DeepSpeed {_version(files.state)}",
        f"{len(files.all())} files read completely, their CRC32s agree",
        f"{len(shapes)} tensors, {units.count(sum(map(numel, shapes.values())))} parameters: keys and shapes are those "
        f"of {type(source.target.model).__name__}",
    ]
    if reader.compared:
        lines.append(f"{units.count(reader.compared)} elements agree with the module's own copy of them")
    for alias, name in source.target.aliases.items():
        lines.append(f"tied once: {alias} is {name}")
    lines += optimizer
    if not source.kinds and not files.zero and not files.universal and layout["precision"] != "fp32":
        lines.append(f"the weights are the {layout['precision']} copies; there were no fp32 masters")
    lines.append("not recorded by DeepSpeed, so not carried over: tokens, data order, run id, schedule")
    return [*lines, f"wrote {path}, read back and equal"]
