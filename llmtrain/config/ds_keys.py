"""The keys that DeepSpeed 0.19 reads, and what kind of value each holds.

DeepSpeed ignores an unknown top-level key without a word, and importing it to ask costs seconds; so the
table stands here. `tests/unit/config/test_config_ds_keys.py` compares it with the installed DeepSpeed.
"""

from __future__ import annotations

from typing import Any

# Kinds: bool, int, num (int or float), str, list, dict, any; a nested dict is a section with its keys.
Section = dict[str, Any]

_MONITOR: Section = {"enabled": "bool", "output_path": "str", "job_name": "str"}

_ZERO: Section = {
    "stage": "int",
    "contiguous_gradients": "bool",
    "reduce_scatter": "bool",
    "reduce_bucket_size": "int",
    "use_multi_rank_bucket_allreduce": "bool",
    "allgather_partitions": "bool",
    "allgather_bucket_size": "int",
    "overlap_comm": "bool",
    "compute_grad_norm": "bool",
    "load_from_fp32_weights": "bool",
    "elastic_checkpoint": "bool",
    "offload_param": {
        "device": "str",
        "nvme_path": "str",
        "buffer_count": "int",
        "buffer_size": "int",
        "max_in_cpu": "int",
        "pin_memory": "bool",
    },
    "offload_optimizer": {
        "device": "str",
        "nvme_path": "str",
        "buffer_count": "int",
        "pin_memory": "bool",
        "pipeline_read": "bool",
        "pipeline_write": "bool",
        "fast_init": "bool",
        "ratio": "num",
        "super_offload": "bool",
        "cpuadam_cores_perc": "num",
    },
    "zenflow": "dict",
    "sub_group_size": "int",
    "cpu_offload_param": "bool",
    "cpu_offload_use_pin_memory": "bool",
    "cpu_offload": "bool",
    "stage3_prefetch_bucket_size": "int",
    "stage3_param_persistence_threshold": "int",
    "stage3_model_persistence_threshold": "int",
    "stage3_max_live_parameters": "int",
    "stage3_max_reuse_distance": "int",
    "stage3_gather_16bit_weights_on_model_save": "bool",
    "stage3_module_granularity_threshold": "int",
    "stage3_use_all_reduce_for_fetch_params": "bool",
    "stage3_allgather_sequential": "bool",
    "stage3_gather_fp16_weights_on_model_save": "bool",
    "ignore_unused_parameters": "bool",
    "legacy_stage1": "bool",
    "round_robin_gradients": "bool",
    "parameter_alignment": "bool",
    "zero_hpz_partition_size": "int",
    "zero_quantized_weights": "bool",
    "zero_quantized_nontrainable_weights": "bool",
    "zero_quantized_gradients": "bool",
    "memory_efficient_linear": "bool",
    "pipeline_loading_checkpoint": "bool",
    "override_module_apply": "bool",
    "log_trace_cache_warnings": "bool",
    "enable_sanity_checks": "bool",
    "save_muon_momentum_buffer_in_memory": "bool",
    "leaf_module": {"classes": "list", "names": "list", "name_suffixes": "list"},
}

_BF16: Section = {
    "enabled": "bool",
    "immediate_grad_update": "bool",
    "check_grad_overflow": "bool",
    "bf16_master_weights_and_grads": "bool",
    "bf16_optimizer_states": "bool",
}

