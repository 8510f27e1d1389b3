"""The number of layers for model.recompute.layers: auto: as few as the device's memory asks for.

Bytes of a micro-batch's activations are counted on tensors without memory (torch's FakeTensorMode). The tensors say
that they are on a CPU, whose attention kernel keeps what a GPU's flash kernel keeps. Layers are counted without
torch.compile and fp8, with which they keep less. Losses of an allocator are not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from llmtrain.base import units
from llmtrain.config.planned import stored
from llmtrain.config.run import ModelConfig, RecomputeConfig, ResolvedRun, RunConfig
from llmtrain.config.topology import Degrees, ranks_of_this_host
from llmtrain.engine.dist.control import from_all, from_rank_0
from llmtrain.engine.dist.device import memory_of
from llmtrain.engine.dist.ranks import Ranks
from llmtrain.models.distillation import TeacherSays, Terms, TopWords
from llmtrain.models.head import Head, Loss
from llmtrain.models.run.build_for_rank import build_model
from llmtrain.models.spec import ModelSpec
from llmtrain.models.transformers_private import OperatorMode, storage_of, without_memory
from llmtrain.objectives.by_token import Distill, NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.training.examine import bytes_of_a_rank

if TYPE_CHECKING:
    from llmtrain.models.teacher import Teacher

MARGIN = 0.1
"""Share of what is free that stays so: fragments, the communication library's buffers, kernels' working memory."""
_BUCKET = 500_000_000
"""Elements: DeepSpeed's default of reduce_bucket_size."""
_LIVE = 1_050_000_000
"""Elements: DeepSpeed's defaults of stage3_max_live_parameters and stage3_prefetch_bucket_size; compiled layers have
room for two of them (engine/deepspeed/build.py)."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of a micro-batch's activations."""

    kept: int
    """Alive between its forward and its backward pass."""
    most: int
    """Largest number alive at one time in either."""


Keep = Literal["attention"] | None
Count = Callable[[int | Literal["all"] | None, Keep], Activations]


def decide_recomputation(resolved: ResolvedRun, spec: ModelSpec, ranks: Ranks) -> tuple[ResolvedRun, list[str]]:
    """Replace auto by a number, the same on all ranks, before the model exists: that of a plan for no
    larger device, else by a count. Returns a note with the bytes."""
    planned = from_rank_0(ranks, lambda: stored(resolved, on_gpu=ranks.device.type == "cuda"))
    least = min(from_all(ranks, memory_of(ranks.device)))
    # A driver takes up to 2 % of the memory that a device's name promises.
    if planned is not None and planned.recompute is not None and least >= 0.98 * (planned.memory or math.inf):
        chosen = RecomputeConfig(**planned.recompute)
        return recomputing(resolved, chosen), [
            f"model.recompute.layers auto: {chosen.layers or 'none'}: {planned.text()}"
        ]
    chosen, note = layers_for(min(from_all(ranks, free_bytes(ranks.device))), resolved, spec)
    return recomputing(resolved, chosen), [note]


def recomputing(resolved: ResolvedRun, chosen: RecomputeConfig) -> ResolvedRun:
    """The run with this recomputation instead of auto."""
    mix = replace(resolved.mix, recomputes=chosen.layers is not None, keep_attention=chosen.keep is not None)
    run = replace(resolved.run, model=replace(resolved.run.model, recompute=chosen))
    return replace(resolved, run=run, mix=mix)


def layers_for(free: int, resolved: ResolvedRun, spec: ModelSpec) -> tuple[RecomputeConfig, str]:
    """Return the layers to recompute with `free` bytes on a rank, and a note with the numbers."""
    others = held_bytes(resolved, spec)
    chosen, words = fewest_layers(
        lambda layers, keep: count_activations(resolved, spec, layers, keep),
        spec.facts.layers,
        free * (1 - MARGIN) - others,
        keeps(resolved),
    )
    note = (
        f"model.recompute.layers auto: {words}. Counted: {units.size(free)} free, {MARGIN:.0%} of it left alone; "
        f"{units.size(others)} of weights, gradients, optimizer state and DeepSpeed's buffers"
    )
    return chosen, note


