"""Join the values that may stand in the YAML or in the DeepSpeed JSON: one owner for each.

A value in both places must be the same; "auto" in the JSON means the YAML's. What stands in neither gets
llmtrain's default, which is written down here once.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from llmtrain.base.choice import default_of, either
from llmtrain.base.errors import ConfigError
from llmtrain.config.batch import Batch
from llmtrain.config.deepspeed import keys as table
from llmtrain.config.deepspeed.read import lookup, read_json
from llmtrain.config.problems import Problems, closest, show
from llmtrain.config.reader import WRONG, read_field
from llmtrain.config.run import RunConfig
from llmtrain.config.schema import SHARED
from llmtrain.config.topology import Degrees, Mix, clashes
from llmtrain.optim.optimizers import Optimizer
from llmtrain.optim.schedules import Falling

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
    run: RunConfig, tree: dict[str, Any], problems: Problems
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
        if theirs is not None:
            problems.places[json_key] = path
            kind = get_type_hints(type(getattr(run, section)))[name]
            theirs = read_field(item, kind, theirs, json_key, problems)
            theirs = None if theirs is WRONG else theirs
        if ours is not None and theirs is not None and ours != theirs:
            differ(problems, yaml_key, ours, problems.places.get(yaml_key, "the YAML"), json_key, theirs, path)
        if ours is None and theirs is not None:
            origin[yaml_key] = f"{path}, {json_key}"
        value = ours if ours is not None else theirs
        values[section][name] = default_of(item) if value is None else value
    if run.model.recompute.layers is None and isinstance(tree.get("activation_checkpointing"), dict):
        # The section turns recomputation on, and says nothing of how many layers; with a number in the YAML, that many.
        run = replace(run, model=replace(run.model, recompute=replace(run.model.recompute, layers="all")))
        origin["model.recompute.layers"] = f"{path}, activation_checkpointing"
    _check_name(run, tree, problems)
    if "optimizer.type" not in problems:  # the parameters of another optimizer are no further mistakes
        _check_optimizer_params(run, tree, problems)
    run = replace(run, optim=replace(run.optim, **values["optim"]), train=replace(run.train, **values["train"]))
    return run, run.optim, origin


def optimizer_in(path: Any) -> str | None:
    """The optim.name that a JSON's optimizer.type means; None: it means none, or `resolve` will tell what is wrong."""
    try:
        return _named(lookup(read_json(path), "optimizer.type")) if isinstance(path, str) else None
    except ConfigError:
        return None


def _named(json_type: Any) -> str | None:
    types = {known.lower(): name for name, each in Optimizer.CHOICES.items() for known in each.json_types}
    return types.get(json_type.lower()) if isinstance(json_type, str) else None


def _check_name(run: RunConfig, tree: dict[str, Any], problems: Problems) -> None:
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
        place = problems.places.get("optim.name", "the YAML or its default")
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


def check_scheduler(run: RunConfig, tree: dict[str, Any], max_steps: int | None, problems: Problems) -> list[str]:
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
        place = problems.places.get("schedule.name", "the YAML or its default")
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
            place = problems.places.get(ours[name][0], "the YAML or its default")
            differ(problems, ours[name][0], ours[name][1], place, json_key, theirs, path)
    _check_scheduler_defaults(kind, params, ours, path, problems)
    if kind == "WarmupDecayLR" and min_ratio != 0:
        place = problems.places.get("schedule.min_ratio", "the YAML's default")
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


_WAYS = ("parameters", "uniform")


def read_partition(tree: dict[str, Any], path: str, stages: int, problems: Problems) -> str | tuple[int, ...]:
    """`pipeline.partition`: one of the ways, or the number of layers of each stage. Refuses what cannot be."""
    section = tree.get("pipeline")
    if stages == 1 or not isinstance(section, dict):
        return _WAYS[0]
    asked = section.get("partition", _WAYS[0])
    key = "pipeline.partition"
    if isinstance(asked, list):
        if len(asked) == stages and all(type(count) is int and count >= 1 for count in asked):
            return tuple(asked)
        rule = f"a list has the number of layers, 1 or more, of each of the {stages} stages (pipeline.stages)"
        problems.add(key, asked, rule, f"write {stages} numbers whose sum is the model's layers", path)
    elif asked not in _WAYS:
        rule = f"stages are balanced by one of {', '.join(_WAYS)}, or given as a list of layer counts"
        problems.add(key, asked, rule, 'write "parameters", or remove it', path)
    return asked if isinstance(asked, str) else _WAYS[0]


