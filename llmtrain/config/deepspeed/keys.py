"""Every key that DeepSpeed 0.19 reads: the kind of its value, and what becomes of it at each ZeRO stage.

DeepSpeed ignores an unknown top-level key without a word, and importing it to ask costs seconds; so the table stands
here. A key that is accepted is a key that is proved: `tests/unit/config/test_config_ds_keys.py` holds the names and
defaults against the installed DeepSpeed, `tests/ranks/test_keys.py` trains with each key that is not refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from llmtrain.config import topology

STAGES = (0, 1, 2, 3)
"""Stages of ZeRO."""

_MOST = 2**63 - 1
"""Upper bound of a number whose key has none of its own: counts of elements and bytes are 64-bit integers."""
_LARGEST_SCALE_POWER = 32
"""Largest power of 2 in fp16's loss scale: beyond it a gradient of 2e-5 is no fp16 number any more."""


@dataclass(frozen=True)
class Why:
    """The reason of a refusal, and the way around it."""

    rule: str
    remedy: str


@dataclass(frozen=True)
class Key:
    """A key of the JSON, and what becomes of a value that is not DeepSpeed's default."""

    kind: str
    """bool, int, num (int or float), str, list, dict, any."""
    default: Any = None
    """DeepSpeed's default."""
    _: KW_ONLY
    effect: Literal["proved", "no effect"] = "no effect"
    """Effect of an accepted value on the numbers of a run."""
    same: tuple[Any, ...] = ()
    """Other values that are accepted where the key is refused: they ask for what llmtrain does anyway."""
    refused: Why | None = None
    """Reason why every value but the default and `same` is refused, at every stage; None: `at` decides by stage."""
    at: Mapping[int, Why] = field(default_factory=dict)
    """ZeRO stage -> why every other value is refused there."""
    values: tuple[tuple[Any, Why], ...] = ()
    """Single values that are refused."""
    stages: tuple[int, ...] = STAGES
    """ZeRO stages at which something reads the key."""
    unread: str = ""
    """Reason why nothing reads the key at any stage, as a note for the user; empty: something does."""
    least: float = 0
    """Lower bound of a number."""
    most: float = _MOST
    """Upper bound of a number."""

    def outside(self, value: Any) -> tuple[str, str] | None:
        """Return rule and remedy for a number outside the key's bounds; None: it lies within, or is no number."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or self.kind not in ("int", "num") or self.least <= value <= self.most:
            return None
        below = "must be 0 or greater" if self.least == 0 else f"must be at least {self.least}"
        rule = below if self.most == _MOST and not value > _MOST else f"must be from {self.least} to {self.most}"
        usual = "" if self.default in (None, "auto") else f", or remove it for DeepSpeed's default {self.default}"
        return rule, f"correct the number{usual}"

    def why_not(self, value: Any, stage: int) -> Why | None:
        """Return the reason why this value is refused at a ZeRO stage; None: it is accepted."""
        for refused, why in self.values:
            if _equal(value, refused):
                return why
        if any(_equal(value, fine) for fine in (None, "auto", self.default, *self.same)):
            return None
        return self.refused or self.at.get(stage)

    def state(self, stage: int) -> str:
        """Return the table's verdict on a value other than the default: proved, no effect, or refused."""
        return "refused" if self.refused or stage in self.at else self.effect

    def is_read(self, stage: int) -> bool:
        """Return True if something reads the key at this ZeRO stage."""
        return not self.unread and stage in self.stages


