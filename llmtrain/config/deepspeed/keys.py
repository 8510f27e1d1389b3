"""Every key that DeepSpeed 0.19 reads: the kind of its value, and the effect of the key at each ZeRO stage.

DeepSpeed ignores an unknown top-level key without a word, and importing it to ask costs seconds: hence this table. A
key that is accepted is a key that is proved: `tests/unit/config/test_config_ds_keys.py` holds names and defaults
against the installed DeepSpeed, `tests/ranks/test_keys.py` trains with each key that is not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

from llmtrain.base.trees import leaves
from llmtrain.config import topology

STAGES = (0, 1, 2, 3)
"""Stages of ZeRO."""

_MOST = 2**63 - 1
"""Default upper bound of a number: counts of elements and bytes are 64-bit integers."""
_LARGEST_SCALE_POWER = 32
"""Largest power of 2 in fp16's loss scale: beyond it a gradient of 2e-5 is no fp16 number any more."""


class Why(NamedTuple):
    """Why a value is refused, and what to do instead."""

    rule: str
    remedy: str


@dataclass(frozen=True)
class Key:
    """A key of the JSON: the values it may have, and what a value other than DeepSpeed's default does."""

    kind: str
    """bool, int, num (int or float), str, list, dict, any."""
    default: Any = None
    """DeepSpeed's default."""
    _: KW_ONLY
    effect: Literal["proved", "no effect"] = "no effect"
    """Effect of an accepted value on the numbers of a run."""
    same: tuple[Any, ...] = ()
    """Values that are accepted even if the key is refused, because they ask for what llmtrain does anyway."""
    at: Mapping[int, Why] = field(default_factory=dict)
    """ZeRO stage -> why it refuses every value but the default and `same`."""
    values: tuple[tuple[Any, Why], ...] = ()
    """Single values that are refused."""
    stages: tuple[int, ...] = STAGES
    """ZeRO stages at which something reads the key."""
    unread: str = ""
    """Note for the user on why nothing reads the key at any ZeRO stage; empty: something reads it."""
    least: float = 0
    """Lower bound of a number."""
    most: float = _MOST
    """Upper bound of a number."""
    multiple_of: int = 0
    """Divisor of a number; 0: any."""
    one_of: tuple[str, ...] = ()
    """Words that a text may be; empty: any."""

    def outside(self, value: Any) -> tuple[str, str] | None:
        """Return rule and remedy for a value outside the key's bounds."""
        if self.one_of and value not in (*self.one_of, *(refused for refused, _ in self.values)):
            return f"must be {' or '.join(self.one_of)}", f'write "{self.one_of[0]}"'
        if self.kind not in ("int", "num"):
            return None
        if self.least <= value <= self.most:
            if rest := self.multiple_of and value % self.multiple_of:
                return f"must be a multiple of {self.multiple_of}", f"write {int(value - rest + self.multiple_of)}"
            return None
        below = "must be 0 or greater" if self.least == 0 else f"must be at least {self.least}"
        rule = below if self.most == _MOST and not value > _MOST else f"must be from {self.least} to {self.most}"
        usual = "" if self.default in (None, "auto") else f", or remove it for DeepSpeed's default {self.default}"
        return rule, f"correct the number{usual}"

    def why_not(self, value: Any, stage: int) -> Why | None:
        for refused, why in self.values:
            if _equal(value, refused):
                return why
        if any(_equal(value, fine) for fine in (None, "auto", self.default, *self.same)):
            return None
        return self.at.get(stage)

    def is_read(self, stage: int) -> bool:
        return not self.unread and stage in self.stages


