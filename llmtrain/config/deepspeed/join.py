"""Join the YAML and the DeepSpeed JSON into one value for every setting, and make the dict that DeepSpeed gets.

A value in both files must be equal, "auto" in the JSON means the YAML's value, and a value in neither file is
llmtrain's default. Imports neither DeepSpeed nor torch.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

from llmtrain.base.choice import default_of, either
from llmtrain.base.errors import ConfigError
from llmtrain.base.trees import lookup
from llmtrain.config.deepspeed import keys as table
from llmtrain.config.deepspeed.read import read_json
from llmtrain.config.problems import Problems, closest, show
from llmtrain.config.reader import WRONG, read, read_field
from llmtrain.config.rules import refuse
from llmtrain.config.run import Run, RunConfig
from llmtrain.config.schema import SHARED, type_name
from llmtrain.config.topology import Degrees, Mix, clashes
from llmtrain.optim.optimizers import Optimizer

DEGREE_KEYS = {
    "pipeline": "pipeline.stages",
    "tensor": "tensor_parallel.autotp_size",
    "sequence": "sequence_parallel_size",
    "expert": "expert_parallel.autoep_size",
}
"""Degree of parallelism (topology.Degrees) -> key of the JSON."""


def join_values(config: RunConfig, tree: dict[str, Any], problems: Problems) -> RunConfig:
    """Fill in every field that YAML and JSON share, from the YAML, the JSON or the default.

    Batch sizes that neither file has stay None: `solve` in config/resolve.py finds them. `problems.places` gets the
    places of the JSON's keys, also for fields of the YAML whose values are from the JSON.
    """
    path, values = config.deepspeed, dict[str, dict[str, Any]](optim={}, train={})
    for yaml_key, json_key in SHARED.items():
        part, name = yaml_key.split(".")
        section, theirs = getattr(config, part), lookup(tree, json_key)
        item = section.__dataclass_fields__.get(name)
        if item is None:
            continue  # `_check_optimizer_params` finds it in the JSON
        if theirs == "auto":
            theirs = None
        if theirs is not None:
            problems.places[json_key] = path
            kind = get_type_hints(type(section))[name]
            if isinstance(theirs, str) or read(kind, theirs, json_key, Problems()) is WRONG:
                remedy = "remove the quotes" if isinstance(theirs, str) else item.metadata["remedy"]
                problems.add(json_key, theirs, f"must be {type_name(kind)}", remedy)
                theirs = WRONG
            else:
                theirs = read_field(item, kind, theirs, json_key, problems)
        ours = getattr(section, name)
        if ours is None and theirs is not None:
            problems.places[yaml_key] = f"{path}, {json_key}"
        elif theirs not in (None, WRONG, ours):
            _differ(yaml_key, ours, json_key, theirs, config, problems)
        values[part][name] = next((value for value in (ours, theirs) if value not in (None, WRONG)), default_of(item))
    if config.model.recompute.layers is None and isinstance(tree.get("activation_checkpointing"), dict):
        # The section turns recomputation on without a number of layers; the number may be in the YAML.
        config = replace(config, model=replace(config.model, recompute=replace(config.model.recompute, layers="all")))
        problems.places["model.recompute.layers"] = f"{path}, activation_checkpointing"
    _check_name(config, tree, problems)
    if "optimizer.type" not in problems:  # the parameters of another optimizer are no further mistakes
        _check_optimizer_params(config, tree, problems)
    return replace(
        config, optim=replace(config.optim, **values["optim"]), train=replace(config.train, **values["train"])
    )


def _differ(yaml_key: str, ours: Any, json_key: str, theirs: Any, config: RunConfig, problems: Problems) -> None:
    place = problems.places.get(yaml_key, "the YAML or its default")
    problems.add_text(
        yaml_key,
        f"{yaml_key} = {show(ours)}  ({place}), but {json_key} = {show(theirs)}  ({config.deepspeed})",
        "a value that both files have must be the same",
        f'remove one of the two, or write "auto" for {json_key} in the JSON',
    )


def optimizer_in(path: Any) -> str | None:
    """Return the optim.name for the optimizer.type of a JSON; None: it has none, or `resolve` reports a mistake."""
    try:
        return _named(lookup(read_json(path), "optimizer.type")) if isinstance(path, str) else None
    except ConfigError:
        return None


def _named(json_type: Any) -> str | None:
    types = {known.lower(): name for name, each in Optimizer.CHOICES.items() for known in each.json_types}
    return types.get(json_type.lower()) if isinstance(json_type, str) else None


def _check_name(config: RunConfig, tree: dict[str, Any], problems: Problems) -> None:
    json_type = lookup(tree, "optimizer.type")
    if not isinstance(json_type, str) or json_type.lower() == "auto":
        return
    theirs, known = _named(json_type), [each for each in Optimizer.CHOICES.values() if each.json_types]
    if theirs is None:
        rule = f"llmtrain trains with {either([kind for each in known for kind in each.json_types])}"
        remedy = f"write {either([json.dumps(each.json_types[-1]) for each in known])}, or remove the optimizer section"
        problems.add("optimizer.type", json_type, rule, f"{remedy} and set optim.name in the YAML", config.deepspeed)
    elif config.optim.name != theirs:
        _differ("optim.name", config.optim.name, "optimizer.type", json_type, config, problems)


def _check_optimizer_params(config: RunConfig, tree: dict[str, Any], problems: Problems) -> None:
    """Report parameters of the JSON that the chosen optimizer does not have, or only with another fixed value."""
    optim, every, idle = config.optim, Optimizer.CHOICES, ("torch_adam", "fused")
    prefix = "optimizer.params."
    joined = {
        choice: {
            key.removeprefix(prefix)
            for item in fields(each)
            if (key := item.metadata.get("json", "")).startswith(prefix)
        }
        for choice, each in every.items()
    }
    owners = {choice: {*joined[choice], *each.fixed} for choice, each in every.items()}
    known = set().union(*owners.values())
    for name, value in (lookup(tree, "optimizer.params") or {}).items():
        key = f"{prefix}{name}"
        if name in idle or name in joined[optim.name] or (value in (None, "auto") and name in known):
            continue
        if name in optim.fixed:
            if value == optim.fixed[name]:
                continue
            rule, remedy = f"llmtrain's {optim.title} has {name} = {show(optim.fixed[name])}", "remove it"
        elif having := [choice for choice, names in owners.items() if name in names]:
            rule, remedy = Optimizer.refusal_of(having)
            remedy += f" ({optim.title}'s momentum is betas[0])" if name == "momentum" else ""
        elif name == "max_grad_norm":
            rule = "clipping is not an optimizer parameter"
            remedy = "write gradient_clipping at the top level of the JSON, or optim.clip_norm in the YAML"
        else:
            near = closest(name, [*known, *idle])
            rule = f"no such parameter of {either([each.title for each in every.values()])}"
            remedy = f"did you mean {prefix}{near}?" if near else "remove it"
        problems.add(key, value, rule, remedy, config.deepspeed)


_SCHEDULERS = {
    "WarmupLR": ("keeps the rate constant", "constant", None),
    "WarmupDecayLR": ("decays linearly to 0", "linear", 0),
    "WarmupCosineLR": ("decays by half a cosine to 0.0001 of the rate", "cosine", 1e-4),
}
"""`scheduler.type` -> its shape after the warm-up by DeepSpeed's own values, schedule.name and schedule.min_ratio."""
_OF_SCHEDULERS = {
    "warmup_num_steps": "schedule.warmup_steps",
    "warmup_max_lr": "optim.lr",
    "total_num_steps": "train.max_steps",
    "cos_min_ratio": "schedule.min_ratio",
}
"""Parameter of a DeepSpeed scheduler -> key of the YAML."""