KEYS: Section = {
    "train_batch_size": "int",
    "train_micro_batch_size_per_gpu": "int",
    "gradient_accumulation_steps": "int",
    "gradient_clipping": "num",
    "optimizer": {"type": "str", "params": "dict", "legacy_fusion": "bool"},
    "scheduler": {"type": "str", "params": "dict"},
    "zero_optimization": _ZERO,
    "fp16": {
        "enabled": "bool",
        "auto_cast": "bool",
        "loss_scale": "num",
        "initial_scale_power": "int",
        "loss_scale_window": "int",
        "hysteresis": "int",
        "consecutive_hysteresis": "bool",
        "min_loss_scale": "num",
        "fp16_master_weights_and_grads": "bool",
    },
    "bf16": _BF16,
    "bfloat16": _BF16,
    "torch_autocast": {"enabled": "bool", "dtype": "str", "lower_precision_safe_modules": "list"},
    "data_types": {
        "grad_accum_dtype": "str",
        "param_dtype": "str",
        "buffer_dtype": "str",
        "keep_in_fp32_modules": "any",
    },
    "activation_checkpointing": {
        "partition_activations": "bool",
        "number_checkpoints": "int",
        "contiguous_memory_optimization": "bool",
        "cpu_checkpointing": "bool",
        "profile": "bool",
        "synchronize_checkpoint_boundary": "bool",
    },
    "pipeline": {
        "stages": "int",
        "partition": "any",
        "seed_layers": "bool",
        "activation_checkpoint_interval": "int",
        "pipe_partitioned": "bool",
        "grad_partitioned": "bool",
        "use_reentrant": "bool",
    },
    "tensor_parallel": {
        "dtype": "str",
        "autotp_size": "int",
        "tp_overlap_comm": "bool",
        "vocab_parallel_lm_head": "bool",
        "vocab_parallel_ce_backend": "str",
        "tp": "dict",
        "injection_policy_tuple": "list",
        "partition_config": "dict",
        "preset_model": "str",
        "keep_module_on_host": "bool",
        "kernel_inject": "bool",
    },
    "expert_parallel": "dict",
    "sequence_parallel_size": "int",
    "data_parallel_size": "int",
    "compile": {
        "deepcompile": "bool",
        "autoep_non_moe": "bool",
        "free_activation": "bool",
        "free_activation_threshold": "int",
        "offload_activation": "bool",
        "offload_activation_pin_memory": "bool",
        "offload_opt_states": "bool",
        "double_buffer": "bool",
        "symmetric_memory": "bool",
        "debug_log": "bool",
        "offload_parameters": "bool",
        "sync_before_reduce": "bool",
        "sync_after_reduce": "bool",
        "sync_before_allgather": "bool",
        "sync_after_allgather": "bool",
        "keep_int_input_tensors": "bool",
        "keep_all_input_tensors": "bool",
        "passes": "list",
    },
    "aio": {
        "block_size": "int",
        "queue_depth": "int",
        "intra_op_parallelism": "int",
        "single_submit": "bool",
        "overlap_events": "bool",
        "use_gds": "bool",
    },
    "comms_logger": {
        "enabled": "bool",
        "prof_all": "bool",
        "prof_ops": "list",
        "verbose": "bool",
        "debug": "bool",
    },
    "flops_profiler": {
        "enabled": "bool",
        "recompute_fwd_factor": "num",
        "profile_step": "int",
        "module_depth": "int",
        "top_modules": "int",
        "detailed": "bool",
        "output_file": "str",
    },
    "timers": {"throughput": {"enabled": "bool", "synchronized": "bool"}},
    "checkpoint": {
        "tag_validation": "str",
        "load_universal": "bool",
        "use_node_local_storage": "bool",
        "parallel_write": {"pipeline_stage": "bool"},
        "checkpoint_serialization": "bool",
        "writer": "dict",
    },
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": {"enabled": "bool", "group": "str", "team": "str", "project": "str"},
    "comet": {
        "enabled": "bool",
        "samples_log_interval": "int",
        "project": "str",
        "workspace": "str",
        "api_key": "str",
        "experiment_name": "str",
        "experiment_key": "str",
        "online": "bool",
        "mode": "str",
    },
    "hybrid_engine": {
        "enabled": "bool",
        "max_out_tokens": "int",
        "inference_tp_size": "int",
        "release_inference_cache": "bool",
        "pin_parameters": "bool",
        "tp_gather_partition_size": "int",
        "enable_cuda_graph": "bool",
    },
    "weight_quantization": "dict",
    "autotuning": "dict",
    "data_efficiency": "dict",
    "datastates_ckpt": "dict",
    "managed_gradient_accumulation": "bool",
    "communication_data_type": "str",
    "seq_parallel_communication_data_type": "str",
    "prescale_gradients": "bool",
    "gradient_predivide_factor": "num",
    "gradient_allreduce_op": "str",
    "disable_allgather": "bool",
    "disable_python_gc": "bool",
    "dump_state": "bool",
    "dataloader_drop_last": "bool",
    "log_level": "str",
    "memory_breakdown": "bool",
    "wall_clock_breakdown": "bool",
    "steps_per_print": "int",
    "use_data_before_expert_parallelism": "bool",
    "vocabulary_size": "int",
    "zero_allow_untested_optimizer": "bool",
    "zero_force_ds_cpu_optimizer": "bool",
}

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
    "curriculum_learning": "remove it: llmtrain orders the data (data.mixture)",
    "progressive_layer_drop": "remove it",
    "zero_optimization.mics_shard_size": "remove it, or use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "remove it, or use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "remove it: zero_quantized_gradients works without it",
}
"""Keys that DeepSpeed 0.19 removed -> what to do instead."""