def _equal(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


Section = dict[str, Any]
"""Key -> its `Key`, or the section below it."""


def _proved(kind: str, default: Any = None, **more: Any) -> Key:
    return Key(kind, default, effect="proved", **more)


def _section(keys: Mapping[str, tuple[str, Any]], **more: Any) -> Section:
    """A section whose keys have one verdict."""
    return {name: Key(kind, default, **more) for name, (kind, default) in keys.items()}


def _mix(*keys: str) -> Why:
    """The reason of the table of mixes that names these keys."""
    rule = next(rule for rule in topology.RULES if rule.keys == keys)
    return Why(rule.reason, rule.remedy)


_ZERO = "zero_optimization"
_OFFLOADED = _mix(f"{_ZERO}.offload_optimizer.device", f"{_ZERO}.stage")
_OFFLOADED_PARAMETERS = _mix(f"{_ZERO}.offload_param.device", f"{_ZERO}.stage")
_QUANTIZED = Why(
    "ZeRO++'s quantized messages have never run here: DeepSpeed compiles CUDA kernels for them as the model is built, "
    "and has none for a CPU",
    "remove it; communication_data_type bf16 halves the bytes of gradients summed in fp32",
)
_SCALED_BEFORE = Why(
    "DeepSpeed scales gradients before their sum at ZeRO 0 and 1 only: its reduce-scatter asserts against it",
    "remove it (the mean is then made of the sum), or use ZeRO 0 or 1",
)
_ZERO_3_ONLY = Why("only ZeRO 3 reads it: it would change nothing", f"set {_ZERO}.stage to 3, or remove it")
_IN_PART = Why("only ZeRO 3 offloads a part of the optimizer", f"set {_ZERO}.stage to 3, or remove ratio")
_OWN_LEAVES = Why(
    "llmtrain makes each block of experts a leaf module itself; with others DeepSpeed 0.19 ended in an error in the "
    "first backward pass",
    "remove it",
)
_LEAVES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
_NVME = Why("offload to NVMe is not built yet", 'use "cpu" or "none"')
_FOR_NVME = "only an offload to NVMe reads it, which is not built yet"
_OWN_CHECKPOINTS = "it is of DeepSpeed's checkpoints, and llmtrain writes its own"
_DEEPCOMPILE = Why(
    "only DeepCompile reads it (compile.deepcompile), which is not built yet",
    "remove it; model.compile_layers in the YAML compiles the layers",
)
_RECOMPUTED = "llmtrain recomputes decoder layers by torch's checkpoint function, which has no such thing"
_NO_RECOMPUTED = Why(_RECOMPUTED, "remove it or set it to false")
_TRACKING = Why(
    "llmtrain does the tracking (metrics.jsonl, W&B, `llmtrain report`): two records would appear",
    "remove the section or set enabled to false; the YAML's `tracking` section decides",
)
_OFF = "the section is off"
_CUTS = Why(
    "what tensor-parallel ranks share is found in the model itself, and DeepSpeed's own cutting is not called",
    "remove it; autotp_size alone decides",
)
_ROUTED = Why(
    "experts are routed as the model's own configuration says; otherwise another function would train in silence",
    "remove it, or change the model's configuration",
)
_NAMED = Why(
    "the parts of a block of experts are those that DeepSpeed's preset of the family names; no other is proved",
    "remove it; preset_model names another preset",
)
_EXPERTS_ON_CUDA = Why(
    "it needs CUDA kernels that have never run here",
    "remove it: tokens travel by torch's collectives, and each expert multiplies by torch",
)

_OFFLOAD_PARAM: Section = {
    "device": _proved("str", "none", values=(("nvme", _NVME),), at=dict.fromkeys((0, 1, 2), _OFFLOADED_PARAMETERS)),
    "nvme_path": Key("str", None, unread=_FOR_NVME),
    "buffer_count": Key("int", 5, unread=_FOR_NVME),
    "buffer_size": Key("int", 100_000_000, unread=_FOR_NVME),
    "max_in_cpu": Key("int", 1_000_000_000, unread=_FOR_NVME),
    "pin_memory": Key("bool", True, stages=(3,)),
}
_OFFLOAD_OPTIMIZER: Section = {
    "device": _proved("str", "none", values=(("nvme", _NVME),), at={0: _OFFLOADED}),
    "nvme_path": Key("str", None, unread=_FOR_NVME),
    "buffer_count": Key("int", 4, unread=_FOR_NVME),
    "pin_memory": Key("bool", True, stages=(1, 2, 3)),
    "pipeline_read": Key("bool", False, unread=_FOR_NVME),
    "pipeline_write": Key("bool", False, unread=_FOR_NVME),
    "fast_init": Key("bool", False, unread=_FOR_NVME),
    "ratio": Key("num", 1.0, at=dict.fromkeys((0, 1, 2), _IN_PART), stages=(3,), most=1),
    "super_offload": Key(
        "bool",
        False,
        refused=Why(
            "SuperOffload brings its own optimizer and is not built yet",
            "remove super_offload; plain CPU offload works",
        ),
    ),
    "cpuadam_cores_perc": Key("num", 0.8, unread="only SuperOffload reads it, which is not built yet", most=1),
}

_ZERO_KEYS: Section = {
    "stage": _proved("int", 0, most=3),
    "contiguous_gradients": Key("bool", True, stages=(1, 2, 3)),
    "reduce_scatter": Key("bool", True, stages=(1, 2, 3)),
    "reduce_bucket_size": Key("int", 500_000_000, stages=(1, 2, 3), least=1),
    "use_multi_rank_bucket_allreduce": Key("bool", True, stages=(1, 2)),
    "allgather_partitions": Key("bool", True, unread="DeepSpeed 0.19 does not read it"),
    "allgather_bucket_size": Key("int", 500_000_000, stages=(1, 2), least=2),
    "overlap_comm": Key("bool", None, stages=(1, 2, 3)),
    "compute_grad_norm": Key(
        "bool",
        True,
        refused=Why(
            "the norm of each step's gradient clips it, tells one that is not finite, and is logged", "remove it"
        ),
    ),
    "load_from_fp32_weights": Key(
        "bool",
        True,
        refused=Why("checkpoints hold fp32 masters, and llmtrain goes on from those", "remove it"),
    ),
    "elastic_checkpoint": Key("bool", False, unread=_OWN_CHECKPOINTS),
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zenflow": Key(
        "dict",
        None,
        refused=Why("ZenFlow brings its own optimizer and is not built yet", "remove the section"),
    ),
    "sub_group_size": Key("int", 1_000_000_000, stages=(3,)),
    "cpu_offload_param": _proved("bool", None, same=(False,), at=dict.fromkeys((0, 1, 2), _OFFLOADED_PARAMETERS)),
    "cpu_offload_use_pin_memory": Key("bool", None, unread="DeepSpeed 0.19 does not read it: pin_memory says it"),
    "cpu_offload": _proved("bool", None, same=(False,), at={0: _OFFLOADED}),
    "stage3_prefetch_bucket_size": Key("int", 50_000_000, stages=(3,)),
    "stage3_param_persistence_threshold": Key("int", 100_000, stages=(3,)),
    "stage3_model_persistence_threshold": Key("int", 2**63 - 1, stages=(3,)),
    "stage3_max_live_parameters": Key("int", 1_000_000_000, stages=(3,)),
    "stage3_max_reuse_distance": Key("int", 1_000_000_000, stages=(3,)),
    "stage3_gather_16bit_weights_on_model_save": Key("bool", False, unread=_OWN_CHECKPOINTS),
    "stage3_module_granularity_threshold": Key("int", 0, refused=_OWN_LEAVES),
    "stage3_use_all_reduce_for_fetch_params": Key("bool", False, stages=(3,)),
    "stage3_allgather_sequential": Key("bool", False, stages=(3,)),
    "stage3_gather_fp16_weights_on_model_save": Key("bool", False, unread=_OWN_CHECKPOINTS),
    "ignore_unused_parameters": Key(
        "bool",
        True,
        refused=Why(
            "DeepSpeed would end the run within a backward pass in which a parameter has no gradient, as an expert "
            "without tokens",
            "remove it",
        ),
    ),
    "legacy_stage1": Key("bool", False, refused=Why("the old ZeRO 1 has other internals", "remove it")),
    "round_robin_gradients": Key("bool", False, stages=(1, 2)),
    "parameter_alignment": Key("bool", False, stages=(1, 2)),
    "zero_hpz_partition_size": Key("int", 1, same=(0,), at=dict.fromkeys((0, 1, 2), _ZERO_3_ONLY), stages=(3,)),
    "zero_quantized_weights": Key("bool", False, refused=_QUANTIZED),
    "zero_quantized_nontrainable_weights": Key("bool", False, refused=_QUANTIZED),
    "zero_quantized_gradients": Key("bool", False, refused=_QUANTIZED),
    "memory_efficient_linear": Key("bool", True, stages=(3,)),
    "pipeline_loading_checkpoint": Key("bool", False, unread=_OWN_CHECKPOINTS),
    "override_module_apply": Key("bool", True, stages=(3,)),
    "log_trace_cache_warnings": Key("bool", False, stages=(3,)),
    "enable_sanity_checks": Key("bool", False, stages=(3,)),
    "save_muon_momentum_buffer_in_memory": Key(
        "bool",
        False,
        refused=Why("without an offload to NVMe, Muon's momentum is in memory anyway", "remove it"),
    ),
    "leaf_module": {
        "classes": Key("list", _LEAVES, refused=_OWN_LEAVES),
        "names": Key("list", [], refused=_OWN_LEAVES),
        "name_suffixes": Key("list", [], refused=_OWN_LEAVES),
    },
}

