"""The private names of DeepSpeed and torch that this folder reads or replaces, and a check that they exist.

A new version may remove any of these names. Python would not notice an attribute that is no longer read, or a method
that is no longer called, and a run would silently compute something else: so a run does not start with a package that
lacks one. `tests/unit/engine/test_private_names.py` compares this table with the code.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

from llmtrain.base.errors import ConfigError
from llmtrain.tracking.environment import READ_DEEPSPEED


@dataclass(frozen=True)
class Private:
    """Private names of one module, and why we need them."""

    module: str
    names: tuple[str, ...]
    why: str


PRIVATE = (
    Private(
        "deepspeed.ops",
        ("__compatible_ops__",),
        "the shared-memory all-reduce, which leaves 69 MB a rank in /dev/shm, is marked as not installed",
    ),
    Private(
        "torch.distributed.distributed_c10d",
        ("_world", "_set_pg_timeout"),
        "every process group gets the run's timeout: DeepSpeed sets none on its subgroups",
    ),
    Private(
        "torch.utils.cpp_extension", ("_get_build_directory",), "the lock file of a killed op build is found there"
    ),
    Private(
        "deepspeed.runtime.compiler",
        ("compile", "dummy_decorator"),
        "Muon is imported without torch.compile where that does not work or does not pay",
    ),
    Private(
        "deepspeed.runtime.zero.muon.original_muon",
        ("ns_compute_dtype",),
        "Muon's iteration runs in fp32 in a run in fp32",
    ),
    Private(
        "torch._dynamo.eval_frame",
        ("_torchdynamo_orig_callable",),
        "whether this process has imported Muon compiled or not",
    ),
    Private(
        "torch",
        (
            "_foreach_norm",
            "_foreach_mul_",
            "_foreach_lerp",
            "_foreach_lerp_",
            "_foreach_sign",
            "_foreach_add_",
            "_foreach_copy_",
        ),
        "one kernel for a list of tensors",
    ),
    Private(
        "deepspeed.utils.groups",
        ("mpu", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_get_expert_parallel_group"),
        "the mpu and group of an earlier engine are reset; one group sums the norms of shared experts",
    ),
    Private(
        "deepspeed.runtime.engine",
        ("_global_grad_norm", "_do_optimizer_sanity_check"),
        "the gradient norm of a step; ZeRO 1 in bf16 with fp32 sums runs in the class of ZeRO 1 and 2",
    ),
    Private(
        "deepspeed.runtime.pipe.engine",
        (
            "_INSTRUCTION_MAP",
            "_compute_loss",
            "_exec_schedule",
            "_exec_optimizer_step",
            "_train_schedule",
            "_inference_schedule",
            "total_loss",
            "reset_activation_shape",
        ),
        "the schedule runs without train_batch(), which waits for the device, and without the optimizer's step",
    ),
    Private(
        "deepspeed.runtime.zero.stage_1_and_2",
        (
            "_use_compact_grad_partition_buffer",
            "_muon_update_lacks_loss_scale",
            "_zero_padding",
            "single_partition_of_fp32_groups",
            "parallel_partitioned_bit16_groups",
            "params_in_partition",
            "partition_size",
            "round_robin_bit16_groups",
            "round_robin_bit16_offsets",
            "real_dp_process_group",
            "use_grad_accum_attribute",
            "_clear_param_grad_only",
            "_grad_acc_hooks",
        ),
        "where ZeRO 1 and 2 keep masters, sums of gradients and Muon's momentum; one norm for a step",
    ),
    Private(
        "deepspeed.runtime.zero.stage3",
        (
            "_partition_all_parameters",
            "_reassign_or_swap_out_partitioned_parameters",
            "fp32_partitioned_groups_flat",
            "sub_group_to_group_id",
            "grad_position",
            "persistent_parameters",
            "invalidate_secondary_tensor",
        ),
        "where ZeRO 3 keeps masters, and how its forward pass gets their new values",
    ),
    Private(
        "deepspeed.runtime.fp16.unfused_optimizer",
        ("fp32_groups", "fp16_groups", "overflow"),
        "where ZeRO 0 in bf16 and fp16 keeps masters; whether a step was skipped",
    ),
)


def check(names: Sequence[Private] = PRIVATE) -> None:
    """Look for the names in loaded modules and in the source files of others; takes about 5 ms. Raises ConfigError: a
    name is missing."""
    for private in names:
        text, loaded = _source(private.module), sys.modules.get(private.module)
        missing = [name for name in private.names if not hasattr(loaded, name)]
        # As a whole word. A pattern that begins with the name itself is fast, as re searches for that literal.
        gone = [name for name in missing if not re.search(rf"{name}(?<!\w{name})\b", text)]
        if gone:
            package = private.module.partition(".")[0]
            raise ConfigError(
                f"{package} {version(package)}: {private.module} has no {', '.join(gone)} any more, on which a run "
                f"depends ({private.why}). llmtrain is written for deepspeed {READ_DEEPSPEED}: install "
                f"deepspeed=={READ_DEEPSPEED}, and a torch version that README.md names."
            )


def _source(module: str) -> str:
    """Return a module's source code without importing it (torch.compile's backend takes two seconds), "" if there is
    none."""
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, package
    path = Path(spec.origin).parent.joinpath(*inside)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_text()
    return ""


def apply_group_timeout(timeout_s: float) -> None:
    """Give the run's timeout to every process group: DeepSpeed's subgroups (comm/torch.py new_group) have torch's
    default of 10 (NCCL) or 30 (gloo) minutes."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
