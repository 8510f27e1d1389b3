"""Each key of DeepSpeed's JSON that is accepted, at each ZeRO stage, against plain PyTorch: 2 ranks, accumulation 3.

A cell trains some steps, saves, exports, and goes on in a new engine. Losses, gradient norms, parameters and the
exported tensors are those of one process. Cells of a stage are a covering array: any two keys that something reads
there meet in all four ways, set and not set.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmtrain.base.trees import lookup
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.load import load_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.deepspeed import keys as ds_keys
from tests.helpers.config_workplace import merged
from tests.helpers.families import FAMILIES
from tests.helpers.marks import slow
from tests.helpers.processors import on_device
from tests.helpers.training import (
    GLOBAL_BATCH,
    LLAMA,
    Case,
    Trace,
    assembled,
    counted,
    make_engine,
    plain_pytorch,
    resolved_run,
    save_checkpoint,
    train_steps,
)

HALF, END, ACCUMULATION, CLIP = 2, 4, 3, 0.5

Tree = dict[str, Any]


@dataclass(frozen=True)
class Factor:
    """Keys that are set together, and the ZeRO stages where something reads them."""

    tree: Tree
    stages: tuple[int, ...] = ds_keys.STAGES


def case_of(stage: int, tree: Tree, **form: Any) -> Case:
    """A training with the keys of a JSON."""
    extra = merged(tree, {"zero_optimization": {"stage": stage}})
    return Case(stage=stage, steps=END, accumulation=ACCUMULATION, clip=CLIP, extra=extra, **form)


def proves(case: Case) -> set[tuple[str, int]]:
    """(key, stage) of each key that is not at its default here."""
    return {
        (dotted, case.stage)
        for dotted, key in ds_keys.LEAVES.items()
        if (value := lookup(case.extra, dotted)) is not None and (value != key.default or dotted == STAGE)
    }


STAGE = "zero_optimization.stage"


def zero(**keys: Any) -> Tree:
    return {"zero_optimization": keys}


FACTORS: dict[str, Factor] = {
    "values of the YAML": Factor(
        {
            "gradient_clipping": CLIP,
            "train_batch_size": GLOBAL_BATCH,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": ACCUMULATION,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto"}},
            "data_parallel_size": 2,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1,
        }
    ),
    "profilers": Factor(
        {
            "flops_profiler": {
                "enabled": True,
                "recompute_fwd_factor": 1.0,
                "profile_step": 2,
                "module_depth": 1,
                "top_modules": 2,
                "detailed": False,
                "output_file": "/dev/null",
            },
            "memory_breakdown": True,
        }
    ),
    "comms logger": Factor(
        {
            "comms_logger": {
                "enabled": True,
                "prof_all": False,
                "prof_ops": ["all_reduce"],
                "verbose": True,
                "debug": True,
            },
            "log_level": "info",
        }
    ),
    "timers": Factor({"wall_clock_breakdown": True}),
    "recomputation": Factor({"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}}),
    "engine": Factor({"disable_python_gc": True, "dump_state": True, "log_level": "info"}),
    "scaled before": Factor({"prescale_gradients": True}, (0, 1)),
    "scaled in parts": Factor({"gradient_predivide_factor": 4.0}, (0, 1)),
    "contiguous": Factor(zero(contiguous_gradients=False), (1, 2, 3)),
    "scatter": Factor(zero(reduce_scatter=False), (1, 2, 3)),
    "bucket": Factor(zero(reduce_bucket_size=5000), (1, 2, 3)),
    "overlap": Factor(zero(overlap_comm=True), (1, 2)),
    "no overlap": Factor(zero(overlap_comm=False), (3,)),
    "ranks' buckets": Factor(zero(use_multi_rank_bucket_allreduce=False), (1, 2)),
    "gathered bucket": Factor(zero(allgather_bucket_size=1000), (1, 2)),
    "round robin": Factor(zero(round_robin_gradients=True), (1, 2)),
    "alignment": Factor(zero(parameter_alignment=True), (1, 2)),
    "offload": Factor(zero(offload_optimizer={"device": "cpu", "pin_memory": False}), (1, 2)),
    "offload in part": Factor(zero(offload_optimizer={"device": "cpu", "pin_memory": False, "ratio": 0.5}), (3,)),
    "offload of parameters": Factor(zero(offload_param={"device": "cpu", "pin_memory": False}), (3,)),
    "sub-groups": Factor(zero(sub_group_size=20_000), (3,)),
    "prefetch": Factor(zero(stage3_prefetch_bucket_size=3000), (3,)),
    "persistence": Factor(zero(stage3_param_persistence_threshold=0), (3,)),
    "persistence of all": Factor(zero(stage3_model_persistence_threshold=10_000), (3,)),
    "live": Factor(zero(stage3_max_live_parameters=10_000), (3,)),
    "reuse": Factor(zero(stage3_max_reuse_distance=1000), (3,)),
    "fetch": Factor(zero(stage3_use_all_reduce_for_fetch_params=True), (3,)),
    "sequential": Factor(zero(stage3_allgather_sequential=True), (3,)),
    "two places": Factor(zero(zero_hpz_partition_size=2), (3,)),
    "linear": Factor(zero(memory_efficient_linear=False), (3,)),
    "apply": Factor(zero(override_module_apply=False), (3,)),
    "trace": Factor(zero(log_trace_cache_warnings=True, enable_sanity_checks=True), (3,)),
}


BF16_SUMS: Tree = {
    "bfloat16": {"enabled": True, "bf16_optimizer_states": True},
    "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "bf16", "keep_in_fp32_modules": ["norm"]},
    "tensor_parallel": {"dtype": "bf16"},
    "communication_data_type": "fp32",
}
BF16: Tree = {
    "bf16": {"enabled": True, "bf16_optimizer_states": True},
    "communication_data_type": "bf16",
    "seq_parallel_communication_data_type": "bf16",
}
AUTOCAST: Tree = {
    "torch_autocast": {
        "enabled": True,
        "dtype": "bfloat16",
        "lower_precision_safe_modules": ["torch.nn.modules.linear.Linear"],
    }
}
"""See tests/ranks/test_autocast.py, too."""
STATIC: Tree = {"fp16": {"enabled": True, "loss_scale": 128, "auto_cast": True}}
DYNAMIC: Tree = {
    "fp16": {
        "enabled": True,
        "initial_scale_power": 8,
        "loss_scale_window": 2,
        "hysteresis": 1,
        "consecutive_hysteresis": True,
        "min_loss_scale": 2,
    }
}
PRESET: Tree = {
    "expert_parallel": {
        "preset_model": "mixtral",
        "combine_impl": "legacy_bmm",
        "comm_backend": "deepep",
        "async_split_plan": True,
        "gate_up_impl": "fused",
        "row_weighting_impl": "fused",
        "validate_folding_routing": True,
        "use_grouped_mm": False,
        "disable_triton_grouped_mm": True,
    }
}


def columns(count: int) -> list[tuple[int, ...]]:
    """The rows in which each of so many factors is set: any two meet in all four ways, not set in either in row 0.

    Sets of n // 2 of n - 1 rows (Kleitman and Spencer, 1973): none holds another, and any two meet.
    """
    size = next(n for n in range(4, 100, 2) if comb(n - 1, n // 2) >= count)
    return list(combinations(range(1, size), size // 2))[:count]


def covering(stage: int) -> dict[str, Case]:
    """The factors of a stage; row 0, which sets none, is every other test."""
    factors = [factor.tree for factor in FACTORS.values() if stage in factor.stages]
    factors.append(idle(stage))
    chosen = columns(len(factors))
    cells = {}
    for row in range(1, 1 + max(map(max, chosen))):
        tree = functools.reduce(merged, (tree for tree, rows in zip(factors, chosen, strict=True) if row in rows), {})
        cells[f"ZeRO {stage}, row {row}"] = case_of(stage, tree)
    return cells


def idle(stage: int) -> Tree:
    """A value for each accepted key that nothing reads at a stage."""
    trees = [factor.tree for factor in FACTORS.values()]
    tree: Tree = {}
    for dotted, key in ds_keys.LEAVES.items():
        if stage in key.at or key.is_read(stage) or dotted in OLD:
            continue
        values = [value for value in (lookup(known, dotted) for known in trees) if value not in (None, key.default)]
        *sections, last = dotted.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = (values or [IDLE.get(dotted) or other(key)])[0]
    return tree


OLD = ("zero_optimization.stage3_gather_fp16_weights_on_model_save",)
"""Old names, which DeepSpeed does not take beside the new ones."""
IDLE: Tree = {
    "tensor_parallel.vocab_parallel_ce_backend": "liger",
    "compile.passes": ["z3"],
    "expert_parallel.row_weighting_impl": "fused",
    "expert_parallel.gate_up_impl": "fused",
    "expert_parallel.comm_backend": "deepep",
    "data_efficiency.data_sampling": {"enabled": False},
    "data_efficiency.data_routing": {"enabled": False},
}
"""Valid values for keys whose kind alone does not yield one that DeepSpeed accepts."""


def other(key: ds_keys.Key) -> Any:
    """A value that is not the default."""
    number = key.default if isinstance(key.default, (int, float)) else 0
    return {
        "bool": not key.default,
        "int": int(number) + 2,
        "num": number / 2 + 0.25,
        "str": "x",
        "list": ["x"],
        "dict": {"x": 1},
    }[key.kind]


def old_names(stage: int) -> Tree:
    return zero(stage3_gather_fp16_weights_on_model_save=True, **({"cpu_offload": True} if stage else {}))


def all_cells() -> dict[str, Case]:
    """Every training of this file, by its name."""
    cells: dict[str, Case] = {}
    for stage in ds_keys.STAGES:
        cells |= covering(stage)
    mixtral = {"model": FAMILIES["mixtral"], "expert": 2}
    for stage in ds_keys.STAGES:
        tensor, sequence = merged(BF16_SUMS, TENSOR), merged(BF16, {"sequence_parallel_size": 2})
        old = merged(STATIC, old_names(stage))
        forms = {
            "bf16, sums in fp32, tensor": case_of(stage, tensor, precision="bf16", tensor=2),
            "bf16, sequence": case_of(stage, sequence, precision="bf16", sequence=2),
            "fp16, static, old names": case_of(stage, old, precision="fp16"),
            "autocast": case_of(stage, AUTOCAST),
            "fp16, dynamic": case_of(stage, DYNAMIC, precision="fp16"),
            "experts": case_of(stage, merged(PRESET, EXPERTS), **mixtral),
        }
        if stage < 2:
            pipeline = {"pipeline": {"stages": 2, "partition": [3, 1]}}
            forms["pipeline"] = case_of(stage, pipeline, pipeline=2, partition=(3, 1))
            forms["divided by the ranks"] = case_of(stage, {"gradient_predivide_factor": 2.0})
        cells |= {f"ZeRO {stage}, {name}": case for name, case in forms.items()}
    offload = zero(cpu_offload=True, cpu_offload_param=True)
    return cells | {"ZeRO 3, offload of parameters by its old name": case_of(3, offload)}


TENSOR: Tree = {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}, "keep_module_on_host": True}}
EXPERTS: Tree = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
CELLS = all_cells()


def needed() -> set[tuple[str, int]]:
    """Every key at every stage where it is not refused."""
    return {
        (dotted, stage) for dotted, key in ds_keys.LEAVES.items() for stage in ds_keys.STAGES if stage not in key.at
    }


def first_cells() -> list[str]:
    """Names of a few cells that have every key at every stage: those of every run of the tests."""
    proved = {name: proves(case) for name, case in CELLS.items()}
    left, chosen = needed(), list[str]()
    while left & proved[best := max(CELLS, key=lambda name: len(left & proved[name]))]:
        chosen.append(best)
        left -= proved[best]
    return chosen


FIRST = first_cells()


def prove(case: Case, folder: str) -> tuple[Trace, str]:
    """The whole training with a save in the middle, from which another engine goes on; and the checkpoint."""
    engine, ranks = make_engine(case)
    trace = train_steps(case, engine, ranks, 0, HALF)
    state = {
        "step": HALF,
        "tokens": 0,
        **counted(engine),
        "model_config": engine.module.config.to_dict(),
    }
    path = save_checkpoint(engine, Path(folder), HALF, state, resolved_run(case, ranks.world_size), ranks)
    engine.close()
    engine, ranks = make_engine(case)
    load_checkpoint(engine, CheckpointReader(path), TrainerState.read(path), ranks)
    rest = train_steps(case, engine, ranks, HALF, END)
    trace = Trace(trace.losses + rest.losses, trace.norms + rest.norms, assembled(engine, ranks))
    engine.close()
    return trace, str(path)


@functools.cache
def reference(data: str, experts: bool) -> Trace:
    """Plain PyTorch, in one process and fp32."""
    model = FAMILIES["mixtral"] if experts else LLAMA
    return plain_pytorch(
        Case(data=data, steps=END, accumulation=ACCUMULATION, clip=CLIP, model=model), keep_before=(0, HALF)
    )


def off(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """The difference of all parameters, as a share of what they have moved."""
    assert got.keys() == want.keys()
    error, way = (
        sum(float((a[name] - b[name]).square().sum()) for name in want) for a, b in ((got, want), (want, start))
    )
    return float((error / way) ** 0.5)


TOLERANCES = {"fp32": (1e-5, 1e-5, 1e-3), "bf16": (2e-3, 1e-2, 0.1), "fp16": (2e-4, 2e-3, 0.03)}
"""Tolerances by precision: of the loss in nats, of the gradient norm and of movements as shares.