_BF16: Section = {
    "enabled": _proved("bool", False),
    "immediate_grad_update": Key(
        "bool",
        False,
        refused=Why("only DeepSpeed's BF16_Optimizer reads it, whose work ZeRO 1 does here", "remove it"),
    ),
    "check_grad_overflow": Key(
        "bool",
        True,
        refused=Why("a step whose gradient is not finite would be taken, and ruin the weights", "remove it"),
    ),
    "bf16_master_weights_and_grads": Key(
        "bool",
        False,
        refused=Why(
            "master weights are fp32: in bf16 they lose every update of less than 2^-9 of a weight",
            "remove it; bf16_optimizer_states works without it here",
        ),
    ),
    "bf16_optimizer_states": _proved("bool", False),
}

_PIPELINE_OF_DEEPSPEED = Why("llmtrain makes the stages itself, and DeepSpeed's own are not called", "remove it")

_TENSOR_PARALLEL: Section = {
    "dtype": Key("any", None, refused=_CUTS),
    "autotp_size": _proved("int", 0),
    "tp_overlap_comm": Key("bool", False, refused=_CUTS),
    "vocab_parallel_lm_head": Key("bool", None, same=(False,), refused=_CUTS),
    "vocab_parallel_ce_backend": Key("str", "torch", refused=_CUTS),
    "tp": {
        "tp_size": Key("int", 1, refused=_CUTS),
        "tp_grain_size": Key("int", 1, refused=_CUTS),
        "mpu": Key("any", None, refused=_CUTS),
        "tp_group": Key("any", None, refused=_CUTS),
    },
    "injection_policy_tuple": Key("list", None, refused=_CUTS),
    "partition_config": Key("dict", None, refused=_CUTS),
    "preset_model": Key("str", None, refused=_CUTS),
    "keep_module_on_host": Key("bool", False, refused=_CUTS),
    "kernel_inject": Key("bool", False, refused=_CUTS),
}

