"""Makes small runs with the settings of the user's run. Does not import torch."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from math import gcd, lcm
from pathlib import Path
from typing import Any

from llmtrain import features
from llmtrain.base.errors import ConfigError
from llmtrain.config.deepspeed.join import DEGREE_KEYS, join_values, read_run
from llmtrain.config.deepspeed.read import checked
from llmtrain.config.problems import Places, Problems
from llmtrain.config.resolve import resolve
from llmtrain.config.rules import check_values
from llmtrain.config.run import DataConfig, EvalConfig, KeepBest, Run, RunConfig, StopEarly
from llmtrain.config.topology import Degrees
from llmtrain.objectives.preferences import OverAnswers

PLAN = "plan.pickle"
"""File with the small runs, for their ranks (trainer.py)."""
LR = 3e-4
"""Learning rate of every comparison: the effect of rounding in AdamW, and so each tolerance, is proportional to it."""
_LENGTH = 32
_MICRO_BATCH = 2
_ACCUMULATION = 4
# In elements. They decide how many buckets there are and which parameters stay gathered, so they shrink with the model.
_SIZES = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""Key of zero_optimization -> DeepSpeed's default (runtime/zero/config.py)."""
# Keys that the YAML of the small run replaces.
_DROPPED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "data_parallel_size",
)
_NOT_IN_FP32 = ("bf16", "bfloat16", "fp16", "torch_autocast", "data_types", "communication_data_type")
AUTOCAST = "autocast"
"""In place of a precision: name of the small run that keeps the JSON's `torch_autocast`."""


def wanted(config: RunConfig, places: Places) -> Run:
    """Return the run that small runs copy: YAML and JSON joined, not resolved for a number of ranks, with the JSON as
    it was written. Raises ConfigError."""
    problems = Problems(places)
    tree, _ = checked(config.deepspeed, problems)
    run = read_run(join_values(config, tree, problems), tree, problems)
    problems.raise_if_any()
    return replace(run, deepspeed=tree)


def usual_ranks(degrees: Degrees) -> list[int]:
    """Return the smallest world size that the degrees allow, and twice that if the machine has enough cores."""
    smallest = degrees.world_size * degrees.expert // gcd(degrees.expert, degrees.sequence)
    if smallest == 1:
        return [2]
    return [smallest, 2 * smallest] if 2 * smallest <= max(4, os.cpu_count() or 1) else [smallest]