def keeps(resolved: ResolvedRun) -> tuple[Keep, ...]:
    """Choices for the results that recomputed layers keep, in order of preference. Attention's take one of 24 tensors
    in a layer of Llama 3 8B, and spare the only kernel that grows with the square of the length."""
    model = resolved.run.model
    if model.recompute.keep is not None:
        return (model.recompute.keep,)
    return ("attention", None) if model.attention in ("auto", "sdpa", "varlen") else (None,)


def fewest_layers(count: Count, layers: int, room: float, kept: tuple[Keep, ...]) -> tuple[RecomputeConfig, str]:
    """Return the fewest layers whose recomputation lets activations fit into `room` bytes, and the numbers in words.
    `kept`: choices for kept results; if none fits, the last one is used with all layers."""
    plain = count(None, None)
    if plain.most <= room:
        return RecomputeConfig(), f"none of {layers} layers, whose activations take {units.size(plain.most)}"
    for keep in kept:
        every = count("all", keep)
        freed = (plain.kept - every.kept) / layers
        if every.most <= room and freed > 0:
            # The backward pass begins with all that is kept, less what the recomputed layers have freed by then.
            fewest = min(layers, -int(-(plain.most - room) // freed))
            chosen = RecomputeConfig(layers=fewest, keep=keep)
            return chosen, (
                f"{fewest} of {layers} layers{', attention kept' if keep else ''}: activations take "
                f"{units.size(plain.most)} without, each of these frees {units.size(freed)}"
            )
    return RecomputeConfig(layers="all", keep=kept[-1]), (
        f"all {layers} layers, and by this count that is not enough: activations still take {units.size(every.most)}"
    )


def free_bytes(device: torch.device) -> int:
    """Free memory on this rank's device, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // ranks_of_this_host()


def held_bytes(resolved: ResolvedRun, spec: ModelSpec) -> float:
    """Estimate the bytes on a rank's device without activations: the model and its optimizer, first values for an
    online reference, DeepSpeed's buffers. (A teacher is loaded before free bytes are measured.)"""
    mix, facts = resolved.mix, spec.facts
    held = bytes_of_a_rank(resolved, facts)
    on_host = {"optimizer"} if mix.offload_optimizer else set()
    on_host |= {"weights"} if mix.offload_param else set()
    zero = resolved.deepspeed.get("zero_optimization") or {}
    # A bucket of gradients and its copy, in fp32 if they are summed so.
    bucket = min(facts.trained, zero.get("reduce_bucket_size", _BUCKET)) * (8 if mix.zero_stage > 0 else 0)
    live = zero.get("stage3_max_live_parameters", max(_LIVE, 2 * facts.parameters // facts.layers))
    live = live if mix.zero_stage == 3 else 0
    wide = 4 if mix.precision == "fp32" else 2
    gathered = min(facts.parameters, live) * wide
    began = 0.0
    if resolved.run.objective.reference == "online":  # training/setup.py base_of
        shards = resolved.degrees.world_size if mix.zero_stage == 3 else 1
        began = wide * sum(math.prod(spec.shapes[name]) for name in spec.saved) / shards
    return sum(size for kind, size in held.items() if kind not in on_host) + began + bucket + gathered


class LiveBytes(OperatorMode):
    """Counts the live bytes of storages made inside the context, without those of `others`, and their peak."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self.most = self._now = 0
        self.ran: Counter[str] = Counter()
        """Counts of operators by name."""
        self._others = {storage_of(tensor) for tensor in others}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.ran[function.overloadpacket.__name__] += 1
        self.add(made)
        return made

    def add(self, made: Any) -> None:
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage_of(tensor), storage.nbytes()
                held = self._live.get(key)
                if key in self._others or (held is not None and not held[0].expired()):
                    continue
                self._live[key] = StorageWeakRef(storage), size
                self._now += size - (0 if held is None else held[1])
        if self._now > self.most:  # freed storages are searched only when it matters
            self.most = max(self.most, self.now())

    def now(self) -> int:
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self._now = sum(size for _, size in self._live.values())
        return self._now


def count_activations(
    resolved: ResolvedRun, spec: ModelSpec, layers: int | Literal["all"] | None, keep: Literal["attention"] | None
) -> Activations:
    """Count activations for this rank's share of the largest micro-batch, with `layers` recomputed; without pipeline,
    tensor and expert parallelism, offload and packed weights, which refuse `auto`."""
    run, mix = resolved.run, resolved.mix
    again = RecomputeConfig(layers=layers, keep=keep)
    model = replace(run.model, recompute=again, compile_layers=False, fp8=None)
    alone = replace(
        resolved,
        run=replace(run, model=model),
        mix=replace(mix, zero_stage=0, degrees=Degrees(), recomputes=layers is not None, keep_attention=bool(keep)),
    )
    if model.attention.startswith("flash"):  # a package for GPUs, whose kernel keeps the same tensors as sdpa
        spec = replace(spec, model=replace(spec.model, attention="sdpa"))
    sizes = ((stage.batch.micro_batch, stage.data.sequence_length) for stage in resolved.stages)
    rows, length = max(sizes, key=lambda size: (size[0] * size[1], size[1]))
    tokens = length // mix.degrees.sequence
    module: Any = build_model(alone, spec, torch.device("meta"), None).train()  # type: ignore[arg-type]
    teacher = _teacher(run, spec.model, mix.precision)
    with without_memory():
        module.to_empty(device="cpu")
        parameters = list(module.parameters())
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        inputs = torch.zeros(rows, tokens, dtype=torch.int64)
        positions = torch.zeros_like(inputs) if run.data.isolate_documents else None
        others = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        if teacher is not None:
            others += teacher.to_empty("cpu")
        with LiveBytes(others) as live:
            of_hidden = _loss(run.objective, spec, teacher, inputs, positions)
            loss = module(inputs, of_hidden, positions)
            kept = live.now()
            loss.backward()
    return Activations(kept=kept, most=live.most)


def _teacher(run: RunConfig, student: ModelConfig, precision: str) -> Teacher | None:
    if run.objective.teacher is None or run.objective.top_k is not None:
        return None
    from llmtrain.models.teacher import empty_teacher, teacher_model

    return empty_teacher(ModelSpec.of(teacher_model(run.objective, student)), precision, torch.device("meta"))


def _loss(
    objective: Objective, spec: ModelSpec, teacher: Teacher | None, inputs: Tensor, positions: Tensor | None
) -> Loss:
    """Substitute for a run's loss function with the same large tensors (tokens x vocabulary, hidden states). An
    objective's own terms of the tokens' likelihoods are small, and may be a plugin's."""
    column = None if objective.top_k is None else _column(inputs, objective.top_k)

    def of_hidden(head: Head, hidden: Tensor) -> Tensor:
        if spec.scores:  # a reward model reads one place of each text
            return hidden.sum()
        if isinstance(objective, Distill):
            terms = Terms(beta=objective.beta, temperature=objective.temperature, alpha=objective.alpha)
            says = column if teacher is None else teacher.logits(inputs, positions)
            assert says is not None
            return head.distilled_sums(hidden, inputs, says, terms)[0]
        if isinstance(objective, NextToken) and objective.z_loss:
            return head.nll_sums(hidden, inputs, None, objective.z_loss)[0]
        if isinstance(objective, NextToken):
            return head.nll_sum(hidden, inputs)
        return head.token_nll(hidden, inputs).sum()

    return of_hidden


def _column(inputs: Tensor, top_k: int) -> TeacherSays:
    """A teacher's column of the data, alive until the backward pass has ended."""
    words = inputs.new_zeros(inputs.numel(), top_k)
    return TopWords(words=words, logs=torch.zeros(inputs.numel(), top_k + 1)).of