_EXPERT_PARALLEL: Section = {
    "enabled": _proved("bool", False),
    "autoep_size": _proved("int", 1, least=1),
    "expert_tensor_parallel_size": Key(
        "int", 1, refused=Why("the ranks share whole experts: within one, no matrix is cut", "remove it")
    ),
    "validate_folding_routing": Key(
        "bool",
        False,
        refused=Why(
            "it checks experts under DeepSpeed's own tensor parallelism, which do not go together", "remove it"
        ),
    ),
    "async_split_plan": Key("bool", False, refused=_EXPERTS_ON_CUDA),
    "preset_model": _proved("str", None),
    "moe_layer_pattern": Key("str", None, refused=_NAMED),
    "expert_pattern": Key("str", None, refused=_NAMED),
    "router_pattern": Key("str", None, refused=_NAMED),
    "use_grouped_mm": Key("bool", True),
    "disable_triton_grouped_mm": Key("bool", False),
    "route_norm": Key("bool", None, refused=_ROUTED),
    "route_scale": Key("num", 1.0, refused=_ROUTED),
    "score_apply": Key("str", "auto", refused=_ROUTED),
    "combine_impl": Key("str", "auto", values=(("fused_weighted_sum", _EXPERTS_ON_CUDA),)),
    "row_weighting_impl": Key("str", "auto", same=("eager",), refused=_EXPERTS_ON_CUDA),
    "gate_up_impl": Key("str", "separate", refused=_EXPERTS_ON_CUDA),
    "comm_backend": Key("str", "comm", refused=_EXPERTS_ON_CUDA),
    "comm_num_sm": Key("int", 12, refused=_EXPERTS_ON_CUDA),
    "comm_qp_margin": Key("int", 4, refused=_EXPERTS_ON_CUDA),
    "comm_max_tokens_per_rank": Key("int", 0, refused=_EXPERTS_ON_CUDA),
    "num_expert_groups": Key("int", None, refused=_ROUTED),
    "num_limited_groups": Key("int", None, refused=_ROUTED),
    "score_func": Key("str", "auto", refused=_ROUTED),
    "top_k": Key("any", "auto", refused=_ROUTED),
    "load_balance_coeff": Key(
        "num", None, refused=Why("the model's own router_aux_loss_coef balances its experts", "remove it")
    ),
    "routed_scaling_factor": Key("any", "auto", refused=_ROUTED),
    "expert_w1": Key("str", None, refused=_NAMED),
    "expert_w2": Key("str", None, refused=_NAMED),
    "expert_w3": Key("str", None, refused=_NAMED),
    "num_experts_attr": Key("str", None, refused=_NAMED),
    "top_k_attr": Key("str", None, refused=_NAMED),
    "has_shared_experts": Key("bool", None, refused=_NAMED),
    "shared_experts_pattern": Key("str", None, refused=_NAMED),
    "shared_experts_gate_pattern": Key("str", None, refused=_NAMED),
    "expert_activation": Key("str", None, refused=_NAMED),
}