def check_scheduler(config: RunConfig, tree: dict[str, Any], problems: Problems) -> list[str]:
    """Refuse values in a `scheduler` section, because the YAML's `schedule` decides. Returns notes.

    If all of its parameters are "auto", the section is accepted, and a note says which schedule Hugging Face's Trainer
    would use.
    """
    section = tree.get("scheduler") or {}
    if not any(section.values()):
        return []
    path, kind, params = config.deepspeed, section.get("type"), section.get("params") or {}
    course, name, least = _SCHEDULERS.get(str(kind), ("", "", None))
    here = {"schedule.name": name} if least is None else {"schedule.name": name, "schedule.min_ratio": least}
    if not name or not params or any(value != "auto" for value in params.values()):
        here |= {
            _OF_SCHEDULERS[key]: value for key, value in params.items() if key in _OF_SCHEDULERS and value != "auto"
        }
        same = f"write {_listed(here)}" if name else "set `schedule`"
        rule = "the YAML's `schedule` alone decides the learning rate; its warm-up is linear"
        problems.add("scheduler", section, rule, f"remove the section, and {same} in the YAML", path)
        return []
    note = f"{path}: scheduler {kind} is all auto; the YAML's schedule ({config.schedule.name}) decides"
    if (config.schedule.name, getattr(config.schedule, "min_ratio", None)) != (name, least):
        note += (
            f". With this section Hugging Face's Trainer warms up and then {course}, whatever its lr_scheduler_type "
            f"is; to do the same here, write {_listed(here)}"
        )
    return [note]


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{key}: {value:g}" if isinstance(value, float) else f"{key}: {value}" for key, value in values.items()
    )


