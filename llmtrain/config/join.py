"""Join the values that may stand in the YAML or in the DeepSpeed JSON: one owner for each.

A value in both places must be the same; "auto" in the JSON means the YAML's. What stands in neither gets
llmtrain's default, which is written down here once.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from llmtrain.base.choice import default_of, either
from llmtrain.base.errors import ConfigError
from llmtrain.config import ds_json
from llmtrain.config.ds_json import lookup
from llmtrain.config.problems import Places, Problems, closest, show
from llmtrain.config.run import RunConfig
from llmtrain.optim.optimizers import Optimizer
from llmtrain.optim.schedules import Falling

SHARED: dict[str, str] = {
    "train.global_batch": "train_batch_size",
    "train.micro_batch": "train_micro_batch_size_per_gpu",
    "train.accumulation": "gradient_accumulation_steps",
    **{
        f"optim.{item.name}": item.metadata["json"]
        for optimizer in Optimizer.CHOICES.values()
        for item in fields(optimizer)
        if "json" in item.metadata
    },
}
"""YAML key -> JSON key of the same value. optim.name and optimizer.type are joined by `_join_name`."""

_NO_EFFECT = ("torch_adam", "fused")


def differ(
    problems: Problems,
    yaml_key: str,
    ours: Any,
    yaml_place: str,
    json_key: str,
    theirs: Any,
    json_path: str,
    remedy: str | None = None,
) -> None:
    """Report one value that stands in two places with two contents. `remedy`: where "auto" is none."""
    problems.add_text(
        yaml_key,
        f"{yaml_key} = {show(ours)}  ({yaml_place}), but {json_key} = {show(theirs)}  ({json_path})",
        "a value that stands in both files must be the same",
        remedy or f'remove one of the two, or write "auto" for {json_key} in the JSON',
    )


def join_values(
    run: RunConfig, tree: dict[str, Any], places: Places, problems: Problems
) -> tuple[RunConfig, Optimizer, dict[str, str]]:
    """The run with every shared field filled in from YAML, JSON or default, except the three batch sizes.

    Returns also its optimizer, and where each value from the JSON stands (YAML key -> "FILE, JSON key"). Batch sizes
    that stand nowhere stay None: `batch.solve` finds them.
    """
    path = run.deepspeed
    values: dict[str, dict[str, Any]] = {"optim": {}, "train": {}}
    origin: dict[str, str] = {}
    for yaml_key, json_key in SHARED.items():
        section, name = yaml_key.split(".")
        item = getattr(run, section).__dataclass_fields__.get(name)
        if item is None:
            continue  # `_check_optimizer_params` finds it in the JSON
        ours = getattr(getattr(run, section), name)
        theirs = lookup(tree, json_key)
        if theirs == "auto":
            theirs = None
        theirs = _typed(yaml_key, json_key, theirs, path, problems)
        if ours is not None and theirs is not None and ours != theirs:
            differ(problems, yaml_key, ours, places.get(yaml_key, "the YAML"), json_key, theirs, path)
        if ours is None and theirs is not None:
            origin[yaml_key] = f"{path}, {json_key}"
        value = ours if ours is not None else theirs
        values[section][name] = default_of(item) if value is None else value
    if run.model.recompute.layers is None and isinstance(tree.get("activation_checkpointing"), dict):
        # The section turns recomputation on, and says nothing of how many layers; with a number in the YAML, that many.
        run = replace(run, model=replace(run.model, recompute=replace(run.model.recompute, layers="all")))
        origin["model.recompute.layers"] = f"{path}, activation_checkpointing"
    _check_name(run, tree, places, problems)
    if "optimizer.type" not in problems:  # the parameters of another optimizer are no further mistakes
        _check_optimizer_params(run, tree, problems)
    run = replace(run, optim=replace(run.optim, **values["optim"]), train=replace(run.train, **values["train"]))
    return run, run.optim, origin


def _typed(yaml_key: str, json_key: str, value: Any, path: str, problems: Problems) -> Any:
    """A JSON value in the type of its YAML field; sections with free keys have not been linted yet."""
    if value is None:
        return None
    if yaml_key == "optim.betas":
        if isinstance(value, list) and len(value) == 2 and all(_is_number(v) for v in value):
            return (float(value[0]), float(value[1]))
        problems.add(json_key, value, "must be a list of two numbers", "write [0.9, 0.95]", path)
        return None
    if not _is_number(value):
        remedy = "remove the quotes" if isinstance(value, str) else "write a number"
        problems.add(json_key, value, "must be a number", remedy, path)
        return None
    return float(value) if yaml_key.startswith("optim.") else int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def optimizer_in(path: Any) -> str | None:
    """The optim.name that a JSON's optimizer.type means; None: it means none, or `resolve` will tell what is wrong."""
    try:
        return _named(lookup(ds_json.read(path), "optimizer.type")) if isinstance(path, str) else None
    except ConfigError:
        return None