fp32: the order of sums. AdamW divides by the root of the second moment: where a gradient is rounding, its update is.
bf16 keeps 8 bits and fp16 11: see tests/ranks/test_forms.py.
"""


@pytest.mark.parametrize("name", [name if name in FIRST else slow(name) for name in CELLS])
def test_an_accepted_key_trains_saves_exports_and_resumes_as_plain_pytorch(pools, small_data, tmp_path, name):
    compare(pools, tmp_path, replace(CELLS[name], data=small_data))


def compare(pools, place: Path, case: Case) -> tuple[float, ...]:
    """Return the differences from plain PyTorch, after checking them against the tolerances."""
    want = reference(case.data, case.model != LLAMA)
    got, path = pools(2).run(on_device, case.precision == "fp16", prove, case, str(place / "run"))[0]
    export_hf(Path(path), place / "hf", "fp32", check="none")
    exported = dict(AutoModelForCausalLM.from_pretrained(place / "hf", dtype=torch.float32).named_parameters())
    loss = max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True))
    norm = max(abs(a / b - 1) for a, b in zip(got.norms, want.norms, strict=True))
    moved = off(got.parameters, want.parameters, want.kept[0])
    moved_then = off(exported, want.kept[HALF], want.kept[0])
    most = TOLERANCES["bf16" if "torch_autocast" in case.extra else case.precision]
    found = (loss, norm, moved, moved_then)
    assert all(a < b for a, b in zip(found, (*most, most[2]), strict=True)), found  # and none is a NaN
    return found


def test_every_accepted_key_is_in_a_cell_at_every_stage():
    """Only cells that every run of the tests has count, not the slow ones."""
    proved = set[tuple[str, int]]().union(*(proves(CELLS[name]) for name in FIRST))
    assert not (missing := sorted(needed() - proved)), (
        f"classify it in config/deepspeed/keys.py or set it in a cell: {missing}"
    )


def test_any_two_keys_of_a_stage_meet():
    for count in (4, 10, 35):
        for one, other_one in combinations(columns(count), 2):
            meetings = {(row in one, row in other_one) for row in range(10)}
            assert len(meetings) == 4


def cells_of_forms() -> dict[str, Case]:
    """Half of the keys of a stage, then the other half, in each way of sharing the work beside data parallelism.

    In a pipeline the profilers ended in an assertion of DeepSpeed's, which no cell above could show.
    """
    mixtral = {"model": FAMILIES["mixtral"], "expert": 2}
    stages = {"pipeline": {"stages": 2, "partition": [3, 1]}}
    forms: dict[str, tuple[Tree, dict[str, Any], tuple[int, ...], set[str]]] = {
        "pipeline": (stages, {"pipeline": 2, "partition": (3, 1)}, (0, 1), {"profilers", "timers"}),
        "tensor": (TENSOR, {"tensor": 2}, ds_keys.STAGES, {"two places"}),
        "sequence": ({"sequence_parallel_size": 2}, {"sequence": 2}, ds_keys.STAGES, set()),
        "experts": (EXPERTS, mixtral, ds_keys.STAGES, {"two places", "contiguous", "scatter"}),
    }
    cells = {}
    for name, (tree, form, where, refused) in forms.items():
        for stage in where:
            left_out = {"values of the YAML", *refused}
            trees = [f.tree for each, f in FACTORS.items() if stage in f.stages and each not in left_out]
            for number, some in enumerate((trees[::2], trees[1::2])):
                keys = functools.reduce(merged, some, tree)
                cells[f"ZeRO {stage}, {name}, half {number}"] = case_of(stage, keys, **form)
    return cells


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in cells_of_forms().items()])
def test_keys_in_each_form(pools, small_data, tmp_path, case):
    compare(pools, tmp_path, replace(case, data=small_data))