def read_run(config: RunConfig, tree: dict[str, Any], problems: Problems) -> Run:
    """Resolve each "auto" of keys that only the JSON has, and refuse illegal mixes. `config`: from `join_values`.

    Returns the run without stages. Its degrees are those of the JSON; `resolve.spread` adds the data-parallel one.
    """
    path, tree, notes = config.deepspeed, copy.deepcopy(tree), list[str]()
    _resolve_precision(tree, path, notes)
    _resolve_types(tree, path, problems)
    _resolve_autocast(tree, path, notes, problems)
    if dropped := _drop_auto(tree, ""):
        notes.append(f'{path}: "auto" means DeepSpeed\'s default for {", ".join(dropped)}')
    mix = _mix(config, tree, _degrees(tree, path, problems))
    partition = _partition(tree, path, mix.degrees.pipeline, problems)
    zero = tree.get("zero_optimization", {})
    if mix.zero_stage == 0:
        for asked, what, why in _AS_ZERO_1:
            if asked(mix):
                mix, zero = replace(mix, zero_stage=1), {**zero, "stage": 1}
                notes.append(f"{path}: {what} at ZeRO 0 runs as ZeRO 1, which computes the same: {why}")
                break
    if mix.bf16_moments:
        notes.append(
            f"{path}: bf16.bf16_optimizer_states: moments are kept in bf16, and the moments of a checkpoint are "
            "rounded to bf16 when it is loaded; master weights stay fp32, where DeepSpeed alone would ask for bf16"
        )
    if zero:
        tree["zero_optimization"] = zero
    notes += _switched_off(tree, path)
    refuse(clashes(mix), mix, config, problems, tree)
    if mix.zero_stage == 3 and config.optim.whole_gradients:
        tree["zero_optimization"]["reduce_scatter"] = False  # DeepSpeed's default is true
    tree.get("bf16", {}).pop("bf16_optimizer_states", None)  # llmtrain's own optimizer has them
    known, section = table.KEYS["expert_parallel"], tree.get("expert_parallel") or {}
    experts = {name: value for name, value in section.items() if not known[name].unread}
    return Run(
        config=config,
        mix=mix,
        deepspeed=tree,
        pipeline_partition=partition,
        expert_parallel=experts,
        places=problems.places,
        notes=tuple(notes),
    )


FP32_BY_AUTO = "and so the run computes in fp32"
"""Words of the note on a JSON in which "auto" leaves both half precisions off."""


def _resolve_precision(tree: dict[str, Any], path: str, notes: list[str]) -> None:
    """Replace "auto": fp16.enabled becomes false, and bf16.enabled true unless fp16 or autocast is on."""
    autocast = lookup(tree, "torch_autocast.enabled") is True
    for name in ("fp16", "bf16"):
        if lookup(tree, f"{name}.enabled") == "auto":
            tree[name]["enabled"] = name == "bf16" and not (lookup(tree, "fp16.enabled") or autocast)
            notes.append(f'{path}: {name}.enabled "auto" -> {show(tree[name]["enabled"])}')
    if notes and not autocast and not any(lookup(tree, f"{name}.enabled") for name in ("fp16", "bf16")):
        notes[-1] += f", {FP32_BY_AUTO}: there is no --fp16 or --bf16 here; write true for one of the two"


_TYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
"""dtype -> names that DeepSpeed accepts for it (runtime/config.py DtypeEnum)."""
_SUMS = ("data_types.grad_accum_dtype", "communication_data_type", "seq_parallel_communication_data_type")
_OF_PARAMETERS = ("data_types.param_dtype", "tensor_parallel.dtype")