_AUTOTUNING: Section = {
    "enabled": Key("bool", False, refused=Why("DeepSpeed's autotuner starts runs of its own", "remove the section")),
    **_section(
        {
            "fast": ("bool", True),
            "results_dir": ("str", "autotuning_results"),
            "exps_dir": ("str", "autotuning_exps"),
            "overwrite": ("bool", True),
            "start_profile_step": ("int", 3),
            "end_profile_step": ("int", 5),
            "metric": ("str", "throughput"),
            "metric_path": ("str", None),
            "tuner_type": ("str", "gridsearch"),
            "tuner_early_stopping": ("int", 5),
            "tuner_num_trials": ("int", 50),
            "arg_mappings": ("dict", None),
            "model_info": ("dict", None),
            "model_info_path": ("str", None),
            "mp_size": ("int", 1),
            "max_train_batch_size": ("int", None),
            "min_train_batch_size": ("int", 1),
            "max_train_micro_batch_size_per_gpu": ("int", 1024),
            "min_train_micro_batch_size_per_gpu": ("int", 1),
            "num_tuning_micro_batch_sizes": ("int", 3),
        },
        unread=_OFF,
    ),
}

_MONITOR: Section = {
    "enabled": Key("bool", False, refused=_TRACKING),
    "output_path": Key("str", "", unread=_OFF),
    "job_name": Key("str", "DeepSpeedJobName", unread=_OFF),
}