def _named(json_type: Any) -> str | None:
    types = {known.lower(): name for name, each in Optimizer.CHOICES.items() for known in each.json_types}
    return types.get(json_type.lower()) if isinstance(json_type, str) else None


def _check_name(run: RunConfig, tree: dict[str, Any], places: Places, problems: Problems) -> None:
    json_type = lookup(tree, "optimizer.type")
    if not isinstance(json_type, str) or json_type.lower() == "auto":
        return
    theirs, known = _named(json_type), [each for each in Optimizer.CHOICES.values() if each.json_types]
    if theirs is None:
        problems.add(
            "optimizer.type", json_type,
            f"llmtrain trains with {either([kind for each in known for kind in each.json_types])}",
            f"write {either([json.dumps(each.json_types[-1]) for each in known])}, or remove the optimizer section "
            "and set optim.name in the YAML", run.deepspeed,
        )  # fmt: skip
    elif run.optim.name != theirs:
        place = places.get("optim.name", "the YAML or its default")
        differ(problems, "optim.name", run.optim.name, place, "optimizer.type", json_type, run.deepspeed)


def _check_optimizer_params(run: RunConfig, tree: dict[str, Any], problems: Problems) -> None:
    """Optimizer parameters that are not joined: each is harmless, or an error. None is ignored silently."""
    optim, every = run.optim, Optimizer.CHOICES
    owners = {choice: {*_params(each), *each.fixed} for choice, each in every.items()}
    known = set().union(*owners.values())
    for name, value in (lookup(tree, "optimizer.params") or {}).items():
        key = f"optimizer.params.{name}"
        if name in _NO_EFFECT or name in _params(type(optim)) or (value in (None, "auto") and name in known):
            continue
        if name in optim.fixed:
            if value != optim.fixed[name]:
                rule = f"llmtrain's {optim.title} has {name} = {show(optim.fixed[name])}"
                problems.add(key, value, rule, "remove it", run.deepspeed)
        elif having := [choice for choice, names in owners.items() if name in names]:
            rule, remedy = Optimizer.refusal_of(having)
            remedy += f" ({optim.title}'s momentum is betas[0])" if name == "momentum" else ""
            problems.add(key, value, rule, remedy, run.deepspeed)
        elif name == "max_grad_norm":
            remedy = "write gradient_clipping at the top level of the JSON, or optim.clip_norm in the YAML"
            problems.add(key, value, "clipping is not an optimizer parameter", remedy, run.deepspeed)
        else:
            near = closest(name, [*known, *_NO_EFFECT])
            remedy = f"did you mean optimizer.params.{near}?" if near else "remove it"
            rule = f"no such parameter of {either([each.title for each in every.values()])}"
            problems.add(key, value, rule, remedy, run.deepspeed)


def _params(optimizer: type[Optimizer]) -> set[str]:
    """The keys of `optimizer.params` that are fields of this optimizer."""
    keys = (item.metadata.get("json", "") for item in fields(optimizer))
    return {key.removeprefix("optimizer.params.") for key in keys if key.startswith("optimizer.params.")}


_NO_SECTION = "remove the scheduler section: the YAML's schedule decides anyway"
_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_AUTO = {"WarmupLR": ("a constant rate", None), "WarmupDecayLR": ("a line to 0", 0),
         "WarmupCosineLR": ("half a cosine to 0.0001 of the rate", 1e-4)}  # fmt: skip
"""HF Trainer's shape after the warm-up if all parameters are "auto", and our min_ratio for the shape."""
_SCHEDULER_DEFAULTS: dict[str, dict[str, Any]] = {  # deepspeed/runtime/lr_schedules.py
    "WarmupLR": {"warmup_min_lr": 0, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupCosineLR": {
        "warmup_min_ratio": 0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 1e-4,
        "warmup_type": "log",
    },
}

_OF_SCHEDULERS = {"warmup_max_lr", "total_num_steps"}.union(*_SCHEDULER_DEFAULTS.values())