def _resolve_types(tree: dict[str, Any], path: str, problems: Problems) -> None:
    """Rewrite each dtype as fp32, bf16 or fp16, and refuse dtypes that do not fit the run's precision."""
    own = next((name for name in ("fp16", "bf16") if lookup(tree, f"{name}.enabled")), "fp32")
    for key in (*_SUMS, *_OF_PARAMETERS):
        value = lookup(tree, key)
        if value in (None, "auto"):
            continue
        name = _type_named(value)
        if name is None:
            problems.add(key, value, "must be fp32, bf16 or fp16", 'write "fp32", or remove it', path)
        elif key in _OF_PARAMETERS and name != own:
            rule = f"the parameters are {own}: that is decided by fp16.enabled and bf16.enabled"
            problems.add(key, value, rule, f'remove it, or write "{own}"', path)
        elif name not in (own, "fp32"):
            fine = ["fp32"] if own == "fp32" else ["fp32", own]
            rule = f"gradients of a run in {own} are summed in {' or '.join(fine)}: {name} would lose digits or range"
            problems.add(key, value, rule, f"write {' or '.join(map(show, fine))}, or remove it", path)
        else:
            section, _, last = key.rpartition(".")
            (tree[section] if section else tree)[last] = name


def _type_named(value: Any) -> str | None:
    return next((name for name, names in _TYPES.items() if str(value).lower() in names), None)


_SAFE_MODULE = re.compile(r"(torch\.nn|transformers)(\.\w+)+")


def _resolve_autocast(tree: dict[str, Any], path: str, notes: list[str], problems: Problems) -> None:
    """Fill in torch_autocast.dtype, and refuse values that DeepSpeed ignores, computes wrongly or would import."""
    section = tree.get("torch_autocast", {})
    if section.get("enabled") is not True:
        return
    if section.get("dtype") in (None, "auto"):
        section["dtype"] = "bfloat16"
        notes.append(f"{path}: torch_autocast.dtype -> bfloat16; DeepSpeed has no default for it")
    if (dtype := _type_named(section["dtype"])) != "bf16":
        reason = {
            None: "must be bfloat16",
            "fp32": "products in fp32 need no autocast",
            "fp16": "at ZeRO 1 to 3 DeepSpeed 0.19 clips gradients that are still multiplied by torch's loss scale, "
            "and no checkpoint has a place for that scale",
        }[dtype]
        remedy = 'write "bfloat16"' + ", or use the fp16 section" * (dtype == "fp16")
        problems.add("torch_autocast.dtype", section["dtype"], reason, remedy, path)
    safe = section.get("lower_precision_safe_modules")
    for name in safe if isinstance(safe, list) else ():
        if not (isinstance(name, str) and _SAFE_MODULE.fullmatch(name)):
            rule = "DeepSpeed imports the names of this list: here they are classes of torch.nn and transformers"
            remedy = 'correct or remove it; DeepSpeed\'s own list begins with "torch.nn.modules.linear.Linear"'
            problems.add("torch_autocast.lower_precision_safe_modules", name, rule, remedy, path)
    if tree.get("communication_data_type") not in (None, "auto"):
        rule = "torch_autocast decides it: gradients of lower_precision_safe_modules are sent in bf16, others in fp32"
        remedy = "remove it; with an empty list torch_autocast.lower_precision_safe_modules all are sent in fp32"
        problems.add("communication_data_type", tree["communication_data_type"], rule, remedy, path)


def _drop_auto(section: dict[str, Any], prefix: str) -> list[str]:
    """Delete each remaining "auto", in place. Returns their keys, except those of optimizer and scheduler."""
    dropped = []
    for key, value in list(section.items()):
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            dropped += _drop_auto(value, f"{dotted}.")
        elif value == "auto":
            del section[key]
            dropped.append(dotted)
    shared = ("optimizer.", "scheduler.", "train_", "gradient_accumulation", "gradient_clipping")
    return [key for key in dropped if not key.startswith(shared)]


def _degrees(tree: dict[str, Any], path: str, problems: Problems) -> Degrees:
    if lookup(tree, "expert_parallel.enabled") is False:
        tree["expert_parallel"]["autoep_size"] = 1
    elif lookup(tree, "expert_parallel.enabled") and lookup(tree, "expert_parallel.autoep_size") is None:
        rule = "autoep_size, the number of ranks that share the experts of a layer, is missing"
        problems.add("expert_parallel.enabled", True, rule, "write autoep_size, or remove the section", path)
    return Degrees(**{name: max(1, int(lookup(tree, key) or 1)) for name, key in DEGREE_KEYS.items()})