KEYS: Section = {
    "train_batch_size": _proved("int", least=1),
    "train_micro_batch_size_per_gpu": _proved("int", least=1),
    "gradient_accumulation_steps": _proved("int", least=1),
    "gradient_clipping": _proved("num", 1.0),
    "optimizer": {
        "type": _proved("str"),
        "params": _proved("dict"),
        "legacy_fusion": Key(
            "bool", False, refused=Why("llmtrain builds the optimizer, not DeepSpeed's FusedAdam", "remove it")
        ),
    },
    "scheduler": {"type": _proved("str"), "params": _proved("dict")},
    "zero_optimization": _ZERO_KEYS,
    "fp16": {
        "enabled": _proved("bool", False),
        "auto_cast": Key("bool", False, unread="the inputs of a language model are whole numbers, which are not cast"),
        "loss_scale": _proved("num", 0, most=2**_LARGEST_SCALE_POWER),
        "initial_scale_power": _proved("int", 16, most=_LARGEST_SCALE_POWER),
        "loss_scale_window": _proved("int", 1000, least=1),
        "hysteresis": _proved("int", 2, least=1),
        "consecutive_hysteresis": _proved("bool", False),
        "min_loss_scale": _proved("int", 1, least=1, most=2**_LARGEST_SCALE_POWER),
        "fp16_master_weights_and_grads": Key(
            "bool",
            False,
            refused=Why("checkpoints and exact resume need fp32 master weights", "remove it"),
        ),
    },
    "bf16": _BF16,
    "bfloat16": _BF16,
    "torch_autocast": {
        "enabled": Key("bool", False, refused=Why("torch autocast is not built yet", "use the bf16 or fp16 section")),
        "dtype": Key("str", None, unread=_OFF),
        "lower_precision_safe_modules": Key("list", None, unread=_OFF),
    },
    "data_types": {
        "grad_accum_dtype": _proved("str"),
        "param_dtype": Key("str"),
        "buffer_dtype": Key(
            "str",
            None,
            same=("fp32", "float32", "float", "torch.float32"),
            refused=Why("rotary frequencies and the like stay fp32: rounded, they move far positions", "remove it"),
        ),
        "keep_in_fp32_modules": Key("any", "auto"),
    },
    "activation_checkpointing": {
        "partition_activations": Key(
            "bool",
            False,
            refused=Why(
                _RECOMPUTED,
                "remove it or set it to false; cpu_checkpointing lets the layers' inputs wait on the host, and "
                "sequence_parallel_size shares them",
            ),
        ),
        "number_checkpoints": Key(
            "int",
            None,
            refused=Why(
                "it sizes a buffer of DeepSpeed's own recomputation, and llmtrain's is torch's checkpoint function",
                "remove it; model.recompute.layers in the YAML tells how many layers are recomputed",
            ),
        ),
        "contiguous_memory_optimization": Key("bool", False, refused=_NO_RECOMPUTED),
        "cpu_checkpointing": Key("bool", False),
        "profile": Key(
            "bool",
            False,
            refused=Why(_RECOMPUTED, "remove it or set it to false; profile.steps in the YAML tells a step's time"),
        ),
        "synchronize_checkpoint_boundary": Key("bool", False, refused=_NO_RECOMPUTED),
    },
    "pipeline": {
        "stages": _proved(
            "int",
            "auto",
            same=(1,),
            at=dict.fromkeys((2, 3), _mix("pipeline.stages", "zero_optimization.stage")),
            least=1,
        ),
        "partition": _proved(
            "any", "best", at=dict.fromkeys((2, 3), _mix("pipeline.stages", "zero_optimization.stage"))
        ),
        "seed_layers": Key("bool", False, refused=_PIPELINE_OF_DEEPSPEED),
        "activation_checkpoint_interval": Key(
            "int",
            0,
            refused=Why(
                "activation checkpointing is asked for in one place, and by decoder layers",
                'remove it, and write "activation_checkpointing": {} at the top of the file, or model.recompute.layers '
                "in the YAML: so many layers of each stage",
            ),
        ),
        "pipe_partitioned": Key("bool", True, unread="every tensor-parallel rank sends the whole hidden state"),
        "grad_partitioned": Key("bool", True, unread="every tensor-parallel rank sends the whole hidden state"),
        "use_reentrant": Key("bool", True, refused=_PIPELINE_OF_DEEPSPEED),
    },
    "tensor_parallel": _TENSOR_PARALLEL,
    "expert_parallel": _EXPERT_PARALLEL,
    "sequence_parallel_size": _proved("int", 1, least=1),
    "data_parallel_size": _proved("int", None, least=1),
    "compile": {
        "deepcompile": Key(
            "bool", False, refused=Why("DeepCompile is not built yet", "set model.compile_layers in the YAML instead")
        ),
        **_section(
            {
                "autoep_non_moe": ("bool", False),
                "free_activation": ("bool", False),
                "free_activation_threshold": ("int", 10 * 1024 * 1024),
                "offload_activation": ("bool", False),
                "offload_activation_pin_memory": ("bool", True),
                "offload_opt_states": ("bool", False),
                "double_buffer": ("bool", True),
                "symmetric_memory": ("bool", False),
                "debug_log": ("bool", False),
                "offload_parameters": ("bool", False),
                "sync_before_reduce": ("bool", False),
                "sync_after_reduce": ("bool", False),
                "sync_before_allgather": ("bool", False),
                "sync_after_allgather": ("bool", False),
                "keep_int_input_tensors": ("bool", True),
                "keep_all_input_tensors": ("bool", False),
                "passes": ("list", None),
            },
            refused=_DEEPCOMPILE,
        ),
    },
    "aio": _section(
        {
            "block_size": ("int", 1048576),
            "queue_depth": ("int", 8),
            "intra_op_parallelism": ("int", 1),
            "single_submit": ("bool", False),
            "overlap_events": ("bool", True),
        },
        unread=_FOR_NVME,
    )
    | {"use_gds": Key("bool", False, refused=_NVME)},
    "comms_logger": _section(
        {
            "enabled": ("bool", False),
            "prof_all": ("bool", True),
            "prof_ops": ("list", []),
            "verbose": ("bool", False),
            "debug": ("bool", False),
        }
    ),
    "flops_profiler": _section(
        {
            "enabled": ("bool", False),
            "recompute_fwd_factor": ("num", 0.0),
            "detailed": ("bool", True),
            "output_file": ("str", None),
        }
    )
    | {
        "profile_step": Key("int", 1, least=1),
        "module_depth": Key("int", -1, least=-1),
        "top_modules": Key("int", 1, least=1),
    },
    "timers": {
        "throughput": _section(
            {"enabled": ("bool", True), "synchronized": ("bool", True)},
            unread="llmtrain measures and logs tokens per second itself",
        )
    },
    "checkpoint": _section(
        {
            "tag_validation": ("str", "WARN"),
            "load_universal": ("bool", False),
            "use_node_local_storage": ("bool", False),
            "checkpoint_serialization": ("bool", True),
        },
        unread=_OWN_CHECKPOINTS,
    )
    | {
        "parallel_write": _section({"pipeline_stage": ("bool", False)}, unread=_OWN_CHECKPOINTS),
        "writer": _section(
            {
                "type": ("str", "FAST"),
                "io_buffer_size": ("int", 1024 * 1024 * 1024),
                "io_buffer_double": ("bool", True),
                "io_multiplier": ("int", 1),
                "show_statistics": ("bool", False),
                "data_parallel": ("str", None),
                "decoupled": ("bool", False),
            },
            unread=_OWN_CHECKPOINTS,
        ),
    },
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": {
        "enabled": Key("bool", False, refused=_TRACKING),
        **_section({"group": ("str", None), "team": ("str", None), "project": ("str", "deepspeed")}, unread=_OFF),
    },
    "comet": {
        "enabled": Key("bool", False, refused=_TRACKING),
        **_section(
            {
                "samples_log_interval": ("int", 100),
                "project": ("str", None),
                "workspace": ("str", None),
                "api_key": ("str", None),
                "experiment_name": ("str", None),
                "experiment_key": ("str", None),
                "online": ("bool", None),
                "mode": ("str", None),
            },
            unread=_OFF,
        ),
    },
    "hybrid_engine": {
        "enabled": Key(
            "bool", False, refused=Why("it is made for RLHF, not for this training loop", "remove the section")
        ),
        **_section(
            {
                "release_inference_cache": ("bool", False),
                "pin_parameters": ("bool", True),
                "enable_cuda_graph": ("bool", False),
            },
            unread=_OFF,
        ),
        **_section(
            {
                "max_out_tokens": ("int", 512),
                "inference_tp_size": ("int", 1),
                "tp_gather_partition_size": ("int", 8),
            },
            unread=_OFF,
            least=1,
        ),
    },
    "weight_quantization": {
        name: Key(kind, default, same=same, refused=Why("it is made for inference", "remove the section"))
        for name, kind, default, same in (
            ("enabled", "bool", False, ()),
            ("num_bits", "int", 8, ()),
            ("q_type", "str", "symmetric", ()),
            ("q_groups", "int", 1, ()),
            ("quantized_initialization", "dict", {}, ()),
            ("post_init_quant", "dict", {}, ()),
        )
    },
    "autotuning": _AUTOTUNING,
    "data_efficiency": {
        "enabled": Key(
            "bool",
            False,
            refused=Why(
                "llmtrain decides which sequences a step sees", "remove the section; see data.mixture and data.stages"
            ),
        ),
        **_section(
            {"seed": ("int", 1234), "data_sampling": ("dict", None), "data_routing": ("dict", None)}, unread=_OFF
        ),
    },
    "datastates_ckpt": Key("dict", None, refused=Why("llmtrain writes its own checkpoints", "remove the section")),
    "managed_gradient_accumulation": Key(
        "bool",
        True,
        refused=Why("llmtrain's step relies on DeepSpeed's accumulation boundary", "remove it"),
    ),
    "communication_data_type": _proved("str"),
    "seq_parallel_communication_data_type": _proved("str", "fp32"),
    "prescale_gradients": Key("bool", False, at=dict.fromkeys((2, 3), _SCALED_BEFORE), stages=(0, 1)),
    # It keeps the sum over ranks within fp16's range, 6e-8 to 65,504, whose root is about 1e6 of its smallest number: a
    # factor beyond that turns gradients of 0.06 into 0 or those of 0.07 into infinity, on any number of ranks.
    "gradient_predivide_factor": Key(
        "num", 1.0, at=dict.fromkeys((2, 3), _SCALED_BEFORE), stages=(0, 1), least=1e-6, most=10**6
    ),
    "gradient_allreduce_op": Key(
        "str",
        "mean",
        refused=Why(
            "the loss is the mean over the global batch on any number of ranks; a sum would scale with them",
            'remove it or write "mean"',
        ),
    ),
    "disable_allgather": Key("bool", False, unread="DeepSpeed 0.19 does not read it"),
    "disable_python_gc": Key("bool", False),
    "dump_state": Key("bool", False),
    "dataloader_drop_last": Key(
        "bool",
        False,
        refused=Why(
            "llmtrain loads the data, and its batches go on over the end of an epoch: none is short", "remove it"
        ),
    ),
    "log_level": Key("str", None),
    "memory_breakdown": Key("bool", False),
    "wall_clock_breakdown": Key("bool", False),
    "steps_per_print": Key("int"),
    "use_data_before_expert_parallelism": Key(
        "bool", False, refused=Why("the experts of a layer are shared by neighbouring ranks", "remove it")
    ),
    "vocabulary_size": Key("int", None, unread="DeepSpeed warns of sizes by it, and no more"),
    "zero_allow_untested_optimizer": Key("bool", False),
    "zero_force_ds_cpu_optimizer": Key("bool", True),
}