_OURS = "remove the section or set enabled to false; the YAML's `tracking` section decides"

REFUSED_WHEN_ENABLED: dict[str, tuple[str, str]] = {
    "wandb": ("llmtrain does the tracking: two W&B runs would appear", _OURS),
    "tensorboard": ("llmtrain does the tracking (metrics.jsonl, W&B, `llmtrain report`)", _OURS),
    "csv_monitor": ("llmtrain does the tracking (metrics.jsonl, W&B, `llmtrain report`)", _OURS),
    "comet": ("llmtrain does the tracking (metrics.jsonl, W&B, `llmtrain report`)", _OURS),
    "hybrid_engine": ("it is made for RLHF, not for this training loop", "remove the section"),
    "autotuning": ("DeepSpeed's autotuner starts runs of its own", "remove the section"),
    "weight_quantization": ("it is made for inference", "remove the section"),
    "data_efficiency": ("llmtrain decides which sequences a step sees", "remove the section; see data.mixture"),
    "datastates_ckpt": ("llmtrain writes its own checkpoints", "remove the section"),
    "torch_autocast": ("torch autocast is not built yet", "use the bf16 or fp16 section"),
}
"""Sections that work in DeepSpeed but not here -> (rule, remedy)."""

REFUSED_VALUES: dict[str, tuple[Any, str, str]] = {
    "compile.deepcompile": (True, "DeepCompile is not built yet", "set model.compile_layers in the YAML instead"),
    "zero_optimization.offload_optimizer.super_offload": (
        True,
        "SuperOffload brings its own optimizer and is not built yet",
        "remove super_offload; plain CPU offload works",
    ),
    "zero_optimization.offload_optimizer.device": (
        "nvme",
        "offload to NVMe is not built yet",
        'use "cpu" or "none"',
    ),
    "zero_optimization.offload_param.device": (
        "nvme",
        "offload to NVMe is not built yet",
        'use "cpu" or "none"',
    ),
    "gradient_allreduce_op": (
        "sum",
        "the loss is the mean over the global batch on any number of ranks; a sum would scale with them",
        'remove it or write "mean"',
    ),
    "managed_gradient_accumulation": (
        False,
        "llmtrain's step relies on DeepSpeed's accumulation boundary",
        "remove it",
    ),
    "fp16.fp16_master_weights_and_grads": (
        True,
        "checkpoints and exact resume need fp32 master weights",
        "remove it",
    ),
    "bf16.bf16_master_weights_and_grads": (
        True,
        "master weights are fp32: in bf16 they lose every update of less than 2^-9 of a weight",
        "remove it; bf16_optimizer_states works without it here",
    ),
    "zero_optimization.legacy_stage1": (True, "the old ZeRO 1 has other internals", "remove it"),
}
"""Values that work in DeepSpeed but not here -> (the value, rule, remedy)."""

ZERO_3_ONLY: dict[str, int] = {
    "zero_optimization.zero_quantized_gradients": 0,
    "zero_optimization.zero_quantized_weights": 0,
    "zero_optimization.zero_hpz_partition_size": 1,
}
"""ZeRO++: keys that the other stages ignore without a word -> the largest value that asks for nothing."""