def offloads(tree: dict[str, Any], what: str) -> bool:
    """Return True if the JSON offloads `what` ("optimizer", or "param" for parameters) to the host or a disk."""
    zero, old = tree.get("zero_optimization", {}), "cpu_offload" if what == "optimizer" else "cpu_offload_param"
    return lookup(zero, f"offload_{what}.device") not in (None, "none") or bool(zero.get(old))


def _swap_buffers(section: dict[str, Any], optim: Optimizer) -> int:
    if section.get("device") != "nvme":
        return 0
    # For master, moments and gradient of a sub-group; of the next one, read ahead; of the one before, still written.
    ahead = bool(section.get("pipeline_read")) + bool(section.get("pipeline_write"))
    return max(int(section.get("buffer_count") or 0), (2 + optim.moments) * (1 + ahead))


def _mix(config: RunConfig, tree: dict[str, Any], degrees: Degrees) -> Mix:
    model, optim, zero = config.model, config.optim, tree.get("zero_optimization", {})
    bf16 = bool(lookup(tree, "bf16.enabled"))
    return Mix(
        zero_stage=int(zero.get("stage") or 0),
        fp16=bool(lookup(tree, "fp16.enabled")),
        bf16=bf16,
        autocast=bool(lookup(tree, "torch_autocast.enabled")),
        offload_optimizer=offloads(tree, "optimizer"),
        offload_param=offloads(tree, "param"),
        weights_on_disk=lookup(zero, "offload_param.device") == "nvme",
        swaps=_swap_buffers(zero.get("offload_optimizer") or {}, optim),
        compile_layers=bool(model.compile_layers),
        fp8=model.fp8 is not None,
        mlp_tiles=model.mlp_tile_tokens is not None,
        layer_inputs_on_host=bool(lookup(tree, "activation_checkpointing.cpu_checkpointing")),
        keep_attention=model.recompute.keep is not None,
        recomputes=model.recompute.layers is not None,
        optimizer=optim.name,
        own_settings=optim.has_own_settings,
        clip_norm=optim.clip_norm,
        reduce_scatter=zero.get("reduce_scatter"),
        contiguous_gradients=zero.get("contiguous_gradients"),
        fp32_accumulation=lookup(tree, "data_types.grad_accum_dtype") == "fp32",
        bf16_moments=bf16 and bool(lookup(tree, "bf16.bf16_optimizer_states")),
        profiled=bool(lookup(tree, "flops_profiler.enabled") or tree.get("wall_clock_breakdown")),
        hpz=int(zero.get("zero_hpz_partition_size") or 1) > 1,
        beta=max(optim.betas),
        degrees=degrees,
    )


def _partition(tree: dict[str, Any], path: str, stages: int, problems: Problems) -> str | tuple[int, ...]:
    """Return `pipeline.partition`: "parameters", "uniform", or the number of layers in each pipeline stage."""
    key, usual = "pipeline.partition", "parameters"
    asked = lookup(tree, key)
    if stages == 1 or asked in (None, usual, "uniform"):
        return asked if stages > 1 and asked else usual
    if not isinstance(asked, list):
        rule = 'must be "parameters", "uniform" or a list with the number of layers of each pipeline stage'
        problems.add(key, asked, rule, 'write "parameters", or remove it', path)
        return usual
    if len(asked) != stages or not all(type(count) is int and count >= 1 for count in asked):
        rule = f"must have a number of layers, 1 or more, for each of the {stages} pipeline stages (pipeline.stages)"
        problems.add(key, asked, rule, f"write {stages} numbers whose sum is the model's layers", path)
    return tuple(asked)


_AS_ZERO_1: tuple[tuple[Callable[[Mix], bool], str, str], ...] = (
    (lambda m: m.fp16 and not m.bf16, "fp16",
     "DeepSpeed 0.19 forgets to scale the loss there, and gradients come out 65,536 times too small"),
    (lambda m: m.bf16 and m.fp32_accumulation, "bf16 with data_types.grad_accum_dtype fp32",
     "DeepSpeed sums in fp32 under ZeRO only"),
    (lambda m: m.degrees.pipeline > 1, "a pipeline",
     "without ZeRO, no stage knows the gradient norm of the others"),
    (lambda m: m.degrees.expert > 1 and m.bf16, "a run in bf16 whose experts are shared by ranks",
     "DeepSpeed 0.19 leaves the experts out of the gradient norm there (runtime/fp16/unfused_optimizer.py)"),
    (lambda m: m.degrees.expert > 1 and m.degrees.sequence > 1, "a run whose experts sequence-parallel ranks share",
     "DeepSpeed 0.19 averages them over the data-parallel ranks only (engine.py _reduce_expert_gradients)"),
)  # fmt: skip
"""Mixes that run as ZeRO 1 although the JSON says ZeRO 0: condition, words for the note, reason."""