def leaves(section: Section | None = None, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """(dotted name, key) of every key of a section; of all of them."""
    for name, entry in (KEYS if section is None else section).items():
        if isinstance(entry, Key):
            yield f"{prefix}{name}", entry
        else:
            yield from leaves(entry, f"{prefix}{name}.")


ALIASES: dict[str, str] = {
    **{
        f"zero_optimization.{name}": f"stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
    "tensor_parallel.tensor_parallel": "tp",
    "tensor_parallel.replace_with_kernel_inject": "kernel_inject",
}
"""Second names that DeepSpeed's models take too (pydantic's populate_by_name) -> the key of KEYS in that section."""

IGNORED = frozenset({"monitor_config"})
"""Top-level keys that public files hold and DeepSpeed never reads."""

UNKNOWN_REMEDIES: dict[str, str] = {
    "compile.enabled": "remove it, and set model.compile_layers: true in the YAML to compile",
    "compile.disable": "remove it, and set model.compile_layers: true in the YAML to compile",
    "compile.backend": "remove it, and set model.compile_layers: true in the YAML to compile",
    "compile.kwargs": "remove it, and set model.compile_layers: true in the YAML to compile",
}
"""Keys of older versions of DeepSpeed for which llmtrain has one of its own -> what to do instead."""

# Keys whose "auto" DeepSpeed itself understands; every other "auto" is ours to resolve.
AUTO_MEANS_SOMETHING = frozenset({"data_types.keep_in_fp32_modules"})

REMOVED: dict[str, str] = {
    "nebula": "remove it: llmtrain writes its own crash-safe checkpoints",
    "compression_training": "remove it: DeepSpeed would train without it and say nothing",
    "amp": "use the bf16 or fp16 section",
    "quantize_training": "remove it",
    "sparse_gradients": "remove it: sparse=True embeddings need no key",
    "eigenvalue": "remove it",
    "sparse_attention": "remove it and choose model.attention in the YAML",
    "elasticity": "remove it and give the batch size; llmtrain resumes on any number of ranks",
    "graph_harvesting": "remove it",
    "curriculum_learning": "remove it: llmtrain orders the data (data.mixture, data.stages)",
    "progressive_layer_drop": "remove it",
    "zero_optimization.mics_shard_size": "remove it, or use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "remove it, or use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "remove it",
}
"""Keys that DeepSpeed 0.19 removed -> what to do instead."""

WAS_OFF: dict[str, Any] = {"zero_optimization.mics_shard_size": -1}
"""Removed keys that were off by a value other than null and false -> that value."""


def markdown() -> str:
    """The table of docs/deepspeed.md: every key at every ZeRO stage, and below it why some are refused."""
    lines = ["| key | DeepSpeed's default | ZeRO 0 | 1 | 2 | 3 |", "|---|---|---|---|---|---|"]
    notes: list[Why] = []

    def number(why: Why) -> str:
        if why not in notes:
            notes.append(why)
        return f"({notes.index(why) + 1})"

    for dotted, key in leaves():
        cells = []
        for stage in STAGES:
            why = key.refused or key.at.get(stage)
            cells.append(f"refused {number(why)}" if why else key.effect)
        single = [f"`{json.dumps(value)}` refused {number(why)}" for value, why in key.values]
        name = ", ".join([f"`{dotted}`", *single])
        default = "" if key.default is None else f"`{json.dumps(key.default)}`"
        lines.append(f"| {name} | {default} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. {why.rule}. Remedy: {why.remedy}." for number, why in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"
