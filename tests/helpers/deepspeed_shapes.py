"""DeepSpeed files in the shapes that public projects give them: which keys they set together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
FP16_AUTO = {"fp16": {"enabled": "auto", **SCALE}}
BF16_AUTO = {"bf16": {"enabled": "auto"}}
BF16 = {"bf16": {"enabled": True}}
BF16_MOMENTS = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
CPU = {"device": "cpu", "pin_memory": True}
BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
}
ZERO_2 = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, **BUCKETS}
ZERO_3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
ZERO_3_SHORT = {  # the same keys by DeepSpeed's names of the fields
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto",
    "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto", "max_live_parameters": 0,
    "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True,
}  # fmt: skip
ADAMW_AUTO = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP_AUTO = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
ADAM = {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
QUIET = {"steps_per_print": 2000, "wall_clock_breakdown": False}
CHECKPOINTING = {
    "partition_activations": False, "cpu_checkpointing": False, "contiguous_memory_optimization": False,
    "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False,
}  # fmt: skip
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False}
MONITOR = {"enabled": False, "output_path": "logs", "job_name": "run"}


@dataclass
class Shape:
    """A file; the words of its refusal, or none; the words of a note; the ranks; what the YAML says for it."""

    name: str
    ds: dict[str, Any]
    refused: tuple[str, ...] = ()
    noted: str = ""
    ranks: int = 8
    run: dict[str, Any] = field(default_factory=dict)


# fmt: off
SHAPES = [
    # the documentation of Hugging Face's Trainer and Accelerate
    Shape("trainer, ZeRO 2", {**FP16_AUTO, "optimizer": ADAMW_AUTO, "zero_optimization": ZERO_2, **AUTO}),
    Shape("trainer, ZeRO 2 with offload and an automatic scheduler", {**FP16_AUTO, "optimizer": ADAMW_AUTO,
          "scheduler": {"type": "WarmupLR", "params": WARMUP_AUTO}, "zero_optimization": {**ZERO_2,
          "offload_optimizer": CPU}, **AUTO}, noted="scheduler WarmupLR is all auto"),
    Shape("trainer, ZeRO 3 with offload of both", {**FP16_AUTO, **BF16_AUTO, "optimizer": ADAMW_AUTO, "scheduler":
          {"type": "WarmupDecayLR", "params": {**WARMUP_AUTO, "total_num_steps": "auto"}}, "zero_optimization":
          {**ZERO_3, "offload_optimizer": CPU, "offload_param": CPU}, **AUTO, **QUIET}),
    Shape("trainer, precision left to others", {"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 1},
          **AUTO}),
    Shape("trainer, apex", {"amp": {"enabled": "auto", "opt_level": "auto"}, **AUTO}, ("amp = {",
          "DeepSpeed 0.19 has removed it", "bf16 or fp16")),
    Shape("trainer, offload to NVMe", {**BF16, "zero_optimization": {**ZERO_3, "offload_optimizer": NVME,
          "offload_param": NVME}, **AUTO}, ("nvme", "offload to NVMe is not built yet")),
    Shape("accelerate, the shortest", {**BF16, "zero_optimization": {"stage": 2}, **AUTO}),
    Shape("accelerate, gathered by the short name", {**BF16, "zero_optimization": {"stage": 3,
          "gather_16bit_weights_on_model_save": True, "round_robin_gradients": True, "offload_optimizer": {"device":
          "none"}}, **AUTO}),
    # axolotl
    Shape("axolotl, ZeRO 1", {"zero_optimization": {"stage": 1, "overlap_comm": True}, **BF16_AUTO, "fp16":
          {"enabled": "auto", "auto_cast": False, **SCALE, "initial_scale_power": 32},
          "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
          "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False}),
    Shape("axolotl, compiled by DeepSpeed", {"compile": {"disable": False, "backend": "inductor"},
          "zero_optimization": {"stage": 1}, **BF16_AUTO, **AUTO}, ("compile.backend", "compile.disable",
          "set model.compile_layers: true in the YAML")),
    Shape("axolotl, ZeRO 3 by short names", {"zero_optimization": ZERO_3_SHORT, **BF16_AUTO, **FP16_AUTO, **AUTO}),
    Shape("axolotl, ZeRO 3 by short names, bf16", {"zero_optimization": ZERO_3_SHORT, **BF16, **AUTO}),
    Shape("axolotl, ZeRO 3 by short names, offload of parameters", {"zero_optimization": {**ZERO_3_SHORT,
          "offload_param": CPU}, **BF16, **AUTO}),
    Shape("axolotl, ZeRO 3 by short names, offload of all", {"zero_optimization": {**ZERO_3_SHORT, "offload_param":
          CPU, "offload_optimizer": CPU}, **BF16, **AUTO}),
    # LLaMA-Factory
    Shape("LLaMA-Factory, ZeRO 0", {**AUTO, "zero_allow_untested_optimizer": True, **FP16_AUTO, **BF16_AUTO,
          "zero_optimization": {**ZERO_2, "stage": 0, "round_robin_gradients": True}}),
    Shape("LLaMA-Factory, ZeRO 2 with offload", {**AUTO, "zero_allow_untested_optimizer": True, **FP16_AUTO,
          **BF16_AUTO, "zero_optimization": {**ZERO_2, "offload_optimizer": CPU, "round_robin_gradients": True}}),
    Shape("LLaMA-Factory, ZeRO 3", {**AUTO, "zero_allow_untested_optimizer": True, **BF16_AUTO, "zero_optimization":
          ZERO_3}),
    Shape("LLaMA-Factory, tensor parallel", {**AUTO, **BF16_AUTO, "zero_optimization": {"stage": 2},
          "tensor_parallel": {"autotp_size": 2}}),
    # trl, open-instruct, OpenRLHF
    Shape("trl, ZeRO 3", {**BF16, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"},
          "offload_param": {"device": "none"}}, **AUTO}),
    Shape("open-instruct, ZeRO 3", {**BF16, "zero_optimization": ZERO_3, **AUTO, "steps_per_print": 1e5}),
    Shape("OpenRLHF, training", {"steps_per_print": 100, "prescale_gradients": False, "wall_clock_breakdown": False,
          "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "none"},
          "sub_group_size": "auto", "offload_optimizer": {"device": "cpu", "pin_memory": True},
          "reduce_bucket_size": "auto", "stage3_max_live_parameters": "auto", "stage3_max_reuse_distance": "auto",
          "stage3_param_persistence_threshold": "auto", "stage3_prefetch_bucket_size": "auto",
          "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_gradients": False,
          "round_robin_gradients": True}, **BF16, "data_types": {"grad_accum_dtype": "fp32"},
          "train_micro_batch_size_per_gpu": 1, "train_batch_size": 16}),
    Shape("RLHF's hybrid engine", {**BF16, "zero_optimization": {"stage": 3, "memory_efficient_linear": False},
          "train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "hybrid_engine": {"enabled": True,
          "max_out_tokens": 512}}, ("hybrid_engine.enabled = true", "made for RLHF")),
    # DeepSpeedExamples, DeepSpeed-Chat, Megatron-DeepSpeed
    Shape("chat, step 1", {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10,
          "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device":
          "none"}, "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7,
          "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False}, "fp16": {"enabled": True,
          "loss_scale_window": 100}, "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown":
          False, "tensorboard": MONITOR, "hybrid_engine": {"enabled": False}}),
    Shape("examples, first steps", {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "Adam", "params":
          {"lr": 1e-4}}, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1, "offload_optimizer":
          {"device": "cpu"}}}),
    Shape("examples, short names", {"train_batch_size": 16, **BF16, "zero_optimization": {"stage": 3,
          "max_live_parameters": 1e9, "max_reuse_distance": 1e9, "prefetch_bucket_size": 5e7,
          "param_persistence_threshold": 1e5}, **QUIET}),
    Shape("examples, BERT with gradients scaled before", {"train_batch_size": 64, "train_micro_batch_size_per_gpu":
          4, "steps_per_print": 10, "optimizer": ADAM, "gradient_clipping": 1.0, "prescale_gradients": True,
          "gradient_predivide_factor": 8, "fp16": {"enabled": True, "loss_scale": 0}, "zero_optimization": {"stage":
          0}}, noted="fp16 at ZeRO 0 runs as ZeRO 1"),
    Shape("bf16 at ZeRO 0 with fp32 sums", {**BF16, **AUTO, "data_types": {"grad_accum_dtype": "fp32"}},
          noted="bf16 with data_types.grad_accum_dtype fp32 at ZeRO 0 runs as ZeRO 1"),
    Shape("bf16 moments", {**BF16_MOMENTS, **AUTO, "zero_optimization": {"stage": 2}},
          noted="masters are fp32, where DeepSpeed by itself asks for bf16"),
    Shape("bf16 moments without bf16", {**FP16_AUTO, "bf16": {"enabled": False, "bf16_optimizer_states": True}, **AUTO},
          noted="bf16.bf16_optimizer_states: no effect: bf16.enabled is not true"),
    Shape("bf16 moments as DeepSpeed asks for them", {"bf16": {**BF16_MOMENTS["bf16"], "bf16_master_weights_and_grads":
          True}, **AUTO, "zero_optimization": {"stage": 2}}, ("bf16.bf16_master_weights_and_grads = true",
          "bf16_optimizer_states works without it here")),
    Shape("bf16 moments, Adam's usual betas", {**BF16_MOMENTS, "optimizer": {**ADAM, "params": {"betas": [0.9, 0.999]}},
          "train_batch_size": 16}, ("bf16.bf16_optimizer_states = true with optim.betas = [0.9, 0.999]",
          "it would never fall")),
    Shape("bf16 moments, offload", {**BF16_MOMENTS, **AUTO, "zero_optimization": {**ZERO_2, "offload_optimizer": CPU}},
          ('with zero_optimization.offload_optimizer.device = "cpu"', "beside masters in bf16 only")),
    Shape("bf16 moments, Muon", {**BF16_MOMENTS, **AUTO, "optimizer": {"type": "Muon"}},
          ("bf16.bf16_optimizer_states = true with optim.name", "use adamw or lion")),
    Shape("examples, LAMB", {"train_batch_size": 64, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3,
          "max_coeff": 0.3}}}, ('error: optimizer.type = "Lamb"', "trains with Adam, AdamW, Muon or Lion")),
    Shape("examples, one-bit Adam", {"train_batch_size": 64, "optimizer": {"type": "OneBitAdam", "params": {"lr":
          1e-3, "freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"}}, "fp16": {"enabled": True}},
          ('error: optimizer.type = "OneBitAdam"', "trains with Adam, AdamW, Muon or Lion")),
    Shape("tutorial, a warm-up in figures", {"train_batch_size": 16, "optimizer": ADAM, "fp16": {"enabled": True},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4,
          "warmup_num_steps": 10}}}, ("write schedule.name: constant, optim.lr: 0.0001, schedule.warmup_steps: 10",
          "remove the section"),
          run={"schedule": {"name": "constant", "warmup_steps": 10}}),
    Shape("tutorial, a cycle of rates", {"train_batch_size": 16, "scheduler": {"type": "OneCycle", "params":
          {"cycle_first_step_size": 1000}}}, ('scheduler = {"type": "OneCycle"', "set `schedule` in the YAML")),
    Shape("Megatron-DeepSpeed, GPT with a pipeline", {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1,
          "steps_per_print": 10, **BF16, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0,
          "prescale_gradients": False, "data_types": {"grad_accum_dtype": "fp32"}, "wall_clock_breakdown": False,
          "pipeline": {"stages": 2}}),
    Shape("Megatron-DeepSpeed, fp16 with an elastic checkpoint", {"train_batch_size": 16,
          "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0,
          "elastic_checkpoint": True}, "prescale_gradients": True, "fp16": {"enabled": True, "loss_scale": 0,
          "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 11},
          "wall_clock_breakdown": True}),
    Shape("Megatron-DeepSpeed, lengths that grow", {"train_batch_size": 16, **BF16, "curriculum_learning":
          {"enabled": True, "curriculum_type": "seqlen"}}, ("curriculum_learning = {", "removed it",
          "llmtrain orders the data")),
    Shape("Megatron-DeepSpeed, data efficiency", {"train_batch_size": 16, **BF16, "data_efficiency": {"enabled":
          True, "seed": 1234}}, ("data_efficiency.enabled = true", "which sequences a step sees")),
    Shape("Megatron-DeepSpeed, Ulysses", {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, **BF16,
          "sequence_parallel_size": 2, "zero_optimization": {"stage": 3}}),
    # LLaVA, GPT-NeoX, FastChat, ColossalAI's comparison, nanotron's rivals
    Shape("LLaVA, ZeRO 2", {**FP16_AUTO, **BF16_AUTO, **AUTO, "zero_optimization": {"stage": 2, "overlap_comm":
          True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto"}}),
    Shape("GPT-NeoX, all in one file", {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "optimizer":
          ADAM, "fp16": {"enabled": True, **SCALE}, "zero_optimization": {"stage": 1, **BUCKETS, "overlap_comm":
          True, "contiguous_gradients": True, "cpu_offload": False}, "gradient_clipping": 1.0,
          "zero_allow_untested_optimizer": True, "communication_data_type": "fp32", "csv_monitor": MONITOR, "wandb":
          {"enabled": False, "group": "g", "team": "t", "project": "p"}}),
    Shape("FastChat, the old name of offload", {**AUTO, **BF16, "zero_optimization": {**ZERO_2, "cpu_offload":
          True}}),
    Shape("W&B by DeepSpeed", {**AUTO, **BF16, "wandb": {"enabled": True, "project": "p"}}, ("wandb.enabled = true",
          "llmtrain does the tracking", "tracking")),
    Shape("TensorBoard by DeepSpeed", {**AUTO, **BF16, "tensorboard": {**MONITOR, "enabled": True}},
          ("tensorboard.enabled = true", "llmtrain does the tracking")),
    # keys that DeepSpeed never reads
    Shape("a comment as a key", {"_comment": "for 8 GPUs", **AUTO, **BF16}, noted="_comment has no effect"),
    Shape("a monitor section that is none", {"monitor_config": {"enabled": True, "tag": "x"}, **AUTO, **BF16},
          noted="monitor_config has no effect: DeepSpeed does not read it"),
    # what the whole field uses beside
    Shape("activation checkpointing, profiler and timers", {**AUTO, **BF16, "activation_checkpointing":
          CHECKPOINTING, "comms_logger": {"enabled": False}, "flops_profiler": {"enabled": False, "profile_step": 1,
          "module_depth": -1, "top_modules": 1, "detailed": True, "output_file": None}, "dump_state": False,
          "memory_breakdown": False}),
    Shape("activation checkpointing in parts", {**AUTO, **BF16, "activation_checkpointing": {**CHECKPOINTING,
          "partition_activations": True, "number_checkpoints": 4}}, ("partition_activations = true",
          "number_checkpoints = 4", "set it to false")),
    Shape("ZeRO++, weights in two places", {**AUTO, **BF16, "zero_optimization": {**ZERO_3,
          "zero_hpz_partition_size": 8}}),
    Shape("ZeRO++", {**AUTO, **BF16, "zero_optimization": {**ZERO_3, "zero_quantized_weights": True,
          "zero_hpz_partition_size": 8, "zero_quantized_gradients": True}}, ("zero_quantized_weights = true",
          "zero_quantized_gradients = true", "have never run here")),
    Shape("MiCS", {**AUTO, **BF16, "zero_optimization": {**ZERO_3, "mics_shard_size": 8}}, ("mics_shard_size = 8",
          "removed it", "zero_hpz_partition_size")),
    Shape("NVMe's own section, unused", {**AUTO, **BF16, "zero_optimization": {"stage": 3}, "aio": {"block_size":
          262144, "queue_depth": 32, "single_submit": False, "overlap_events": True}},
          noted="aio.block_size, aio.queue_depth: no effect"),
    Shape("universal checkpoints", {**AUTO, **BF16, "zero_optimization": {"stage": 1}, "checkpoint":
          {"load_universal": True}}, noted="checkpoint"),
    Shape("an elastic batch", {"elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes":
          [2, 4]}, **BF16}, ("elasticity = {", "removed it", "any number of ranks")),
    Shape("torch's autocast", {**AUTO, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
          ("not built yet",)),
]