# DeepSpeed prints a line every `steps_per_print` steps, and its pipeline engine divides by it: so not None.
NEVER = 2**31 - 1

_FORCED: dict[str, Any] = {
    # Our optimizers are client optimizers: DeepSpeed wants to be told that this is meant,
    "zero_allow_untested_optimizer": True,
    # and under offload it would insist on building its own CPUAdam.
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": NEVER,
}
_NOT_FOR_DEEPSPEED = ("optimizer", "scheduler", "checkpoint", "wandb", "tensorboard", "csv_monitor", "comet")
DEGREE_KEYS = {
    "pipeline": "pipeline.stages",
    "tensor": "tensor_parallel.autotp_size",
    "sequence": "sequence_parallel_size",
    "expert": "expert_parallel.autoep_size",
}
"""Degree (topology.Degrees) -> the JSON's key for it."""
# llmtrain builds the parallel forms itself; some of these sections switch DeepSpeed into a mode merely by being there.
_DEGREES = ("pipeline", "tensor_parallel", "sequence_parallel_size", "data_parallel_size", "expert_parallel")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Values that a JSON decides, read once. `tree` has no "auto" in it any more."""

    tree: dict[str, Any]
    mix: Mix
    """The degrees are those of the JSON: the data-parallel one is what is left of the ranks."""
    pipeline_partition: str | tuple[int, ...]
    notes: tuple[str, ...]


def read_facts(tree: dict[str, Any], path: str, run: RunConfig, optim: Optimizer, problems: Problems) -> Facts:
    """Resolve every "auto" that is not shared with the YAML, and refuse illegal mixes."""
    tree = copy.deepcopy(tree)
    notes: list[str] = []
    if "bfloat16" in tree:
        tree.setdefault("bf16", tree.pop("bfloat16"))
    _resolve_precision(tree, path, notes)
    _resolve_types(tree, path, problems)
    if dropped := _drop_auto(tree, ""):
        notes.append(f'{path}: "auto" means DeepSpeed\'s default for {", ".join(dropped)}')
    fp16, bf16 = bool(lookup(tree, "fp16.enabled")), bool(lookup(tree, "bf16.enabled"))
    bf16_moments = bool((tree.get("bf16") or {}).pop("bf16_optimizer_states", False))
    if bf16_moments and not bf16:
        notes.append(f"{path}: bf16.bf16_optimizer_states has no effect: bf16 is not enabled")
        bf16_moments = False
    zero = tree.get("zero_optimization") or {}
    offload = {
        name: (zero.get(f"offload_{name}") or {}).get("device", "none") != "none" or bool(zero.get(old))
        for name, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param"))
    }
    degrees = Degrees(**{name: _degree(tree, key) for name, key in DEGREE_KEYS.items()})
    if lookup(tree, "expert_parallel.enabled") is False:
        degrees = replace(degrees, expert=1)
    elif lookup(tree, "expert_parallel.enabled") and lookup(tree, "expert_parallel.autoep_size") is None:
        rule = "without autoep_size, the number of ranks that share the experts of a layer, no rank shares any"
        problems.add("expert_parallel.enabled", True, rule, "write autoep_size, or remove the section", path)
    mix = Mix(
        zero_stage=int(zero.get("stage") or 0),
        fp16=fp16,
        bf16=bf16,
        offload_optimizer=offload["optimizer"],
        offload_param=offload["param"],
        compile_layers=bool(run.model.compile_layers),
        fp8=run.model.fp8 is not None,
        mlp_tiles=run.model.mlp_tile_tokens is not None,
        layer_inputs_on_host=bool(lookup(tree, "activation_checkpointing.cpu_checkpointing")),
        keep_attention=run.model.recompute.keep is not None,
        recomputes=run.model.recompute.layers is not None,
        recompute_auto=run.model.recompute.layers == "auto",
        optimizer=optim.name,
        own_settings=optim.has_own_settings,
        clip_norm=optim.clip_norm,
        reduce_scatter=bool(zero.get("reduce_scatter")),
        fp32_accumulation=lookup(tree, "data_types.grad_accum_dtype") == "fp32",
        bf16_moments=bf16_moments,
        profiled=bool(lookup(tree, "flops_profiler.enabled") or tree.get("wall_clock_breakdown")),
        hpz=int(zero.get("zero_hpz_partition_size") or 1) > 1,
        beta=max(optim.betas),
        degrees=degrees,
    )
    partition = read_partition(tree, path, degrees.pipeline, problems)
    if mix.zero_stage == 0 and (why := _why_not_stage_0(mix)):
        tree["zero_optimization"] = {**zero, "stage": 1}
        mix = replace(mix, zero_stage=1)
        notes.append(f"{path}: {why}")
    if mix.zero_stage == 3 and "scattered gradients" in optim.refuses:
        tree["zero_optimization"]["reduce_scatter"] = False  # DeepSpeed's default is true
    if bf16_moments:
        notes.append(
            f"{path}: bf16.bf16_optimizer_states: moments are kept in bf16, and those of a checkpoint rounded to it; "
            "masters are fp32, where DeepSpeed by itself asks for bf16"
        )
    notes += _switched_off(tree, path, degrees)
    if degrees.expert > 1:
        _check_zero_of_experts(tree.get("zero_optimization") or {}, mix.zero_stage, path, problems)
    _refuse(mix, tree, path, run, problems)
    return Facts(tree=tree, mix=mix, pipeline_partition=partition, notes=tuple(notes))


def _switched_off(tree: dict[str, Any], path: str, degrees: Degrees) -> list[str]:
    """Notes about keys of a section that is off, or of a way of computing that is not asked for."""
    scale = lookup(tree, "fp16.loss_scale") or 0
    dynamic = [f"fp16.{name}" for name in _OF_A_DYNAMIC_SCALE]
    fp16 = bool(lookup(tree, "fp16.enabled"))
    idle = [
        (degrees.pipeline == 1, _keys_of("pipeline"), f"{DEGREE_KEYS['pipeline']} is not above 1"),
        (degrees.expert == 1, _keys_of("expert_parallel"), f"{DEGREE_KEYS['expert']} is not above 1"),
        (degrees.sequence == 1, ["seq_parallel_communication_data_type"], "sequence_parallel_size is not above 1"),
        (not fp16, _keys_of("fp16"), "fp16.enabled is not true"),
        (fp16 and scale > 0, dynamic, f"fp16.loss_scale {show(scale)} stays as it is; 0 is the one that adapts"),
    ]
    for section in ("comms_logger", "flops_profiler"):
        idle.append((not lookup(tree, f"{section}.enabled"), _keys_of(section), f"{section}.enabled is not true"))
    for name in ("offload_optimizer", "offload_param"):
        section = f"zero_optimization.{name}"
        off = lookup(tree, f"{section}.device") in (None, "none")
        idle.append((off, _keys_of(section), f"{section}.device is none"))
    notes, known, stage = [], dict(table.leaves()), lookup(tree, "zero_optimization.stage") or 0
    for off, keys, why in idle:
        given = [
            key
            for key in keys
            if known[key].is_read(stage)
            and key not in _SWITCHES
            and lookup(tree, key) not in (None, "auto", known[key].default, *known[key].same)
        ]
        if off and given:
            notes.append(f"{path}: {', '.join(given)}: no effect: {why}")
    return notes


_OF_A_DYNAMIC_SCALE = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
_SWITCHES = frozenset(
    {
        *(DEGREE_KEYS[name] for name in ("pipeline", "expert")),
        *(f"{section}.enabled" for section in ("expert_parallel", "fp16", "comms_logger", "flops_profiler")),
        *(f"zero_optimization.offload_{name}.device" for name in ("optimizer", "param")),
    }
)
"""Keys that turn the others of their section on."""


def _keys_of(section: str) -> list[str]:
    keys: Any = table.KEYS
    for name in section.split("."):
        keys = keys[name]
    return [dotted for dotted, _ in table.leaves(keys, f"{section}.")]


def _refuse(mix: Mix, tree: dict[str, Any], path: str, run: RunConfig, problems: Problems) -> None:
    """Tell what cannot be combined, with the values that clash."""
    for rule in clashes(mix):
        values: dict[str, Any] = {key: lookup(tree, key) for key in rule.keys}
        values |= {"model.compile_layers": run.model.compile_layers, "optim.name": run.optim.name}
        values |= {"optim.clip_norm": run.optim.clip_norm, "optim.betas": run.optim.betas}
        values["bf16.bf16_optimizer_states"] = mix.bf16_moments
        values["model.fp8"] = run.model.fp8
        values["model.mlp_tile_tokens"] = run.model.mlp_tile_tokens
        values["model.recompute.layers"] = run.model.recompute.layers
        values["model.recompute.keep"] = run.model.recompute.keep
        what = " with ".join(f"{key} = {show(values[key])}" for key in rule.keys)
        if rule.keys[0] not in problems:
            problems.add_text(rule.keys[0], what, rule.reason, rule.remedy, path)


def _why_not_stage_0(mix: Mix) -> str | None:
    """A note on why this mix runs as ZeRO 1 when ZeRO 0 is asked for; None: it does not."""
    if mix.fp16 and not mix.bf16:
        return (
            "fp16 at ZeRO 0 runs as ZeRO 1, which computes the same: DeepSpeed 0.19 forgets to scale the loss there, "
            "and gradients come out 65,536 times too small"
        )
    if mix.bf16 and mix.fp32_accumulation:
        return (
            "bf16 with data_types.grad_accum_dtype fp32 at ZeRO 0 runs as ZeRO 1, which computes the same: DeepSpeed "
            "sums in fp32 under ZeRO only"
        )
    if mix.degrees.pipeline > 1:
        return (
            "a pipeline at ZeRO 0 runs as ZeRO 1, which computes the same: without ZeRO, no stage knows the gradient "
            "norm of the others"
        )
    if mix.degrees.expert > 1 and mix.bf16:
        return (
            "experts that ranks share run in bf16 with ZeRO 1 where ZeRO 0 is asked for, which computes the same: "
            "DeepSpeed 0.19 leaves them out of the gradient norm there (runtime/fp16/unfused_optimizer.py)"
        )
    if mix.degrees.expert > 1 and mix.degrees.sequence > 1:
        return (
            "experts that sequence-parallel ranks share run with ZeRO 1 where ZeRO 0 is asked for, which computes the "
            "same: DeepSpeed 0.19 averages them over the data-parallel ranks only (engine.py _reduce_expert_gradients)"
        )
    return None


def exact_dict(facts: Facts, path: str, batch: Batch, clip_norm: float) -> tuple[dict[str, Any], list[str]]:
    """The dict that the engine is built from, and notes about what was taken out or overruled."""
    exact = {key: value for key, value in facts.tree.items() if key not in (*_NOT_FOR_DEEPSPEED, *_DEGREES)}
    notes = [
        f"{path}: {key} = {show(facts.tree[key])} is overruled with {show(value)}: llmtrain needs it"
        for key, value in _FORCED.items()
        if key in facts.tree and facts.tree[key] != value
    ]
    exact |= {
        "train_batch_size": batch.global_batch,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": clip_norm,
        **_FORCED,
    }
    exact.setdefault("wall_clock_breakdown", False)
    # DeepSpeed's throughput timer is on by default and synchronises the device twice a step; ours does not.
    exact["timers"] = {"throughput": {"enabled": False}}
    return exact, notes


FP32_BY_AUTO = "and so the run computes in fp32"
"""In the note of a JSON whose "auto" turns no half precision on."""


def _check_zero_of_experts(zero: dict[str, Any], stage: int, path: str, problems: Problems) -> None:
    """Refuse settings that DeepSpeed's optimizers assert against, while they are built, in a run with shared experts.

    ZeRO 1 without contiguous gradients it takes, and sums an expert's gradient with those of other experts.
    """
    needed: tuple[tuple[str, Any, tuple[int, ...]], ...] = (
        ("reduce_scatter", True, (1, 2)),
        ("contiguous_gradients", True, (1, 2)),
        ("zero_hpz_partition_size", 1, (3,)),
    )
    for key, value, stages in needed:
        if stage in stages and zero.get(key) not in (None, value):
            rule = f"experts that ranks share (expert_parallel.autoep_size) need {show(value)} with ZeRO {stage}"
            problems.add(f"zero_optimization.{key}", zero[key], rule, "remove the key, or expert_parallel", path)


def _resolve_precision(tree: dict[str, Any], path: str, notes: list[str]) -> None:
    """An "auto" for fp16.enabled is false; for bf16.enabled it is true unless fp16 is on."""
    for name in ("fp16", "bf16"):
        section = tree.get(name)
        if isinstance(section, dict) and section.get("enabled") == "auto":
            section["enabled"] = name == "bf16" and not lookup(tree, "fp16.enabled")
            notes.append(f'{path}: {name}.enabled "auto" -> {show(section["enabled"])}')
    if notes and not any(lookup(tree, f"{name}.enabled") for name in ("fp16", "bf16")):
        notes[-1] += f", {FP32_BY_AUTO}: there is no --fp16 or --bf16 here; write true for one of the two"


_TYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
"""The names that DeepSpeed takes for a type of numbers (runtime/config.py DtypeEnum)."""
_SUMS = ("data_types.grad_accum_dtype", "communication_data_type", "seq_parallel_communication_data_type")


def _resolve_types(tree: dict[str, Any], path: str, problems: Problems) -> None:
    """Give each type of numbers its one name, and refuse those that do not go with the run's precision."""
    own = next((name for name in ("fp16", "bf16") if lookup(tree, f"{name}.enabled")), "fp32")
    for key in (*_SUMS, "data_types.param_dtype"):
        value = lookup(tree, key)
        if value in (None, "auto"):
            continue
        name = next((name for name, names in _TYPES.items() if str(value).lower() in names), None)
        if name is None:
            problems.add(key, value, "a type of numbers is fp32, bf16 or fp16", 'write "fp32", or remove it', path)
        elif key == "data_types.param_dtype" and name != own:
            rule = f"the parameters are {own}: that is decided by fp16.enabled and bf16.enabled"
            problems.add(key, value, rule, f'remove it, or write "{own}"', path)
        elif name not in (own, "fp32"):
            rule = f"gradients of a run in {own} are summed in {own} or fp32: another type would lose what they have"
            problems.add(key, value, rule, f'write "fp32" or "{own}", or remove it', path)
        else:
            section, _, last = key.rpartition(".")
            (tree[section] if section else tree)[last] = name


def _drop_auto(section: dict[str, Any], prefix: str) -> list[str]:
    """Delete each remaining "auto", in place; returns the keys, without those of optimizer and scheduler."""
    dropped = []
    for key, value in list(section.items()):
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            dropped += _drop_auto(value, f"{dotted}.")
        elif value == "auto" and dotted not in table.AUTO_MEANS_SOMETHING:
            del section[key]
            dropped.append(dotted)
    shared = ("optimizer.", "scheduler.", "train_", "gradient_accumulation", "gradient_clipping")
    return [key for key in dropped if not key.startswith(shared)]


def _degree(tree: dict[str, Any], key: str) -> int:
    value = lookup(tree, key)
    return int(value) if isinstance(value, (int, float)) and value > 1 else 1
