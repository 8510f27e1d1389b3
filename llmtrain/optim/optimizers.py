"""What is to be known of each optimizer without torch: one entry each, which every part asks. Standard library only.

An optimizer is an entry here, the fields of `optim` that are its own (config/run.py), and its file of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OptimizerName = Literal["adamw", "muon", "lion"]
"""`optim.name`."""
PARAM = "param"
"""Kind of the fp32 master values in an optimizer's state; the other kinds are its names of its moments (`state`)."""
Form = Literal["clipping", "offload", "scattered gradients", "fp32 sums at ZeRO 1", "bf16 moments", "tensor", "expert"]
"""A way of training that not every optimizer goes with; config/topology.py tells which runs ask for it."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why an optimizer cannot train in some form, and what to do instead."""

    reason: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """One optimizer."""

    name: OptimizerName
    title: str
    """In sentences."""
    json_types: tuple[str, ...]
    """What `optimizer.type` of a DeepSpeed JSON may say for it, in any case; the last one is what we write."""
    params: Mapping[str, str]
    """What `optimizer.params` of a JSON may hold -> the field of `optim` of the same value: those that it uses."""
    fixed: Mapping[str, Any]
    """Further ones that may stand there with this value alone: llmtrain has no other."""
    state: tuple[str, ...]
    """Kinds of tensor that it may keep for a parameter, as checkpoints name them."""
    host_ops: tuple[str, ...]
    """DeepSpeed's ops that are built at the start when its state is offloaded; everything else is torch's."""
    refuses: Mapping[Form, Refusal] = field(default_factory=dict)
    by_sign: bool = False
    """A step is the sign of a mean of gradients: where that is all rounding, a step is anyone's."""
    norm_of_update: bool = False
    """Under ZeRO, DeepSpeed measures and clips the norm of its update, not of the gradient."""


_ADAM_PARAMS = {name: name for name in ("lr", "betas", "eps", "weight_decay")}
_ADAM_FIXED = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "fp32_optimizer_states": True}
_ADAM_STATE = ("exp_avg", "exp_avg_sq")

_ADAMW = Optimizer(
    name="adamw",
    title="AdamW",
    json_types=("Adam", "AdamW"),
    params=_ADAM_PARAMS,
    fixed=_ADAM_FIXED,
    state=_ADAM_STATE,
    host_ops=("cpu_adam",),
)

_MUON = Optimizer(  # for the matrices of the decoder layers; the rest has AdamW
    name="muon",
    title="Muon",
    json_types=("Muon",),
    params={**_ADAM_PARAMS, "muon_lr": "muon_lr", "momentum": "muon_momentum"},
    fixed=_ADAM_FIXED,
    state=(*_ADAM_STATE, "momentum_buffer"),
    host_ops=(),
    refuses={
        "clipping": Refusal(
            reason="Muon's update has a norm of its own, and DeepSpeed's ZeRO would clip that norm, not the gradient's",
            remedy="set optim.clip_norm to 0 (Muon does not need it), or use adamw",
        ),
        "offload": Refusal(
            reason="Muon orthogonalises whole matrices, which is the device's work",
            remedy="remove offload_optimizer, or use adamw",
        ),
        "scattered gradients": Refusal(
            reason="Muon needs whole gradients, and ZeRO 3 would scatter them",
            remedy="set zero_optimization.reduce_scatter to false, or remove it",
        ),
        "fp32 sums at ZeRO 1": Refusal(
            reason="DeepSpeed rounds Muon's gradients to bf16 there all the same (copy_grads_in_partition)",
            remedy="remove data_types, or use ZeRO 2, or adamw",
        ),
        "bf16 moments": Refusal(
            reason="Muon's momentum is kept by DeepSpeed, in a precision of its own",
            remedy="remove it, or use adamw or lion",
        ),
        "tensor": Refusal(
            reason="Muon orthogonalises whole matrices, and each tensor-parallel rank has a part of them",
            remedy="use adamw, or set tensor_parallel.autotp_size to 1",
        ),
        "expert": Refusal(
            reason="Muon's momentum of experts that ranks share is in no form that checkpoints can read",
            remedy="use adamw, or remove expert_parallel",
        ),
    },
    norm_of_update=True,
)

_LION = Optimizer(
    name="lion",
    title="Lion",
    json_types=("Lion",),
    params={name: name for name in ("lr", "betas", "weight_decay")},
    fixed={"fp32_optimizer_states": True},
    state=("exp_avg",),
    host_ops=("cpu_lion",),
    by_sign=True,
)

OPTIMIZERS: dict[str, Optimizer] = {entry.name: entry for entry in (_ADAMW, _MUON, _LION)}


def norm_of(name: str | None, *, zero: bool) -> Literal["gradient", "update"]:
    """What the metric `grad_norm` is the norm of. `name`: `optim.name`, also None or one that is not known here;
    `zero`: whether the run has ZeRO 1, 2 or 3."""
    entry = OPTIMIZERS.get(name or "")
    return "update" if zero and entry is not None and entry.norm_of_update else "gradient"