_SWITCHES = {
    "pipeline": "pipeline.stages",
    "expert_parallel": "expert_parallel.autoep_size",
    "seq_parallel_communication_data_type": "sequence_parallel_size",
    "fp16": "fp16.enabled",
    "bf16": "bf16.enabled",
    "torch_autocast": "torch_autocast.enabled",
    "comms_logger": "comms_logger.enabled",
    "flops_profiler": "flops_profiler.enabled",
    "zero_optimization.offload_optimizer": "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param": "zero_optimization.offload_param.device",
}
"""Section or key -> key that turns it on."""


def _switched_off(tree: dict[str, Any], path: str) -> list[str]:
    known, stage = table.LEAVES, lookup(tree, "zero_optimization.stage") or 0
    idle: dict[str, tuple[str, ...]] = {}  # reason -> keys and sections
    for part, switch in _SWITCHES.items():
        value = lookup(tree, switch)
        match known[switch].kind:
            case "bool" if not value:
                idle[f"{switch} is not true"] = (part,)
            case "int" if (value or 1) <= 1:
                idle[f"{switch} is not above 1"] = (part,)
            case "str" if value in (None, "none"):
                idle[f"{switch} is none"] = (part,)
    if scale := lookup(tree, "fp16.enabled") and lookup(tree, "fp16.loss_scale"):
        why = f"fp16.loss_scale {show(scale)} is a fixed scale; with 0 DeepSpeed adapts it"
        idle[why] = tuple(f"fp16.{name}" for name in table.DYNAMIC_SCALE)
    notes = []
    for why, parts in idle.items():
        given = [
            name
            for name, key in known.items()
            if any(name == part or name.startswith(f"{part}.") for part in parts)
            and key.is_read(stage)
            and name not in (*_SWITCHES.values(), "expert_parallel.enabled")
            and lookup(tree, name) not in (None, key.default, *key.same)
        ]
        if given:
            notes.append(f"{path}: {', '.join(given)}: no effect: {why}")
    return notes


NEVER = 2**31 - 1
"""DeepSpeed prints a line every `steps_per_print` steps, and its pipeline engine divides by it: so not None."""
_FORCED: dict[str, Any] = {
    # Our optimizers are client optimizers, which DeepSpeed wants confirmed,
    "zero_allow_untested_optimizer": True,
    # and under offload it would insist on building its own CPUAdam.
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": NEVER,
}
_NOT_FOR_DEEPSPEED = (
    *("optimizer", "scheduler", "checkpoint", "wandb", "tensorboard", "csv_monitor", "comet"),
    # llmtrain builds the parallel forms itself; some of these sections switch DeepSpeed into a mode by being there.
    *("pipeline", "tensor_parallel", "sequence_parallel_size", "data_parallel_size", "expert_parallel"),
)


def with_exact_dict(run: Run) -> tuple[Run, list[str]]:
    """Return the run with the dict for the engine, and notes on keys of the JSON that llmtrain overrides."""
    tree, batch = run.deepspeed, run.batch
    notes = [
        f"{run.config.deepspeed}: {key} = {show(tree[key])} is replaced by {show(value)}, which llmtrain needs"
        for key, value in _FORCED.items()
        if key in tree and tree[key] != value
    ]
    exact = {
        "wall_clock_breakdown": False,
        **{key: value for key, value in tree.items() if key not in _NOT_FOR_DEEPSPEED},
        "train_batch_size": batch.global_batch,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": run.config.optim.clip_norm,
        **_FORCED,
        # DeepSpeed's throughput timer is on by default and synchronises the device twice a step; ours does not.
        "timers": {"throughput": {"enabled": False}},
    }
    return replace(run, deepspeed=exact), notes


def without_degrees(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON without degrees of parallelism and with "auto" for batch sizes, which the YAML then gives."""
    parallel = {key.split(".")[0] for key in DEGREE_KEYS.values()}
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {key: value for key, value in tree.items() if key not in parallel} | dict.fromkeys(batch, "auto")
