"""The exact dict for the engine from the user's DeepSpeed JSON. No DeepSpeed, no torch.

`deep_check` alone imports DeepSpeed, and only when it is called.
"""

from __future__ import annotations

import copy
import glob
import os
from dataclasses import dataclass, replace
from typing import Any

from llmtrain.base.errors import ConfigError
from llmtrain.config import ds_keys
from llmtrain.config.batch import Batch
from llmtrain.config.ds_json import lookup
from llmtrain.config.problems import Problems, show, stop
from llmtrain.config.run import RunConfig
from llmtrain.config.topology import Degrees, Mix, clashes
from llmtrain.optim.optimizers import Optimizer

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
_ACCELERATORS = (
    "/dev/nvidia*",
    "/dev/kfd",
    "/dev/dxg",
    "/dev/dri",
    "/dev/davinci*",
    "/dev/accel*",
    "/dev/hl*",
    "/dev/hpu*",
)
"""Device files of NVIDIA, AMD, Windows' Linux, Intel and others."""
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
    notes, known, stage = [], dict(ds_keys.leaves()), lookup(tree, "zero_optimization.stage") or 0
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
    keys: Any = ds_keys.KEYS
    for name in section.split("."):
        keys = keys[name]
    return [dotted for dotted, _ in ds_keys.leaves(keys, f"{section}.")]


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


def name_cpu() -> None:
    """Tell DeepSpeed that there is only the CPU, where no accelerator can be: it would guess that, with a warning.

    Its launcher would also show the ranks all GPUs again where an empty CUDA_VISIBLE_DEVICES hides them.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(glob.glob(node) for node in _ACCELERATORS):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def let_segments_grow() -> None:
    """Let torch's allocator on NVIDIA GPUs extend its segments instead of mapping new ones beside half-empty ones.

    Evaluation, training and rows of other lengths ask for other sizes, and what one leaves between two blocks is no
    use to the next. Read when torch is imported. A user's own choice stays.
    """
    if glob.glob("/dev/nvidia[0-9]*") and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def deep_check(exact: dict[str, Any], path: str) -> None:
    """Build DeepSpeed's own configuration object from the dict: its validators see every section.

    Takes seconds (imports torch and DeepSpeed), needs no device and starts no process group.
    Raises: ConfigError with DeepSpeed's own words.
    """
    import logging

    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)  # it would tell that there is no process group yet
    single = copy.deepcopy(exact)
    # Without a process group DeepSpeed takes the world for one rank.
    single["train_batch_size"] = single["train_micro_batch_size_per_gpu"] * single["gradient_accumulation_steps"]
    try:
        DeepSpeedConfig(single)
    except (ValueError, TypeError, AssertionError, KeyError, AttributeError, DeepSpeedConfigError) as error:
        raise _told_by_deepspeed(error, single, path) from error
    finally:
        logger.setLevel(level)


def _told_by_deepspeed(error: Exception, tree: dict[str, Any], path: str) -> ConfigError:
    details = getattr(error, "errors", None)  # pydantic tells which key of the section
    if callable(details):
        problems = Problems()
        for item in details():
            key = ".".join(str(part) for part in item["loc"]) or "deepspeed"
            sections = [name for name in tree if lookup(tree, f"{name}.{key}") == item.get("input")]
            key = f"{sections[0]}.{key}" if len(sections) == 1 and item["loc"] else key
            problems.add(key, item.get("input"), f"DeepSpeed says: {item['msg']}", "correct this value", path)
        return problems.error()
    text = str(error) or type(error).__name__
    return stop("deepspeed", path, f"DeepSpeed refuses it: {text}", "correct the file as this says", path)


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
        elif value == "auto" and dotted not in ds_keys.AUTO_MEANS_SOMETHING:
            del section[key]
            dropped.append(dotted)
    shared = ("optimizer.", "scheduler.", "train_", "gradient_accumulation", "gradient_clipping")
    return [key for key in dropped if not key.startswith(shared)]


def _degree(tree: dict[str, Any], key: str) -> int:
    value = lookup(tree, key)
    return int(value) if isinstance(value, (int, float)) and value > 1 else 1