def _equal(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


Section = dict[str, Any]
"""Name -> a `Key`, or a section with further names."""
_KINDS = {bool: "bool", int: "int", float: "num", str: "str", list: "list", dict: "dict", object: "any"}


def _everywhere(why: Why) -> dict[int, Why]:
    return dict.fromkeys(STAGES, why)


def _key(default: Any, **more: Any) -> Key:
    """Make a key from DeepSpeed's default, whose type is the key's, or from a type if DeepSpeed has no default."""
    return Key(_KINDS[default], **more) if isinstance(default, type) else Key(_KINDS[type(default)], default, **more)


def _proved(default: Any, **more: Any) -> Key:
    return _key(default, effect="proved", **more)


def _no(default: Any, rule: str, remedy: str = "remove it", **more: Any) -> Key:
    """Make a key for which every ZeRO stage accepts only the default."""
    return _key(default, at=_everywhere(Why(rule, remedy)), **more)


def _all(defaults: Section, **verdict: Any) -> Section:
    return {name: _key(default, **verdict) for name, default in defaults.items()}


def _mix(*keys: str) -> Why:
    """Return the reason of the rule in topology.RULES that names these keys."""
    rule = next(rule for rule in topology.RULES if rule.keys == keys)
    return Why(str(rule.reason), str(rule.remedy))


_DEVICES = ("cpu", "none")
_NVME = Why("only ZeRO 3 can keep weights and the optimizer's state on a disk", 'use "cpu" or "none"')
_FOR_NVME = "only an offload to NVMe reads it"
_FOR_SWAP_FILES = "only an offload of the optimizer to NVMe reads it"
_OWN_FILES = "llmtrain itself reads and writes the files of an offload to NVMe"
_OF_SWAPPER = "the files of an offload to NVMe are mapped into memory, and the kernel keeps of them what has room"
_DEEPSPEED_READS_IT_NOT = "DeepSpeed 0.19 does not read it"
_OWN_CHECKPOINTS = "it is for DeepSpeed's checkpoints, and llmtrain writes its own format"
_OFF = "the section is off"
_OFFLOADED = {0: _mix("zero_optimization.offload_optimizer.device", "zero_optimization.stage")}
_PARAMETERS_OFFLOADED = dict.fromkeys(
    (0, 1, 2), _mix("zero_optimization.offload_param.device", "zero_optimization.stage")
)
_LEAVES = (
    "llmtrain itself makes each block of experts a leaf module; with other leaf modules DeepSpeed 0.19 ended in an "
    "error in the first backward pass"
)
_BELOW_ZERO_3 = "only ZeRO 3 reads it: it would change nothing"


def _quantized(what: str, remedy: str) -> dict[int, Why]:
    """Return the refusals of a ZeRO++ key by ZeRO stage. `what`: what DeepSpeed's quantizer does wrong, and where."""
    rule = f"{what} with its CUDA op `quantizer`, and llmtrain has no definition of that rounding to prove a loss by"
    return {**dict.fromkeys((0, 1, 2), Why(_BELOW_ZERO_3, "remove it")), 3: Why(rule, remedy)}


_ZERO: Section = {
    "stage": _proved(0, most=3),
    **_all({"contiguous_gradients": True, "reduce_scatter": True, "overlap_comm": bool}, stages=(1, 2, 3)),
    "reduce_bucket_size": _key(500_000_000, stages=(1, 2, 3), least=1),
    **_all({"use_multi_rank_bucket_allreduce": True, "round_robin_gradients": False, "parameter_alignment": False},
           stages=(1, 2)),
    "allgather_bucket_size": _key(500_000_000, stages=(1, 2), least=2, multiple_of=2),  # messages begin at 4 bytes
    **_all({
        "sub_group_size": 1_000_000_000, "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000, "stage3_model_persistence_threshold": 2**63 - 1,
        "stage3_max_live_parameters": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000,
        "stage3_use_all_reduce_for_fetch_params": False, "stage3_allgather_sequential": False,
        "memory_efficient_linear": True, "override_module_apply": True, "log_trace_cache_warnings": False,
        "enable_sanity_checks": False,
    }, stages=(3,)),
    "zero_hpz_partition_size": _key(1, same=(0,), stages=(3,), at=dict.fromkeys((0, 1, 2), Why(
        _BELOW_ZERO_3, "set zero_optimization.stage to 3, or remove it"))),
    "offload_param": {
        "device": _proved("none", one_of=_DEVICES, values=(("nvme", _NVME),), at=_PARAMETERS_OFFLOADED),
        "pin_memory": _key(True, stages=(3,)),
        "nvme_path": _key(str, unread=_FOR_NVME),
        **_all({"buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000}, unread=_OF_SWAPPER),
    },
    "offload_optimizer": {
        "device": _proved("none", one_of=_DEVICES, values=(("nvme", _NVME),), at=_OFFLOADED),
        "pin_memory": _key(True, stages=(1, 2, 3)),
        "ratio": _key(1.0, most=1, stages=(3,), at=dict.fromkeys((0, 1, 2), Why(
            "only ZeRO 3 offloads a part of the optimizer", "set zero_optimization.stage to 3, or remove ratio"))),
        "super_offload": _no(
            False, "SuperOffload, for NVIDIA GPUs alone, keeps Adam's moments in a process of its own, which never "
                   "hands them out (runtime/superoffload/superoffload_utils.py): no checkpoint could hold them",
            'remove super_offload; "device": "cpu" without it works'),
        "cpuadam_cores_perc": _key(0.8, most=1, unread="only SuperOffload reads it (super_offload)"),
        **_all({"nvme_path": str, "buffer_count": 4, "pipeline_read": False, "pipeline_write": False},
               unread=_FOR_SWAP_FILES),
        "fast_init": _key(False, unread=_OWN_FILES),
    },
    "cpu_offload_param": _proved(bool, same=(False,), at=_PARAMETERS_OFFLOADED),
    "cpu_offload_use_pin_memory": _key(bool, unread=f"{_DEEPSPEED_READS_IT_NOT}, but reads pin_memory instead"),
    "cpu_offload": _proved(bool, same=(False,), at=_OFFLOADED),
    "allgather_partitions": _key(True, unread=_DEEPSPEED_READS_IT_NOT),
    **_all({"elastic_checkpoint": False, "stage3_gather_16bit_weights_on_model_save": False,
            "stage3_gather_fp16_weights_on_model_save": False, "pipeline_loading_checkpoint": False},
           unread=_OWN_CHECKPOINTS),
    "compute_grad_norm": _no(True, "llmtrain needs the gradient norm: for clipping, to find values that are not "
                                   "finite, and for the log"),
    "load_from_fp32_weights": _no(True, "checkpoints hold fp32 master weights, and llmtrain resumes from them"),
    "zenflow": _no(
        dict, "ZenFlow updates a share of each matrix's columns every step and the others later, from gradients of "
              "several steps (runtime/zenflow/), and llmtrain has no definition of that to prove a loss by",
        "remove the section; offload_optimizer without it updates all parameters in every step"),
    "ignore_unused_parameters": _no(True, "DeepSpeed would end the run when a parameter has no gradient, as in an "
                                    "expert without tokens"),
    "legacy_stage1": _no(False, "llmtrain cannot work with the internals of DeepSpeed's old ZeRO 1"),
    "zero_quantized_weights": _key(False, at=_quantized(
        "DeepSpeed rounds the weights that ranks gather to 8 bits (runtime/zero/partition_parameters.py)",
        "remove it; with zero_hpz_partition_size, the ranks of a host, the backward pass gathers within each host")),
    "zero_quantized_nontrainable_weights": _key(False, at=_quantized(
        "DeepSpeed rounds frozen weights to 8 bits (runtime/zero/partition_parameters.py)",
        "remove it; ZeRO 3 partitions frozen weights too")),
    "zero_quantized_gradients": _key(False, at=_quantized(
        "DeepSpeed rounds gradients to 4 bits on several hosts (runtime/comm/coalesced_collectives.py)",
        "remove it; communication_data_type bf16 halves the bytes of gradients summed in fp32")),
    "save_muon_momentum_buffer_in_memory": _no(False, "without offload to NVMe, Muon's momentum is in memory anyway"),
    "stage3_module_granularity_threshold": _no(0, _LEAVES),
    "leaf_module": {
        "classes": _no([
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ], _LEAVES),
        "names": _no([], _LEAVES),
        "name_suffixes": _no([], _LEAVES),
    },
}  # fmt: skip

_BF16: Section = {
    "enabled": _proved(False),
    "immediate_grad_update": _no(False, "only DeepSpeed's BF16_Optimizer reads it, and llmtrain uses ZeRO 1 instead"),
    "check_grad_overflow": _no(
        True, "DeepSpeed would also apply gradients that are not finite, which ruins the weights"
    ),
    "bf16_master_weights_and_grads": _no(
        False,
        "master weights are fp32: in bf16 they lose every update of less than 2^-9 of a weight",
        "remove it; bf16_optimizer_states works without it here",
    ),
    "bf16_optimizer_states": _proved(False),
}

DYNAMIC_SCALE = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
"""Keys of the section fp16 that only a dynamic loss scale reads."""

_FP16: Section = {
    "enabled": _proved(False),
    "auto_cast": _key(False, unread="the inputs of a language model are whole numbers, which are not cast"),
    "loss_scale": Key("num", 0, effect="proved", most=2**_LARGEST_SCALE_POWER),
    "initial_scale_power": _proved(16, most=_LARGEST_SCALE_POWER),
    "loss_scale_window": _proved(1000, least=1),
    "hysteresis": _proved(2, least=1),
    "consecutive_hysteresis": _proved(False),
    "min_loss_scale": _proved(1, least=1, most=2**_LARGEST_SCALE_POWER),
    "fp16_master_weights_and_grads": _no(False, "checkpoints and exact resume need fp32 master weights"),
}

_NOT_RECOMPUTED = "torch's checkpoint function, by which llmtrain recomputes decoder layers, has no such option"

_RECOMPUTATION: Section = {
    "partition_activations": _key(
        False, unread=f"{_NOT_RECOMPUTED}; where memory is short, set cpu_checkpointing or sequence_parallel_size"),
    "number_checkpoints": _key(
        int, unread="it is the size of a buffer of DeepSpeed's; model.recompute.layers in the YAML is the number of "
                    "layers that are recomputed"),
    "contiguous_memory_optimization": _key(False, unread=_NOT_RECOMPUTED),
    "cpu_checkpointing": _key(False),
    "profile": _key(False, unread="profile.steps in the YAML measures a step's time"),
    "synchronize_checkpoint_boundary": _key(False, unread=_NOT_RECOMPUTED),
}  # fmt: skip

_STAGES_BELOW_2 = dict.fromkeys((2, 3), _mix("pipeline.stages", "zero_optimization.stage"))
_OWN_STAGES = "llmtrain builds the pipeline stages itself, and does not call DeepSpeed's code for them"

_PIPELINE: Section = {
    "stages": Key("int", "auto", effect="proved", same=(1,), at=_STAGES_BELOW_2, least=1),
    "partition": Key("any", "best", effect="proved", at=_STAGES_BELOW_2),
    "seed_layers": _no(False, _OWN_STAGES),
    "activation_checkpoint_interval": _no(
        0,
        "activation checkpointing is configured in one place, and counts decoder layers",
        'remove it, and write "activation_checkpointing": {} at the top of the file, or model.recompute.layers in the '
        "YAML: that number of layers of each stage",
    ),
    "pipe_partitioned": _key(True, unread="every tensor-parallel rank sends the complete hidden state"),
    "grad_partitioned": _key(True, unread="every tensor-parallel rank sends the complete hidden state"),
    "use_reentrant": _no(True, _OWN_STAGES),
}

_SHARED = "llmtrain itself finds out how tensor-parallel ranks share the model and its vocabulary"
_NOT_IN_JSON = Why("it is an object of a process, which no JSON can hold", "remove it; autotp_size alone decides")

_TENSOR_PARALLEL: Section = {
    "autotp_size": _proved(0),
    "vocab_parallel_lm_head": _key(bool, unread=_SHARED),
    "vocab_parallel_ce_backend": _key(
        "torch", one_of=("torch", "liger"), unread="llmtrain itself computes the loss of a shared vocabulary"),
    "tp": {
        "tp_size": _key(1, least=1),
        "tp_grain_size": _key(1, least=1, unread=_SHARED),
        **_all({"mpu": object, "tp_group": object}, at=_everywhere(_NOT_IN_JSON)),
    },
    "dtype": _key(str),
    "tp_overlap_comm": _key(False, unread="llmtrain's own layers send the messages of tensor-parallel ranks"),
    **_all({"injection_policy_tuple": list, "partition_config": dict, "preset_model": str}, unread=_SHARED),
    "keep_module_on_host": _key(False, unread="a rank loads its own part of the weights alone"),
    "kernel_inject": _key(False, unread="DeepSpeed has these kernels for inference alone"),
}  # fmt: skip

_ROUTED = Why(
    "the model's configuration decides which experts get a token; DeepSpeed's key would silently change the function",
    "remove it, or change the model's configuration",
)
_NAMED = Why(
    "llmtrain finds the parts of a block of experts by DeepSpeed's preset of the family, and has tested nothing else",
    "remove it; preset_model names another preset",
)
_SENT = "llmtrain itself sends the tokens of experts, by torch's all-to-all"

_EXPERT_PARALLEL: Section = {
    "enabled": _proved(False),
    "autoep_size": _proved(1, least=1),
    "expert_tensor_parallel_size": _no(1, "each rank has complete experts: llmtrain does not divide the matrices of "
                                          "an expert"),
    "validate_folding_routing": _key(
        False, unread="it checks experts beside tensor parallelism, and llmtrain does not combine the two"),
    "async_split_plan": _key(False, unread=_SENT),
    "preset_model": _proved(str),
    "use_grouped_mm": _key(True),
    "disable_triton_grouped_mm": _key(False),
    "combine_impl": _key("auto", one_of=("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm")),
    "row_weighting_impl": _key("auto", one_of=("auto", "eager", "fused"), unread=_SENT),
    "gate_up_impl": _key("separate", one_of=("separate", "fused"),
                         unread="an expert's gate and up projections are two products here"),
    "comm_backend": _key("comm", one_of=("comm", "deepep"), unread=_SENT),
    "comm_num_sm": _key(12, least=1, unread=_SENT),
    **_all({"comm_qp_margin": 4, "comm_max_tokens_per_rank": 0}, unread=_SENT),
    "load_balance_coeff": _no(float, "the model's own router_aux_loss_coef balances its experts"),
    **_all({"route_norm": bool, "route_scale": 1.0, "score_apply": "auto", "score_func": "auto",
            "num_expert_groups": int, "num_limited_groups": int}, at=_everywhere(_ROUTED)),
    "top_k": Key("any", "auto", at=_everywhere(_ROUTED)),
    "routed_scaling_factor": Key("any", "auto", at=_everywhere(_ROUTED)),
    **_all({
        "moe_layer_pattern": str, "expert_pattern": str, "router_pattern": str, "expert_w1": str, "expert_w2": str,
        "expert_w3": str, "num_experts_attr": str, "top_k_attr": str, "has_shared_experts": bool,
        "shared_experts_pattern": str, "shared_experts_gate_pattern": str, "expert_activation": str,
    }, at=_everywhere(_NAMED)),
}  # fmt: skip

_TRACKING = Why(
    "llmtrain does the tracking (metrics.jsonl, trackers, `llmtrain report`): everything would be logged twice",
    "remove the section or set enabled to false; the YAML's `trackers` decide",
)
_MONITOR = {"enabled": _no(False, *_TRACKING), **_all({"output_path": "", "job_name": "DeepSpeedJobName"}, unread=_OFF)}
_NOT_SCALED = Why(
    "DeepSpeed scales gradients before their sum at ZeRO 0 and 1 only: its reduce-scatter refuses it",
    "remove it (gradients are then divided after their sum), or use ZeRO 0 or 1",
)
_SCALED_BEFORE = dict.fromkeys((2, 3), _NOT_SCALED)

KEYS: Section = {
    "train_batch_size": _proved(int, least=1),
    "train_micro_batch_size_per_gpu": _proved(int, least=1),
    "gradient_accumulation_steps": _proved(int, least=1),
    "gradient_clipping": _proved(1.0),
    "optimizer": {
        "type": _proved(str),
        "params": _proved(dict),
        "legacy_fusion": _no(False, "llmtrain builds the optimizer, not DeepSpeed's FusedAdam"),
    },
    "scheduler": {"type": _key(str), "params": _key(dict)},
    "zero_optimization": _ZERO,
    "fp16": _FP16,
    "bf16": _BF16,
    "torch_autocast": {
        "enabled": _proved(False),
        "dtype": _proved(str),
        "lower_precision_safe_modules": _proved(list),
    },
    "data_types": {
        "grad_accum_dtype": _proved(str),
        "param_dtype": _key(str),
        "buffer_dtype": _no(str, "buffers such as rotary frequencies stay fp32: rounded ones would shift far positions",
                            same=("fp32", "float32", "float", "torch.float32")),
        "keep_in_fp32_modules": Key("any", "auto"),
    },
    "activation_checkpointing": _RECOMPUTATION,
    "pipeline": _PIPELINE,
    "tensor_parallel": _TENSOR_PARALLEL,
    "expert_parallel": _EXPERT_PARALLEL,
    "sequence_parallel_size": _proved(1, least=1),
    "data_parallel_size": _proved(int, least=1),
    "compile": {
        "deepcompile": _no(
            False, "DeepCompile needs the CUDA op `dc` (ops/op_builder/dc.py), and begins when DeepSpeed's engine "
                   "compiles the complete model, for which llmtrain never asks",
            "remove it; model.compile_layers in the YAML compiles each layer"),
        "autoep_non_moe": _key(False, unread="llmtrain itself compiles the layers (model.compile_layers in the YAML)"),
        **_all({
            "free_activation": False, "free_activation_threshold": 10 * 1024 * 1024, "offload_activation": False,
            "offload_activation_pin_memory": True, "offload_opt_states": False, "double_buffer": True,
            "symmetric_memory": False, "debug_log": False, "offload_parameters": False, "sync_before_reduce": False,
            "sync_after_reduce": False, "sync_before_allgather": False, "sync_after_allgather": False,
            "keep_int_input_tensors": True, "keep_all_input_tensors": False, "passes": list,
        }, unread="only DeepCompile reads it, which is off (compile.deepcompile)"),
    },
    "aio": {
        **_all({"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1}, unread=_FOR_SWAP_FILES),
        **_all({"single_submit": False, "overlap_events": True}, unread=_OWN_FILES),
        "use_gds": _no(False, "llmtrain reads and writes swap files itself, from host memory"),
    },
    "comms_logger": _all({"enabled": False, "prof_all": True, "prof_ops": [], "verbose": False, "debug": False}),
    "flops_profiler": {
        **_all({"enabled": False, "recompute_fwd_factor": 0.0, "detailed": True, "output_file": str}),
        "profile_step": _key(1, least=1),
        "module_depth": _key(-1, least=-1),
        "top_modules": _key(1, least=1),
    },
    "timers": {"throughput": _all({"enabled": True, "synchronized": True},
                                  unread="llmtrain measures and logs tokens per second itself")},
    "checkpoint": {
        **_all({"tag_validation": "WARN", "load_universal": False, "use_node_local_storage": False,
                "checkpoint_serialization": True}, unread=_OWN_CHECKPOINTS),
        "parallel_write": _all({"pipeline_stage": False}, unread=_OWN_CHECKPOINTS),
        "writer": _all({"type": "FAST", "io_buffer_size": 1024 * 1024 * 1024, "io_buffer_double": True,
                        "io_multiplier": 1, "show_statistics": False, "data_parallel": str, "decoupled": False},
                       unread=_OWN_CHECKPOINTS),
    },
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": {
        "enabled": _no(False, *_TRACKING),
        **_all({"group": str, "team": str, "project": "deepspeed"}, unread=_OFF),
    },
    "comet": {
        "enabled": _no(False, *_TRACKING),
        **_all({"samples_log_interval": 100, "project": str, "workspace": str, "api_key": str, "experiment_name": str,
                "experiment_key": str, "online": bool, "mode": str}, unread=_OFF),
    },
    "hybrid_engine": {
        "enabled": _no(False, "it is made for RLHF, not for this training loop", "remove the section"),
        **_all({"release_inference_cache": False, "pin_parameters": True, "enable_cuda_graph": False}, unread=_OFF),
        **_all({"max_out_tokens": 512, "inference_tp_size": 1, "tp_gather_partition_size": 8}, unread=_OFF, least=1),
    },
    "weight_quantization": _all(
        {"enabled": False, "num_bits": 8, "q_type": "symmetric", "q_groups": 1, "quantized_initialization": {},
         "post_init_quant": {}}, at=_everywhere(Why("it is made for inference", "remove the section"))),
    "autotuning": {
        "enabled": _no(False, "DeepSpeed's autotuner starts runs of its own", "remove the section"),
        **_all({
            "fast": True, "results_dir": "autotuning_results", "exps_dir": "autotuning_exps", "overwrite": True,
            "start_profile_step": 3, "end_profile_step": 5, "metric": "throughput", "metric_path": str,
            "tuner_type": "gridsearch", "tuner_early_stopping": 5, "tuner_num_trials": 50, "arg_mappings": dict,
            "model_info": dict, "model_info_path": str, "mp_size": 1, "max_train_batch_size": int,
            "min_train_batch_size": 1, "max_train_micro_batch_size_per_gpu": 1024,
            "min_train_micro_batch_size_per_gpu": 1, "num_tuning_micro_batch_sizes": 3,
        }, unread=_OFF),
    },
    "data_efficiency": {
        "enabled": _no(False, "llmtrain decides which sequences a step sees",
                       "remove the section; see data.mixture and data.stages"),
        **_all({"seed": 1234, "data_sampling": dict, "data_routing": dict}, unread=_OFF),
    },
    "datastates_ckpt": _no(dict, "llmtrain writes its own checkpoints", "remove the section"),
    "managed_gradient_accumulation": _no(True, "llmtrain's step relies on DeepSpeed's accumulation boundary"),
    "communication_data_type": _proved(str),
    "seq_parallel_communication_data_type": _proved("fp32"),
    "prescale_gradients": _key(False, at=_SCALED_BEFORE, stages=(0, 1)),
    # It keeps the sum over ranks within fp16's range, 6e-8 to 65,504, whose root is about 1e6 of its smallest number: a
    # factor beyond that turns gradients of 0.06 into 0 or those of 0.07 into infinity, on any number of ranks.
    "gradient_predivide_factor": _key(1.0, at=_SCALED_BEFORE, stages=(0, 1), least=1e-6, most=10**6),
    "gradient_allreduce_op": _no(
        "mean", "the loss is the mean over the global batch on any number of ranks; a sum would grow with the number "
                "of ranks",
        'remove it or write "mean"'),
    "disable_allgather": _key(False, unread=_DEEPSPEED_READS_IT_NOT),
    "disable_python_gc": _key(False),
    "dump_state": _key(False),
    "dataloader_drop_last": _no(
        False, "llmtrain loads the data, and its batches continue into the next epoch, so that none is short"),
    "log_level": _key(str),
    "memory_breakdown": _key(False),
    "wall_clock_breakdown": _key(False),
    "steps_per_print": _key(int),
    "use_data_before_expert_parallelism": _no(False, "the experts of a layer are shared by neighbouring ranks"),
    "vocabulary_size": _key(int, unread="DeepSpeed uses it only for warnings"),
    "zero_allow_untested_optimizer": _key(False),
    "zero_force_ds_cpu_optimizer": _key(True),
}  # fmt: skip


LEAVES: dict[str, Key] = dict(leaves(KEYS))
"""Every key by its dotted name."""

ALIASES: dict[str, str] = {
    **{
        f"zero_optimization.{name.removeprefix('stage3_')}": name
        for name in _ZERO
        if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
    },
    "bfloat16": "bf16",
    "tensor_parallel.tensor_parallel": "tp",
    "tensor_parallel.replace_with_kernel_inject": "kernel_inject",
}
"""Alias that DeepSpeed accepts (mostly by pydantic's populate_by_name) -> key of KEYS in the same section."""

IGNORED = frozenset({"monitor_config", "aio.thread_count"})
"""Keys that public files hold and DeepSpeed never reads; the second is aio.intra_op_parallelism now."""

UNKNOWN_REMEDIES: dict[str, str] = {
    **dict.fromkeys(
        ("compile.enabled", "compile.disable", "compile.backend", "compile.kwargs"),
        "remove it, and set model.compile_layers: true in the YAML to compile",
    ),
    "tensor_parallel.enabled": "remove it: autotp_size above 1 turns tensor parallelism on",
    **dict.fromkeys(("tensor_parallel.size", "tensor_parallel.tp_size"), "write tensor_parallel.autotp_size instead"),
    "pipeline.enabled": "remove it: pipeline.stages above 1 turns the pipeline on",
    **{
        f"bf16.{name}": "remove it: bf16 has the range of fp32, and no loss scale"
        for name in ("loss_scale", *DYNAMIC_SCALE)
    },
}
"""Unknown key, from an older DeepSpeed or another section -> remedy."""

REMOVED: dict[str, str] = {
    "nebula": "remove it: llmtrain writes its own crash-safe checkpoints",
    "compression_training": "remove it: DeepSpeed would train without it and say nothing",
    "amp": "remove it: mixed precision is an enabled bf16, fp16 or torch_autocast section here",
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
"""Key that DeepSpeed 0.19 no longer has -> what to do instead."""

WAS_OFF: dict[str, Any] = {"zero_optimization.mics_shard_size": -1}
"""Removed key that was switched off by a value other than null or false -> this value."""
