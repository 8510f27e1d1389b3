"""Join the values that may stand in the YAML or in the DeepSpeed JSON: one owner for each.

A value in both places must be the same; "auto" in the JSON means the YAML's. What stands in neither gets
llmtrain's default, which is written down here once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmtrain.config.ds_json import lookup
from llmtrain.config.problems import Places, Problems, closest, show
from llmtrain.config.run import ResolvedOptim, RunConfig
from llmtrain.optim.optimizers import OPTIMIZERS, Optimizer
from llmtrain.optim.schedules import Falling

SHARED: dict[str, str] = {
    "train.global_batch": "train_batch_size",
    "train.micro_batch": "train_micro_batch_size_per_gpu",
    "train.accumulation": "gradient_accumulation_steps",
    "optim.clip_norm": "gradient_clipping",
    "optim.lr": "optimizer.params.lr",
    "optim.betas": "optimizer.params.betas",
    "optim.eps": "optimizer.params.eps",
    "optim.weight_decay": "optimizer.params.weight_decay",
}
"""YAML key -> JSON key of the same value. optim.name and optimizer.type are joined by `_join_name`."""

DEFAULTS: dict[str, Any] = {
    "optim.name": "adamw",
    "optim.lr": 3e-4,
    "optim.betas": (0.9, 0.95),
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.1,
    "optim.clip_norm": 1.0,
}

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
) -> tuple[RunConfig, ResolvedOptim, dict[str, str]]:
    """The run with every shared field filled in from YAML, JSON or default, except the three batch sizes.

    Returns also its optimizer, and where each value from the JSON stands (YAML key -> "FILE, JSON key"). Batch sizes
    that stand nowhere stay None: `batch.solve` finds them.
    """
    path = run.deepspeed
    values: dict[str, dict[str, Any]] = {"optim": {}, "train": {}}
    origin: dict[str, str] = {}
    for yaml_key, json_key in SHARED.items():
        section, name = yaml_key.split(".")
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
        values[section][name] = DEFAULTS.get(yaml_key) if value is None else value
    name = values["optim"]["name"] = _join_name(run, tree, places, problems)
    unset = "optim.clip_norm" not in origin and run.optim.clip_norm is None
    if unset and "clipping" in OPTIMIZERS[name].refuses:
        values["optim"]["clip_norm"] = 0.0
    if "optimizer.type" not in problems:  # the parameters of another optimizer are no further mistakes
        _check_optimizer_params(run, OPTIMIZERS[name], tree, places, problems)
    run = replace(run, optim=replace(run.optim, **values["optim"]), train=replace(run.train, **values["train"]))
    return run, ResolvedOptim(**vars(run.optim)), origin


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


def _join_name(run: RunConfig, tree: dict[str, Any], places: Places, problems: Problems) -> str:
    json_type = lookup(tree, "optimizer.type")
    theirs = None
    if isinstance(json_type, str) and json_type.lower() != "auto":
        types = {known: entry.name for entry in OPTIMIZERS.values() for known in entry.json_types}
        theirs = {known.lower(): name for known, name in types.items()}.get(json_type.lower())
        if theirs is None:
            ours_in_json = _either([f'"{entry.json_types[-1]}"' for entry in OPTIMIZERS.values()])
            problems.add(
                "optimizer.type", json_type, f"llmtrain trains with {_either(list(types))}",
                f"write {ours_in_json}, or remove the optimizer section and set optim.name in the YAML",
                run.deepspeed,
            )  # fmt: skip
    ours = run.optim.name
    if ours is not None and theirs is not None and ours != theirs:
        differ(
            problems, "optim.name", ours, places.get("optim.name", "the YAML"),
            "optimizer.type", json_type, run.deepspeed,
        )  # fmt: skip
    return ours or theirs or DEFAULTS["optim.name"]


def _either(names: list[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _check_optimizer_params(
    run: RunConfig, optimizer: Optimizer, tree: dict[str, Any], places: Places, problems: Problems
) -> None:
    """Optimizer parameters that are not shared: each is harmless, or an error. None is ignored silently."""
    params = lookup(tree, "optimizer.params") or {}
    owners = {param: entry.title for entry in OPTIMIZERS.values() for param in (*entry.params, *entry.fixed)}
    shared = [key.rsplit(".", 1)[1] for key in SHARED.values() if key.startswith("optimizer.params.")]
    for name, value in params.items():
        key = f"optimizer.params.{name}"
        if name in _NO_EFFECT or (value in (None, "auto") and name in owners):
            continue
        if name in optimizer.params and name in shared:
            continue  # it is joined already
        if name in optimizer.params:
            field = optimizer.params[name]
            ours = getattr(run.optim, field)
            if ours != value:
                place = places.get(f"optim.{field}", "the YAML or its default")
                differ(problems, f"optim.{field}", ours, place, key, value, run.deepspeed)
        elif name in optimizer.fixed:
            if value != optimizer.fixed[name]:
                rule = f"llmtrain's {optimizer.title} has {name} = {show(optimizer.fixed[name])}"
                problems.add(key, value, rule, "remove it", run.deepspeed)
        elif name in owners:
            instead = name == "momentum" and "betas" in optimizer.params
            remedy = f"remove it ({optimizer.title}'s momentum is betas[0])" if instead else "remove it"
            rule = f"{owners[name]} has such a parameter, {optimizer.title} has not"
            problems.add(key, value, rule, remedy, run.deepspeed)
        elif name == "max_grad_norm":
            remedy = "write gradient_clipping at the top level of the JSON, or optim.clip_norm in the YAML"
            problems.add(key, value, "clipping is not an optimizer parameter", remedy, run.deepspeed)
        else:
            near = closest(name, [*owners, *_NO_EFFECT])
            remedy = f"did you mean optimizer.params.{near}?" if near else "remove it"
            rule = f"no such parameter of {_either([entry.title for entry in OPTIMIZERS.values()])}"
            problems.add(key, value, rule, remedy, run.deepspeed)


_NO_SECTION = "remove the scheduler section: the YAML's schedule decides anyway"
_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
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
        return [f"{path}: scheduler {kind} is all auto; the YAML's schedule ({run.schedule.name}) decides"]
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
    """What the section leaves out counts with DeepSpeed's defaults; those that are not the run's are one mistake."""
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