def check_scheduler(
    run: RunConfig, tree: dict[str, Any], max_steps: int | None, places: Places, problems: Problems
) -> list[str]:
    """A `scheduler` section must say what the YAML's `schedule` says. Returns notes.

    `run` is joined (optim.lr is known). A section whose parameters are all "auto" agrees with any schedule; once
    one is concrete, or there is none, those that are missing count with DeepSpeed's defaults.
    """
    section = tree.get("scheduler")
    if not isinstance(section, dict) or not any(section.values()):
        return []
    path, kind, params = run.deepspeed, section.get("type"), section.get("params") or {}
    if kind not in _SCHEDULERS:
        remedy = "remove the scheduler section and set `schedule` in the YAML"
        problems.add("scheduler.type", kind, f"llmtrain understands {', '.join(_SCHEDULERS)}", remedy, path)
        return []
    if params and all(value == "auto" and name in _OF_SCHEDULERS for name, value in params.items()):
        note = f"{path}: scheduler {kind} is all auto; the YAML's schedule ({run.schedule.name}) decides"
        (course, end), name = _AUTO[kind], _SCHEDULERS[kind]
        if (run.schedule.name, getattr(run.schedule, "min_ratio", None)) != (name, end):
            same = name if end is None else f"{name}, schedule.min_ratio: {end:g}"
            note += (f". With it Hugging Face's Trainer trains a warm-up and then {course}, whatever its "
                     f"lr_scheduler_type is; here that is schedule.name: {same}")  # fmt: skip
        return [note]
    schedule = run.schedule
    if schedule.name != _SCHEDULERS[kind]:
        place = places.get("schedule.name", "the YAML or its default")
        meant = f"{kind}, which is {_SCHEDULERS[kind]}"
        remedy = f"write schedule.name: {_SCHEDULERS[kind]}, or {_NO_SECTION}"
        differ(problems, "schedule.name", schedule.name, place, "scheduler.type", meant, path, remedy)
        return []  # what its parameters would say is of another schedule
    min_ratio = schedule.min_ratio if isinstance(schedule, Falling) else None
    ours: dict[str, tuple[str, Any]] = {
        "warmup_num_steps": ("schedule.warmup_steps", schedule.warmup_steps),
        "warmup_max_lr": ("optim.lr", run.optim.lr),
        "total_num_steps": ("train.max_steps", max_steps),
        "cos_min_ratio": ("schedule.min_ratio", min_ratio),
        "warmup_min_lr": ("the warm-up's first lr", 0),
        "warmup_min_ratio": ("the warm-up's first ratio", 0),
        "warmup_type": ("the warm-up's shape", "linear"),
    }
    for name, theirs in params.items():
        json_key = f"scheduler.params.{name}"
        if name not in ours:
            near = closest(name, ours)
            problems.add(
                json_key, theirs, f"no parameter of {kind}", f"did you mean {near}?" if near else "remove it", path
            )
        elif theirs not in ("auto", ours[name][1]):
            place = places.get(ours[name][0], "the YAML or its default")
            differ(problems, ours[name][0], ours[name][1], place, json_key, theirs, path)
    _check_scheduler_defaults(kind, params, ours, path, problems)
    if kind == "WarmupDecayLR" and min_ratio != 0:
        place = places.get("schedule.min_ratio", "the YAML's default")
        remedy = f"write schedule.min_ratio: 0, or {_NO_SECTION}"
        differ(problems, "schedule.min_ratio", min_ratio, place, f"the end of {kind}", 0, path, remedy)
    return [f"{path}: scheduler {kind} agrees with the YAML's schedule, which decides"]


def _check_scheduler_defaults(
    kind: str, params: dict[str, Any], ours: dict[str, tuple[str, Any]], path: str, problems: Problems
) -> None:
    """Values that are left out count with DeepSpeed's defaults; those that are not the run's are one mistake."""
    defaults = {name: value for name, value in _SCHEDULER_DEFAULTS[kind].items() if name not in params}
    other = {name: value for name, value in defaults.items() if value != ours[name][1]}
    if not other:
        return
    missing = ", ".join(f"scheduler.params.{name}" for name in other)
    theirs = ", ".join(f"{name} = {show(value)}" for name, value in other.items())
    here = ", ".join(f"{ours[name][0]} is {show(ours[name][1])}" for name in other)
    wanted = ", ".join(f'"{name}": {show(ours[name][1])}' for name in other)
    problems.add_text(
        "scheduler.params",
        f"{missing}: not set",
        f"{kind} then takes DeepSpeed's own {theirs}, and in this run {here}",
        f"write {wanted} there, or {_NO_SECTION}",
        path,
    )