def small_run(wanted: Run, model: dict[str, Any], shrunk_by: float, ranks: int, steps: int, *, cpu: bool) -> RunConfig:
    """Return the user's run with a small model, few short sequences and `steps` steps; all else is the same. `model`:
    fields of the model's config.json. `shrunk_by`: its number of parameters over the user's."""
    config, degrees = wanted.config, wanted.mix.degrees
    data_parallel = max(1, ranks // degrees.world_size)
    micro = config.train.micro_batch if isinstance(config.train.micro_batch, int) else _MICRO_BATCH
    accumulation = config.train.accumulation or 1
    if (
        config.train.accumulation is None
        and config.train.micro_batch is not None
        and config.train.global_batch is not None
    ):
        accumulation = max(1, config.train.global_batch // (micro * data_parallel))
    length = lcm(_LENGTH, degrees.sequence * degrees.tensor)
    small = replace(config.model, pretrained=None, vocabulary=None, config=model)
    small = replace(small, loss_chunk_tokens=min(40, small.loss_chunk_tokens))
    small = replace(small, neftune_noise_alpha=0.0)  # random, like dropout
    if small.mlp_tile_tokens is not None:
        small = replace(small, mlp_tile_tokens=min(16 if small.fp8 else 8, small.mlp_tile_tokens))
    if small.recompute.layers not in ("all", None):  # one layer of each pipeline stage
        small = replace(small, recompute=replace(small.recompute, layers=1))
    if cpu:  # compiling takes a minute on a CPU
        small = replace(small, compile_layers=False)
    return replace(
        config,
        model=small,
        data=DataConfig(
            path="(synthetic tokens)",
            sequence_length=length,
            mask_document_starts=config.data.mask_document_starts,
            isolate_documents=config.data.isolate_documents or isinstance(config.objective, OverAnswers),
        ),
        optim=replace(config.optim, lr=LR),
        schedule=config.schedule.shortened(min(2, config.schedule.warmup_steps, steps - 1)),
        train=replace(
            config.train,
            global_batch=None,
            micro_batch=min(_MICRO_BATCH, micro),
            accumulation=min(max(_ACCUMULATION, 2 * degrees.pipeline), accumulation),
            max_steps=steps,
            max_tokens=None,
            epochs=None,
            max_minutes=None,
            export=False,
            stop_early=StopEarly(),
        ),
        eval=EvalConfig(),
        **features.shortened(config, steps),
        checkpoint=replace(config.checkpoint, keep_best=KeepBest()),
        fault=replace(config.fault, timeout_s=min(120.0, config.fault.timeout_s)),
    )


def resolve_in(folder: Path, wanted: Run, config: RunConfig, shrunk_by: float, ranks: int, precision: str) -> Run:
    """Resolve the small run with the user's JSON in "fp32", "bf16", "fp16" or AUTOCAST. Raises ConfigError."""
    from llmtrain.models.skeleton import load_config

    layers = load_config(config.model).get_text_config().num_hidden_layers
    tree = small_tree(wanted.deepspeed, shrunk_by, precision, layers)
    path = folder / f"{precision}.json"
    path.write_text(json.dumps(tree))
    small, problems = replace(config, deepspeed=str(path)), Problems()
    try:
        check_values(small, problems)  # parsing has checked only the original values
        problems.raise_if_any()
        run = resolve(small, ranks, "--ranks")
    except ConfigError as error:
        error.args = (str(error).replace(str(path), config.deepspeed),)
        raise
    return run


def small_tree(tree: dict[str, Any], shrunk_by: float, precision: str, layers: int) -> dict[str, Any]:
    """Return the DeepSpeed JSON of the small run, whose model has `layers` layers."""
    tree = {key: copy.deepcopy(value) for key, value in tree.items() if key not in _DROPPED}
    zero = tree.get("zero_optimization")
    if isinstance(zero, dict):
        for key, default in _SIZES.items():
            given = zero.get(key, default)
            number = default if given == "auto" or not isinstance(given, (int, float)) else given
            zero[key] = max(1, round(number * shrunk_by / 2)) * 2  # DeepSpeed needs even numbers
    pipeline = tree.get("pipeline")
    if isinstance(pipeline, dict) and isinstance(pipeline.get("partition"), list):
        pipeline["partition"] = fewer_layers(pipeline["partition"], layers)
    if precision == "fp32":
        for key in _NOT_IN_FP32:
            tree.pop(key, None)
    elif precision == "bf16" and "fp16" in tree:  # in place of fp16, which DeepSpeed lacks on a CPU
        tree.pop("fp16")
        tree["bf16"] = {"enabled": True}
    elif precision == "fp16":
        # A small model needs no larger scale, and steps that are skipped to find the scale cannot be compared.
        tree["fp16"] = {**tree["fp16"], "initial_scale_power": 8}
    return tree


def fewer_layers(given: list[int], layers: int) -> list[int]:
    """Return the layers of each pipeline stage in proportion to `given`, at least one for each."""
    shares = [max(1, count * layers // sum(given)) for count in given]
    while (missing := layers - sum(shares)) != 0:
        wish = [count * layers / sum(given) - share for count, share in zip(given, shares, strict=True)]
        changed = wish.index(max(wish) if missing > 0 else min(w for w, s in zip(wish, shares, strict=True) if s > 1))
        shares[changed] += 1 if missing > 0 else -1
    return shares


def degrees_text(degrees: Degrees) -> str:
    """Return a text such as "pipeline.stages 2, data-parallel 2"."""
    named = [f"{key} {getattr(degrees, name)}" for name, key in DEGREE_KEYS.items() if getattr(degrees, name) > 1]
    return ", ".join([*named, f"data-parallel {degrees.data}"])
