"""Degrees of parallelism, and the table of legal combinations with other settings. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from llmtrain.base.choice import Rule
from llmtrain.base.errors import number_in
from llmtrain.base.threads import usable_cores
from llmtrain.optim.optimizers import Optimizer


def ranks_of_this_host() -> int:
    """Return the number of ranks on this host from DeepSpeed's or torchrun's environment; 1 without a launcher."""
    named = next((name for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE") if os.environ.get(name)), "WORLD_SIZE")
    return number_in(named, 1)


def cores_of_a_rank() -> int:
    """Return the cores that this process may use, divided by the ranks of this host; at least 1."""
    return max(1, usable_cores() // ranks_of_this_host())


@dataclass(frozen=True, kw_only=True)
class Place:
    """Coordinates of a rank: its index along each form of parallelism."""

    pipeline: int
    data: int
    sequence: int
    tensor: int

    @property
    def leads(self) -> bool:
        """True for one of the ranks that work on the same sequences, so that sums over these ranks count each once."""
        return self.pipeline == self.sequence == self.tensor == 0


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The number of ranks in each form of parallelism.

    Ranks are numbered with the tensor index running fastest, then sequence, data and pipeline (as DeepSpeed does):
    tensor-parallel ranks are neighbours on the fastest links, pipeline stages may be far apart.
    """

    pipeline: int = 1
    """Stages."""
    data: int = 1
    """Groups of ranks that see different sequences."""
    sequence: int = 1
    """Ranks that share each sequence."""
    tensor: int = 1
    """Ranks that share each matrix."""
    expert: int = 1
    """Ranks that share each layer's experts: a divisor of `data` times `sequence`, so no factor of the world size."""

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.sequence * self.tensor

    def place(self, rank: int) -> Place:
        assert 0 <= rank < self.world_size, (rank, self)
        rest, tensor = divmod(rank, self.tensor)
        rest, sequence = divmod(rest, self.sequence)
        pipeline, data = divmod(rest, self.data)
        return Place(pipeline=pipeline, data=data, sequence=sequence, tensor=tensor)

    def rank(self, place: Place) -> int:
        return ((place.pipeline * self.data + place.data) * self.sequence + place.sequence) * self.tensor + place.tensor

    def groups(self, *along: str) -> list[list[int]]:
        """Return all groups of ranks that differ only in the given indices, such as groups("data", "sequence")."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.place(rank)
            fixed = tuple(getattr(place, name) for name in _AXES if name not in along)
            found.setdefault(fixed, []).append(rank)
        return list(found.values())


_AXES = ("pipeline", "data", "sequence", "tensor")


@dataclass(frozen=True, kw_only=True)
class Mix:
    """How a run computes: ZeRO stage, precision, degrees of parallelism, and other settings that their rules need."""

    zero_stage: int = 0
    fp16: bool = False
    bf16: bool = False
    autocast: bool = False
    """torch.autocast computes products in bf16, and parameters are fp32 (`torch_autocast` of the JSON)."""
    offload_optimizer: bool = False
    offload_param: bool = False
    swaps: int = 0
    """Buffers in host memory, each as large as the largest sub-group, for an optimizer offloaded to a disk; 0: the
    state stays in host memory."""
    weights_on_disk: bool = False
    """The offloaded parameters lie on a disk, not in host memory."""
    compile_layers: bool = False
    fp8: bool = False
    mlp_tiles: bool = False
    layer_inputs_on_host: bool = False
    keep_attention: bool = False
    recomputes: bool = False
    """Some decoder layers are recomputed (model.recompute.layers, or the JSON's `activation_checkpointing`)."""
    optimizer: str = "adamw"
    """`optim.name`."""
    own_settings: bool = False
    """Single parameters have a learning rate or weight decay of their own."""
    clip_norm: float = 0.0
    reduce_scatter: bool | None = None
    """As the JSON says; None = DeepSpeed's default, true."""
    contiguous_gradients: bool | None = None
    """As the JSON says; None = DeepSpeed's default, true."""
    fp32_accumulation: bool = False
    bf16_moments: bool = False
    profiled: bool = False
    """The JSON asks for `flops_profiler` or `wall_clock_breakdown`, which both start DeepSpeed's timers of a step."""
    hpz: bool = False
    """Secondary copies of ZeRO 3's shards within groups of neighbouring ranks (ZeRO++)."""
    beta: float = 0.0
    """The larger of optim.betas."""
    degrees: Degrees = Degrees()

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The precision of the parameters."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"

    @property
    def products(self) -> Literal["fp32", "bf16", "fp16"]:
        """The precision of matrix products, which decides how much a forward pass rounds."""
        return "bf16" if self.autocast else self.precision

    @property
    def arithmetic(self) -> str:
        """Name of `precision`, with that of `products` if they differ."""
        return (
            f"{self.precision} with products in {self.products} (torch.autocast)" if self.autocast else self.precision
        )

    @property
    def moments(self) -> dict[str, str]:
        """Precision of the optimizer's moments for a checkpoint's layout; empty if it is fp32."""
        return {"moments": "bf16"} if self.bf16_moments else {}

    @property
    def may_compile_layers(self) -> bool:
        """True if no rule forbids model.compile_layers; the device may still forbid it."""
        return not any("model.compile_layers" in rule.keys for rule in clashes(replace(self, compile_layers=True)))


_ZERO, _OFFLOAD = "zero_optimization.stage", "zero_optimization.offload_optimizer.device"
_TENSOR, _EXPERT = "tensor_parallel.autotp_size", "expert_parallel.autoep_size"
_COPIES, _MOMENTS = "zero_optimization.zero_hpz_partition_size", "bf16.bf16_optimizer_states"
_ON_HOST, _AUTOCAST = "activation_checkpointing.cpu_checkpointing", "torch_autocast.enabled"

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(("fp16.enabled", "bf16.enabled"), lambda m: m.fp16 and m.bf16, "only one of fp16 and bf16 can be enabled",
         "set one of them to false (bf16 on Ampere and later: it needs no loss scaling)",
         {"fp16.enabled": True, "bf16.enabled": True}),
    *(Rule((_AUTOCAST, f"{name}.enabled"), lambda m, name=name: m.autocast and getattr(m, name),  # type: ignore[misc]
           f"autocast is for parameters in fp32, and {name} rounds them",
           "set one of them to false",
           {_AUTOCAST: True, "bf16.enabled": False, f"{name}.enabled": True})
      for name in ("bf16", "fp16")),
    *(Rule((_AUTOCAST, key), lambda m, name=name: m.autocast and getattr(m.degrees, name) > 1,  # type: ignore[misc]
           "ranks that share a sequence, a layer or its maps send hidden states of one dtype, and under autocast a "
           "layer has two", "use the bf16 section, or ZeRO alone", {_AUTOCAST: True, "bf16.enabled": False, key: 2})
      for name, key in (("pipeline", "pipeline.stages"), ("tensor", _TENSOR), ("sequence", "sequence_parallel_size"),
                        ("expert", _EXPERT))),
    Rule((_AUTOCAST, "model.mlp_tile_tokens"), lambda m: m.autocast and m.mlp_tiles,
         "MLPs in slices (model.mlp_tile_tokens) run again in a backward pass of their own, outside of autocast",
         "use the bf16 section, or set model.mlp_tile_tokens to null",
         {_AUTOCAST: True, "bf16.enabled": False, "model.mlp_tile_tokens": 64}),
    Rule((_AUTOCAST, "model.fp8"), lambda m: m.autocast and m.fp8, "products are in bf16 or in fp8",
         "use the bf16 section with model.fp8, or set model.fp8 to null",
         {_AUTOCAST: True, "bf16.enabled": False, "model.fp8": "rowwise"}),
    Rule(("zero_optimization.offload_param.device", _ZERO), lambda m: m.offload_param and m.zero_stage != 3,
         "only ZeRO 3 partitions parameters, so only it can offload them",
         "set zero_optimization.stage to 3, or remove offload_param",
         {"zero_optimization.offload_param.device": "cpu", _ZERO: 2}),
    Rule((_OFFLOAD, _ZERO), lambda m: m.offload_optimizer and m.zero_stage < 1, "only ZeRO can offload the optimizer",
         "set zero_optimization.stage to 1, 2 or 3, or remove offload_optimizer", {_OFFLOAD: "cpu", _ZERO: 0}),
    Rule((_MOMENTS, _OFFLOAD), lambda m: m.bf16_moments and m.offload_optimizer,
         "DeepSpeed's CPU optimizers keep moments in bf16 only if master weights are bf16 too", "remove one of them",
         {_MOMENTS: True, _OFFLOAD: "cpu"}),
    Rule((_MOMENTS, "optim.betas"), lambda m: m.bf16_moments and m.beta > 1 - 2**-8,
         "bf16 has 8 significant bits: with larger betas the decrease of a moment in a step is rounded away, so it "
         "never falls",
         "use betas of at most 0.996, such as [0.9, 0.95], or remove bf16_optimizer_states",
         {_MOMENTS: True, "optim.betas": [0.9, 0.999]}),
    Rule(("model.mlp_tile_tokens", "model.compile_layers"), lambda m: m.mlp_tiles and m.compile_layers,
         "MLPs in slices (model.mlp_tile_tokens) have a backward pass of their own, which torch.compile cannot trace",
         "set one of them to null or false", {"model.mlp_tile_tokens": 64, "model.compile_layers": True}),
    Rule((_ON_HOST, "model.compile_layers"), lambda m: m.layer_inputs_on_host and m.compile_layers,
         "the layers' inputs go to the host in hooks that torch.compile cannot trace: nothing would be compiled",
         "set one of them to false", {_ON_HOST: True, "model.compile_layers": True}),
    Rule(("model.fp8", "fp16.enabled"), lambda m: m.fp8 and m.fp16, "fp8 products with a scale for each row have "
                                                                    "bf16 results only",
         "use the bf16 section, or set model.fp8 to null",
         {"model.fp8": "rowwise", "fp16.enabled": True, "bf16.enabled": False}),
    Rule(("model.fp8", _TENSOR), lambda m: m.fp8 and m.degrees.tensor > 1,
         "maps that tensor-parallel ranks share cannot multiply in fp8",
         "set model.fp8 to null, or use ZeRO 3 instead of tensor_parallel", {"model.fp8": "rowwise", _TENSOR: 2}),
    Rule(("model.recompute.keep", "model.recompute.layers"), lambda m: m.keep_attention and not m.recomputes,
         "it says what a recomputed layer keeps, and no layer is recomputed",
         "set model.recompute.layers to all or a number, or remove model.recompute.keep",
         {"model.recompute.keep": "attention"}),
    # Tried on 4 ranks, tensor 2: groups of 2 gave a second forward pass another loss (6.2316, then 6.2069), groups
    # of 4 an error in its all-gather; without tensor parallelism losses are plain PyTorch's within 1e-6.
    Rule((_COPIES, _TENSOR), lambda m: m.hpz and m.zero_stage == 3 and m.degrees.tensor > 1,
         "DeepSpeed keeps second copies on neighbouring ranks, but tensor-parallel neighbours hold other parts of each "
         "matrix: the second forward pass would read wrong weights", "remove one of them",
         {_COPIES: 2, _ZERO: 3, _TENSOR: 2}),
    Rule(("pipeline.stages", _ZERO), lambda m: m.degrees.pipeline > 1 and m.zero_stage >= 2,
         "a pipeline accumulates whole gradients over its micro-batches; ZeRO 2 and 3 partition them",
         "use zero_optimization.stage 0 or 1 with a pipeline, or no pipeline", {"pipeline.stages": 2, _ZERO: 2}),
    Rule(("pipeline.stages", "flops_profiler.enabled", "wall_clock_breakdown"),
         lambda m: m.degrees.pipeline > 1 and m.profiled,
         "DeepSpeed's pipeline starts the timer of a backward pass twice, and ends in an assertion",
         "remove them with a pipeline; `llmtrain report` draws what a step spends its time on",
         {"pipeline.stages": 2, "wall_clock_breakdown": True}),
    Rule(("pipeline.stages", _OFFLOAD), lambda m: m.degrees.pipeline > 1 and m.offload_optimizer and m.own_settings,
         "to compute the gradient norm of an offloaded optimizer, DeepSpeed needs as many groups of parameters on "
         "each pipeline stage, but optim.layer_decay, lr_factor_of and weight_decay_of make different groups on each",
         "remove offload_optimizer, or these keys of optim",
         {"pipeline.stages": 2, _OFFLOAD: "cpu", "optim.layer_decay": 0.9}),
    Rule(("sequence_parallel_size", "pipeline.stages"), lambda m: m.degrees.sequence > 1 and m.degrees.pipeline > 1,
         "DeepSpeed's pipeline numbers its ranks by stage, data and tensor only: gradients would be averaged over the "
         "wrong ranks",
         "set one of them to 1 or remove it; ZeRO 3 with sequence_parallel_size holds long rows and large models",
         {"sequence_parallel_size": 2, "pipeline.stages": 2}),
    Rule((_EXPERT, _TENSOR), lambda m: m.degrees.expert > 1 and m.degrees.tensor > 1,
         "DeepSpeed 0.19 can share experts only with its own tensor parallelism, not with llmtrain's "
         "(runtime/engine.py _configure_expert_parallel)",
         "set one of them to 1 or remove it; ZeRO 3 partitions what is not an expert", {_EXPERT: 2, _TENSOR: 2}),
    Rule((_EXPERT, "model.compile_layers"), lambda m: m.degrees.expert > 1 and m.compile_layers,
         "in the middle of a layer the host reads how many tokens each expert gets, and torch.compile cannot trace "
         "that",
         "set model.compile_layers to false", {_EXPERT: 2, "model.compile_layers": True}),
    # DeepSpeed asserts against these while it builds the optimizer, but for one: ZeRO 1 without contiguous gradients
    # sums an expert's gradient with those of other experts.
    *(Rule((f"zero_optimization.{name}", _EXPERT, _ZERO),
           lambda m, name=name: m.degrees.expert > 1  # type: ignore[misc]
                                and m.zero_stage in (1, 2) and getattr(m, name) is False,
           "ZeRO 1 and 2 need contiguous buffers and reduce-scatter to sum the gradients of experts that ranks share",
           "remove the key, or expert_parallel", {f"zero_optimization.{name}": False, _EXPERT: 2, _ZERO: 1})
      for name in ("reduce_scatter", "contiguous_gradients")),
    Rule((_COPIES, _EXPERT, _ZERO), lambda m: m.degrees.expert > 1 and m.zero_stage == 3 and m.hpz,
         "DeepSpeed's ZeRO 3 has no second copies of experts that ranks share", "remove the key, or expert_parallel",
         {_COPIES: 2, _EXPERT: 2, _ZERO: 3}),
)
# fmt: on
"""Rules of all mixes; each optimizer has some of its own (`Optimizer.rules`)."""


def clashes(mix: Mix) -> list[Rule]:
    return [rule for rule in (*RULES, *Optimizer.CHOICES[mix.optimizer].rules) if rule.broken(mix)]
