"""What is known of optimizers without torch: the fields of `optim`, their rules, and the state that is kept.

A new optimizer is a class here or in a plugin, with its fields and a method `build` that returns the torch optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from llmtrain.base.choice import BELOW_1, NOT_NEGATIVE, POSITIVE, Bound, Choice, Rule, bounded, joined, mapped

PARAM = "param"
"""Kind of the fp32 masters in an optimizer's state; the other kinds are the optimizer's names of its moments
(`state`)."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of parameters with their own settings."""

    name: str
    parameters: Iterable[Any]
    """The group's parameters; some may not train."""
    settings: Mapping[str, Any]
    """Settings as `Optimizer.group` returns them, such as `{**self.group(), "lr": 1e-3}`."""
    state: tuple[str, ...] = ()
    """Kinds of tensors that are kept for each parameter; empty: as for parameters outside of groups."""
    scale: float = 1.0
    """Factor on the learning rate. Weight decay is not multiplied by it."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Choice, section="optim"):
    """The optimizer. Fields that the JSON may give are None until `config/deepspeed/join.py` has joined YAML and
    JSON."""

    own_methods: ClassVar[frozenset[str]] = frozenset({"build_on_host"})
    """Methods that are called only on llmtrain's own classes."""
    title: ClassVar[str] = "optimizer of a plugin"
    """Name of the optimizer in messages."""
    json_types: ClassVar[tuple[str, ...]] = ()
    """Values of `optimizer.type` in a DeepSpeed JSON for this optimizer, in any case; llmtrain writes the last one."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Further keys of `optimizer.params` that the JSON may have, with the only value that is allowed."""
    state: ClassVar[tuple[str, ...]] = ()
    """Kinds of tensors that may be kept for a parameter, named as in checkpoints."""
    state_of_groups: ClassVar[tuple[str, ...]] = ()
    """The kinds in `state` that only parameters of `groups` have."""
    moments: ClassVar[int] = 2
    """Largest number of moments of one parameter."""
    host_ops: ClassVar[tuple[str, ...]] = ()
    """DeepSpeed's ops that are compiled at the start if the optimizer's state is offloaded; without any, torch's code
    runs."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Settings with which this optimizer cannot train. `broken` gets the run's mix (config/topology.py)."""
    whole_gradients: ClassVar[bool] = False
    """The optimizer needs complete gradients: with ZeRO 3, zero_optimization.reduce_scatter is false by default."""
    counts_steps: ClassVar[bool] = False
    """The torch optimizer counts the steps of each tensor, as "step" in the tensor's state."""
    by_sign: ClassVar[bool] = False
    """A step uses the sign of an average of gradients, which rounding alone may decide."""
    norm_of_update: ClassVar[bool] = False
    """Under ZeRO, DeepSpeed measures and clips the norm of the optimizer's update instead of the gradient's."""

    name: str = field(init=False)
    """Or from the JSON (optimizer.type)."""
    lr: float = joined(3e-4, "optimizer.params.lr", Bound(above=0, at_most=1), "3e-4 is the default")
    """Peak learning rate (of AdamW). Or from the JSON."""
    betas: tuple[float, float] = joined((0.9, 0.95), "optimizer.params.betas", BELOW_1, "[0.9, 0.95]")
    """Decay rates of the moments. Or from the JSON."""
    weight_decay: float = joined(
        0.1, "optimizer.params.weight_decay", NOT_NEGATIVE, "0.1 is the default, 0 turns it off"
    )
    """Decoupled weight decay. Or from the JSON."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters that decay: matrices, or biases, norms and other vectors as well (one group, as in plain AdamW)."""
    weight_decay_of: dict[str, float] = mapped("PATTERN: WEIGHT DECAY", NOT_NEGATIVE, "0 turns it off")
    """PATTERN: WEIGHT DECAY of parameters whose Hugging Face names match (`*`, `?`, `[...]`), instead of `decay` and
    `weight_decay`. Each pattern must match a trained parameter."""
    lr_factor_of: dict[str, float] = mapped("PATTERN: FACTOR", POSITIVE, "model.freeze keeps parameters as they are")
    """PATTERN: FACTOR on the learning rate of parameters whose names match. The logged rate is without the factor."""
    layer_decay: float = bounded(1.0, Bound(above=0, at_most=1), "0.9 is common, 1 means none")
    """Layer-wise learning rates: decoder layer i of n, counted from 0, has the rate times layer_decay^(n - 1 - i),
    embeddings times layer_decay^n. Head, final norm and the logged rate are without this factor. 1 = none."""
    clip_norm: float = joined(1.0, "gradient_clipping", NOT_NEGATIVE, "1.0 is the default, 0 turns it off")
    """Largest global gradient norm; 0 = no clipping. The default of muon is 0. Or from the JSON (gradient_clipping)."""

    @property
    def has_own_settings(self) -> bool:
        """Return True if single parameters have their own learning rate or weight decay."""
        return self.layer_decay != 1.0 or bool(self.lr_factor_of or self.weight_decay_of)

    def group(self) -> dict[str, Any]:
        """Return the settings of parameters outside of `groups`, without weight decay; `lr` is the peak, which the
        schedule multiplies."""
        return {"lr": self.lr, "betas": self.betas}

    def groups(self, model: Any) -> Iterable[Group]:
        """Return the parameters that have their own settings; all others have those of `group`.

        Args:
            model: `model.hf` is the Hugging Face model, in a pipeline this rank's part; `model.matrices()` yields the
                matrices of its decoder layers (`LanguageModel.matrices`). Values of a parameter may be on other ranks.
        """
        return ()

    def build(self, groups: list[dict[str, Any]]) -> Any:
        """Return the torch optimizer of these groups.

        A plugin's optimizer must update each element independently. It may keep tensors of the parameter's shape that
        begin at 0, named in `state`.

        Args:
            groups: torch's parameter groups, each with `params`, `weight_decay` and the settings of `group` or
                `groups`. The schedule sets `lr` before each step.
        """
        raise NotImplementedError("an optimizer needs a method build(groups)")

    def build_on_host(self, groups: list[dict[str, Any]]) -> Any:
        """Return DeepSpeed's CPU optimizer for these groups, with state on the host. Compiles the ops in `host_ops`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer, choice="adamw"):
    """AdamW."""

    title = "AdamW"
    json_types: ClassVar[tuple[str, ...]] = ("Adam", "AdamW")
    fixed: ClassVar[Mapping[str, Any]] = {
        "adam_w_mode": True,
        "bias_correction": True,
        "amsgrad": False,
        "fp32_optimizer_states": True,
    }
    state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    moments = 2
    host_ops: ClassVar[tuple[str, ...]] = ("cpu_adam",)
    counts_steps = True

    eps: float = joined(1e-8, "optimizer.params.eps", POSITIVE, "1e-8 is the default")
    """AdamW's epsilon. Or from the JSON."""

    def group(self) -> dict[str, Any]:
        return {**super().group(), "eps": self.eps}

    def build(self, groups: list[dict[str, Any]]) -> Any:
        import torch

        return torch.optim.AdamW(groups, fused=True)

    def build_on_host(self, groups: list[dict[str, Any]]) -> Any:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True)


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW, choice="muon"):
    """Muon for the decoder layers' matrices, AdamW for the rest."""

    title = "Muon"
    json_types: ClassVar[tuple[str, ...]] = ("Muon",)
    state: ClassVar[tuple[str, ...]] = (*AdamW.state, "momentum_buffer")
    state_of_groups: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    host_ops: ClassVar[tuple[str, ...]] = ()
    norm_of_update = True
    whole_gradients = True
    # fmt: off
    rules = (
        Rule(("optim.name", "optim.clip_norm"), lambda m: m.clip_norm > 0,
             "Muon's update has its own norm, which DeepSpeed's ZeRO would clip instead of the gradient's",
             "set optim.clip_norm to 0 (Muon does not need it), or use adamw",
             {"optim.name": "muon", "optim.clip_norm": 1.0}),
        Rule(("optim.name", "zero_optimization.offload_optimizer.device"), lambda m: m.offload_optimizer,
             "Muon orthogonalises full matrices, which needs the device", "remove offload_optimizer, or use adamw",
             {"optim.name": "muon", "zero_optimization.offload_optimizer.device": "cpu"}),
        Rule(("optim.name", "zero_optimization.reduce_scatter"), lambda m: m.zero_stage == 3 and m.reduce_scatter,
             "Muon needs full gradients, but ZeRO 3 would scatter them",
             "set zero_optimization.reduce_scatter to false, or remove it",
             {"optim.name": "muon", "zero_optimization.stage": 3, "zero_optimization.reduce_scatter": True}),
        Rule(("optim.name", "data_types.grad_accum_dtype"),
             lambda m: m.bf16 and m.zero_stage == 1 and m.fp32_accumulation,
             "DeepSpeed rounds Muon's gradients to bf16 there in spite of this key (copy_grads_in_partition)",
             "remove data_types, or use ZeRO 2, or adamw",
             {"optim.name": "muon", "zero_optimization.stage": 1, "data_types.grad_accum_dtype": "fp32"}),
        Rule(("bf16.bf16_optimizer_states", "optim.name"), lambda m: m.bf16_moments,
             "Muon's momentum is kept by DeepSpeed, in its own precision", "remove it, or use adamw or lion",
             {"optim.name": "muon", "bf16.bf16_optimizer_states": True}),
        Rule(("tensor_parallel.autotp_size", "optim.name"), lambda m: m.degrees.tensor > 1,
             "Muon orthogonalises full matrices, but each tensor-parallel rank has only a part of them",
             "use adamw, or set tensor_parallel.autotp_size to 1",
             {"optim.name": "muon", "tensor_parallel.autotp_size": 2}),
        Rule(("expert_parallel.autoep_size", "optim.name"), lambda m: m.degrees.expert > 1,
             "checkpoints cannot read Muon's momentum of experts that ranks share",
             "use adamw, or remove expert_parallel", {"optim.name": "muon", "expert_parallel.autoep_size": 2}),
    )
    # fmt: on

    muon_lr: float = joined(0.02, "optimizer.params.muon_lr", Bound(above=0, at_most=10), "0.02 is the default")
    """Peak learning rate of the Muon group. Or from the JSON."""
    muon_momentum: float = joined(0.95, "optimizer.params.momentum", BELOW_1, "0.95 is the default")
    """Momentum of Muon. Or from the JSON."""
    clip_norm: float = joined(0.0, "gradient_clipping", NOT_NEGATIVE, "0 is the default of muon")

    def group(self) -> dict[str, Any]:
        return {**super().group(), "use_muon": False}

    def groups(self, model: Any) -> Iterable[Group]:
        settings = {"lr": self.muon_lr, "momentum": self.muon_momentum, "use_muon": True}
        for matrix, rows, columns, turned in model.matrices():
            # DeepSpeed scales Muon's updates by sqrt(max(1, rows / columns)), but Muon's definition has outputs /
            # inputs. If the rows are inputs, the correct factor is always sqrt(outputs / inputs) times DeepSpeed's.
            scale = math.sqrt(columns / rows) if turned else 1.0
            yield Group(name="muon", parameters=[matrix], settings=settings, state=self.state_of_groups, scale=scale)

    def build(self, groups: list[dict[str, Any]]) -> Any:
        import torch
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        return MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True})


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer, choice="lion"):
    """Lion."""

    title = "Lion"
    json_types: ClassVar[tuple[str, ...]] = ("Lion",)
    fixed: ClassVar[Mapping[str, Any]] = {"fp32_optimizer_states": True}
    state: ClassVar[tuple[str, ...]] = ("exp_avg",)
    moments = 1
    host_ops: ClassVar[tuple[str, ...]] = ("cpu_lion",)
    counts_steps = True
    by_sign = True

    def build(self, groups: list[dict[str, Any]]) -> Any:
        from llmtrain.optim import lion

        return lion.Lion(groups)

    def build_on_host(self, groups: list[dict[str, Any]]) -> Any:
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(groups)


def norm_of(name: str | None, *, zero: bool) -> Literal["gradient", "update"]:
    """Return whose norm the metric `grad_norm` is. `name`: `optim.name`, or None. `zero`: the run uses ZeRO 1, 2 or
    3."""
    entry = Optimizer.CHOICES.get(name or "")
    return "update" if zero and entry is not None and entry.norm_of_update else "gradient"
