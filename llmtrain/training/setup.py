"""Sets up a run: mesh, teacher, objective, engine, weights, proofs, session, in this order.

A run, a parity check, a plan, `llmtrain reference` and the tests all use `Setup`, so a check tests what a run does.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain import features
from llmtrain.base.errors import ConfigError, DataError, ModelError, UserError
from llmtrain.config.plugins import is_of_plugin
from llmtrain.config.problems import Problems
from llmtrain.config.rules import check_masks
from llmtrain.config.run import ModelConfig, Run, RunConfig
from llmtrain.config.topology import Mix
from llmtrain.data.batches import MicroBatch
from llmtrain.data.manifest import NEW_COLUMN
from llmtrain.data.stream.loader import Course, TrainLoader
from llmtrain.data.stream.train_data import RunData
from llmtrain.engine import progress
from llmtrain.engine.api import Engine, ForwardCopy
from llmtrain.engine.deepspeed.build import build_engine
from llmtrain.engine.deepspeed.patches import apply_group_timeout
from llmtrain.engine.losses.function import NEXT_TOKEN, LossFunction, NextTokenLoss
from llmtrain.engine.losses.named import loss_of, with_reference
from llmtrain.engine.losses.with_metrics import with_metrics
from llmtrain.engine.ranks.device import check_device
from llmtrain.engine.ranks.ranks import AgreedError, Ranks
from llmtrain.engine.weights import fill_parameters, prove_masters, prove_weights
from llmtrain.models import compiler
from llmtrain.models.experts import has_experts
from llmtrain.models.head import Head
from llmtrain.models.language import LanguageModel, compare_losses
from llmtrain.models.loss import IGNORE
from llmtrain.models.parallel.mesh import Mesh, mesh_of
from llmtrain.models.run.build_for_rank import build_model
from llmtrain.models.run.check import why_not_varlen
from llmtrain.models.score import gives_scores
from llmtrain.models.source import ParameterSource
from llmtrain.models.spec import ModelSpec
from llmtrain.models.transformers_private import VARLEN
from llmtrain.storage.checksum import checksum, weights_hash
from llmtrain.storage.region import Region
from llmtrain.storage.tensorfile import numel
from llmtrain.training.examine import in_stages, rate_of
from llmtrain.training.step import Session

if TYPE_CHECKING:
    from llmtrain.models.teacher import Teacher

_PROVED_TOKENS = 32


class Setup:
    """A run's engine, and what trains and evaluates with it. The parameters have no values until `start`, `write` or a
    checkpoint sets them. All ranks call every method together."""

    def __init__(
        self, run: Run, spec: ModelSpec, data: RunData, ranks: Ranks, source: ParameterSource | None = None
    ) -> None:
        """`run`, `spec`, `data`: what `examine` returned. `source`: initial values of a new run; None: as the section
        `model` says. Raises UserError, on all ranks."""
        self.data, self.ranks = data, ranks
        with ranks.together():
            self.spec, notes = with_attention(run, spec, ranks.device)
        self.run = replace(run, notes=(*run.notes, *notes))
        self.course = Course(self.run.stages, data.stages)
        """Data and batch for each step."""
        self.mesh = mesh_of(self.run.mix.degrees)
        self.references = data.references
        """Distinct hashes of the reference's weights: of the model that computed the columns, or with an online
        reference of the modules that train in full next to the adapter."""
        with ranks.together():
            reads_column = self.run.config.objective.top_k is not None
            student, precision = self.spec.model, self.run.mix.precision
            teacher = None if reads_column else self._teacher(student, precision)
            self.objective = loss_of(self.run.config.objective, teacher)
        self.teacher = self._hash_of_teacher(data.teachers)
        """Hash of the teacher's weights; None: the objective has no teacher."""
        with ranks.together():
            self._check_device()
        self.engine = self._start_engine()
        self.initial_weights: str | None = None
        """Hash of the initial weights if this launch has initialised them; None: it has resumed."""
        self._base: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._source = source
        if self.run.config.objective.reference == "online":  # it needs the initial values, also after a resume
            self._refer_to(self._first_values())

    # A Setup that stands for another machine, without values, overrides the next five methods.

    def _check_device(self) -> None:
        """Raise ConfigError if this device cannot compute the run."""
        config = self.run.config
        check_device(self.run.mix, self.spec.model.attention, config.model.fp8, config.deepspeed)

    def _load_teacher(self, model: ModelConfig, precision: str, language: Callable[..., LanguageModel]) -> Teacher:
        from llmtrain.models.teacher import load_teacher

        return load_teacher(model, precision, self.ranks.device, language)

    def _hash_of_teacher(self, columns: list[str]) -> str | None:
        return taught_by(self.run.config, columns, self.ranks)

    def _hash_of_reference(self, source: ParameterSource) -> None:
        self.references = [weights_hash(source_checksums(source, self.spec.saved, self.ranks))]

    def _start_engine(self) -> Engine:
        return start_engine(self.run, self.spec, self.ranks, self.mesh)

    def _first_values(self) -> ParameterSource:
        """Return the initial values of a new run. Raises AgreedError."""
        if self._source is None:
            with self.ranks.together():
                self._source = self.spec.initial_weights(self.run.config.train.seed, self.ranks.device)
        return self._source

    def _teacher(self, student: ModelConfig, precision: str) -> Teacher | None:
        """Load the teacher on ranks that compute a loss (a pipeline's last stages). Raises ModelError, on this rank."""
        objective, mesh = self.run.config.objective, self.mesh
        if objective.teacher is None or mesh.place.pipeline != mesh.degrees.pipeline - 1:
            return None
        from llmtrain.models.teacher import teacher_model

        language: Callable[..., LanguageModel] = LanguageModel
        if mesh.sequence is not None:
            from llmtrain.models.parallel.sequence import SequenceLanguageModel

            language = partial(SequenceLanguageModel, group=mesh.sequence)
        return self._load_teacher(teacher_model(objective, student), precision, language)

    def _refer_to(self, source: ParameterSource) -> None:
        """Make the model with these values the objective's online reference. Raises AgreedError."""
        self._base = base_of(self.engine, self.spec, source)
        self.objective = self._with_reference(self.objective)
        if self.spec.saved:
            self._hash_of_reference(source)

    def _with_reference(self, objective: LossFunction) -> LossFunction:
        return with_reference(objective, self.run.config.objective, self._base)

    def write(self) -> tuple[ParameterSource, dict[str, int]]:
        """Write the parameters' initial values, once. Returns their source, which is not kept here since it holds a
        block of the values, and the result of `write_weights`."""
        source, self._source = self._first_values(), None
        return source, write_weights(self.engine, source, self.ranks)

    def start(self) -> tuple[ParameterSource, dict[str, int]]:
        """Begin a new run with the initial values. Returns their source and the result of `write_weights`.

        Raises: AgreedError, also if the column of the reference was computed from other weights.
        """
        source, checksums = self.write()
        self.initial_weights = weights_hash(reference_checksums(self.spec, checksums))
        if self.run.config.objective.reference == "column" and set(self.references or []) != {self.initial_weights}:
            raise AgreedError(
                f"objective.name {self.run.config.objective.name}: the data's log-probabilities of the reference were "
                f"computed with other weights than model.pretrained = {self.run.config.model.pretrained!r} has; "
                f"{NEW_COLUMN}",
                DataError.exit_code,
            )
        return source, checksums

    def prove(self) -> None:
        """Prove on a few tokens that the loss equals the loss of the model's own logits; in a new run also prove
        figures that are known without training. Raises AgreedError."""
        if is_of_plugin(self.run.config.objective):
            from llmtrain.training.proofs import prove_alike

            prove_alike(self.run.config.objective, self.ranks)
        row = torch.from_numpy(self.data.first.sequence(0)[0])
        shared_by, isolated = self.run.mix.degrees.sequence, self.run.config.data.isolate_documents
        prove_loss(self.engine, row, self.run.mix, self.ranks, shared_by=shared_by, isolate_documents=isolated)
        of_tokens = isinstance(self.objective, NextTokenLoss)
        if self.initial_weights is None or (of_tokens and self.run.config.adapter.r is None):
            return
        from llmtrain.training.proofs import StartProof

        proof = StartProof(
            engine=self.engine,
            run=self.run,
            place=self.mesh.place,
            ranks=self.ranks,
            objective=self.objective,
            with_reference=self._with_reference,
            own_teacher=self.teacher == self.initial_weights,
        )
        for stage, data in in_stages(self.course.stages, self.course.data):
            proof.prove(stage, data)

    def session(self, step: int = 0) -> Session:
        """Return the run's session. `step`: optimizer steps done before, skipped ones included."""
        in_training = {name: metric for name, metric in self.run.config.metrics.items() if metric.in_training}
        rate = partial(rate_of, self.run.stages, max_steps=self.run.max_steps)
        seed, objective = self.run.config.train.seed, with_metrics(self.objective, in_training)
        session = Session(self.engine, self.ranks, self.run.mix.degrees, rate, seed=seed, objective=objective)
        session.step_number = step
        return session

    def loader(self, start_index: int = 0, sequences: Sequence[int] | None = None, *, step: int = 0) -> TrainLoader:
        """`sequences`: a step's sequences by data-parallel rank; None: equal shares. `step`: steps done before."""
        pins = self.ranks.device.type == "cuda"
        return TrainLoader(
            self.course,
            rank=self.mesh.place.data,
            start_index=start_index,
            pin_memory=pins,
            sequences=sequences,
            step=step,
        )


def with_attention(run: Run, spec: ModelSpec, device: torch.device) -> tuple[ModelSpec, list[str]]:
    """Choose the attention for model.attention auto. Returns the model, and notes on isolated documents, for which sdpa
    needs a mask over all pairs of tokens. Raises ConfigError: when the mask would be too large."""
    config, asked = run.config, run.config.model.attention
    if not config.data.isolate_documents or asked not in ("auto", "sdpa"):
        return spec, []
    masked, problems = replace(config, model=replace(config.model, attention="sdpa")), Problems(run.places)
    check_masks(replace(run, config=masked), problems)
    reason, degrees = "", run.mix.degrees
    if degrees.pipeline * degrees.sequence > 1:
        reason = "varlen needs whole sequences and all layers on each rank"
    elif device.type != "cuda" and not problems:
        reason = "varlen is for GPUs"
    elif device.type == "cuda" and run.mix.precision == "fp32":
        reason = "varlen's kernel computes in bf16 and fp16"
    if asked == "sdpa":
        slow = "with data.isolate_documents it computes all pairs of a sequence's tokens, under a mask"
        return spec, [] if reason else [f"model.attention sdpa: {slow}; auto avoids that with varlen, where it works"]
    chosen = spec
    if not reason:
        chosen = ModelSpec.of(replace(config.model, attention="varlen"), config.adapter, scores=spec.scores)
        reason = why_not_varlen(chosen)
    if not reason and config.objective.teacher is not None:
        from llmtrain.models.teacher import teacher_model

        reason = why_not_varlen(ModelSpec.of(teacher_model(config.objective, chosen.model)))
    if reason:
        problems.raise_if_any()
        return spec, [f"model.attention auto: sdpa, as {reason}"]
    return chosen, ["model.attention auto: varlen, which computes within documents and needs no mask"]


def start_engine(run: Run, spec: ModelSpec, ranks: Ranks, mesh: Mesh) -> Engine:
    """Make the engine of a run; its parameters have no values yet. Raises UserError, on all ranks."""
    if run.mix.degrees.tensor > 1:
        from llmtrain.training.proofs import prove_sharding

        prove_sharding(spec, run.mix.degrees.tensor, ranks)
    with features.building(run, spec, ranks) as built:
        return _start_engine(built, spec, ranks, mesh)


def _start_engine(run: Run, spec: ModelSpec, ranks: Ranks, mesh: Mesh) -> Engine:
    with ranks.together():
        compiles = _compiles_layers(spec, run.mix, ranks, one_shape=features.most_sequences(run.config) == 1)
        config = replace(run.config, model=replace(run.config.model, compile_layers=compiles))
        model = build_model(replace(run, config=config), spec, ranks.device, mesh)
    if compiles:
        model.notes.append("decoder layers go through torch.compile, which takes a while in the first steps")
    if spec.model.attention == VARLEN and ranks.device.type == "cuda":
        from llmtrain.models.varlen import choose_kernel

        model.notes.append(choose_kernel(ranks.device))
    mix = run.mix
    if mix.zero_stage == 3 and mix.degrees.data * mix.degrees.sequence == 1 and not mix.offload_param:
        model.notes.append(
            "ZeRO 3 has no other rank to share parameters with, and DeepSpeed still waits for the device wherever a "
            "parameter is used: zero_optimization.stage 1 takes the same memory and does not wait"
        )
    settings = {}
    if run.config.optim.has_own_settings:
        from llmtrain.models.own_settings import own_settings

        settings = own_settings(spec, run.config.optim)
    engine = build_engine(model, run, settings, ranks, mesh)
    apply_group_timeout(run.config.fault.timeout_s)  # to the groups that DeepSpeed has made
    progress.tell_compilation()  # DeepSpeed has imported torch.compile by now
    return engine


def teacher_hash(config: RunConfig, ranks: Ranks) -> str | None:
    """Return the hash of the teacher's weights; None: the run names no teacher. All ranks call it together, and each
    reads a part of the weights. Raises AgreedError."""
    if config.objective.teacher is None:
        return None
    from llmtrain.models.teacher import teacher_checksums, teacher_model

    with ranks.together():
        mine = teacher_checksums(teacher_model(config.objective, config.model), ranks.rank, ranks.world_size)
    return weights_hash({name: value for share in ranks.gather(mine) for name, value in share.items()})


def taught_by(config: RunConfig, columns: list[str], ranks: Ranks) -> str | None:
    """Return the hash of the teacher's weights; None: there is no teacher. `columns`: the hashes in the data. All ranks
    call it. Raises AgreedError: when these hashes differ, from each other or from that of objective.teacher."""
    named = teacher_hash(config, ranks)
    made = {*columns, *([named] if named is not None else [])}
    if len(made) > 1:
        whose = (
            f"other weights than objective.teacher = {config.objective.teacher!r} has" if named else "several teachers"
        )
        raise AgreedError(
            f"objective.top_k: the likeliest tokens in the data were computed with {whose}; {NEW_COLUMN}",
            DataError.exit_code,
        )
    return min(made, default=None)


def _compiles_layers(spec: ModelSpec, mix: Mix, ranks: Ranks, *, one_shape: bool) -> bool:
    """Decide whether to compile decoder layers, the same on all ranks. `one_shape`: all micro-batches of the run have
    one shape. Raises ConfigError: when model.compile_layers is true and a rank cannot compile."""
    wanted, device = spec.model.compile_layers, ranks.device
    if not wanted and device.type != "cuda":  # on CUDA the loss and Muon are compiled, too
        return False
    reason = _agreed_trouble(ranks)
    if wanted and reason is not None:
        raise ConfigError(
            f"model.compile_layers is true, but torch.compile does not work here ({device.type}): {reason}. Set it "
            "to false, or to null: layers are then compiled where that works."
        )
    if reason is not None or wanted is not None:
        return reason is None and wanted is True
    # By default only if a layer becomes one graph, which all layers of its kind share. Row-parallel maps break the
    # graph; with watched experts each layer has its own graph, and torch gives up after 8; the watch does not see
    # collectives in compiled code (base/rank/heartbeat.py); bitsandbytes has kernels of its own.
    shared, packed = mix.degrees.tensor > 1 or mix.degrees.sequence > 1, spec.adapter.quantize is not None
    return one_shape and mix.may_compile_layers and not shared and not packed and not has_experts(spec.skeleton)


def _agreed_trouble(ranks: Ranks) -> str | None:
    """Return why a rank cannot use torch.compile; None: all ranks can. Compiled code rounds differently, so replicas
    would diverge if only some ranks used it."""
    reasons = ranks.gather(compiler.trouble(ranks.device))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            if reasons[ranks.rank] is None:
                compiler.do_without(ranks.device, f"rank {rank}: {reason}")
            return str(reason)
    return None


def write_weights(engine: Engine, source: ParameterSource, ranks: Ranks) -> dict[str, int]:
    """Write the parameters' initial values, and prove that the forward pass reads them.

    Returns the result of `prove_weights`. Raises AgreedError on all ranks.
    """
    with ranks.together():
        arrived = fill_parameters(engine, source)
    with ranks.together():
        engine.refresh()
        prove_masters(engine, ranks)
        return prove_weights(engine, source, ranks, arrived)


def reference_checksums(spec: ModelSpec, checksums: dict[str, int]) -> dict[str, int]:
    """Return the checksums that identify the reference. With a new adapter (B = 0) they are the base model's alone, so
    that one column of `llmtrain reference` serves all seeds and targets."""
    if spec.adapter.start is not None:
        return checksums
    return {name: value for name, value in checksums.items() if name not in spec.adapter_shapes}


def source_checksums(source: ParameterSource, names: Collection[str], ranks: Ranks) -> dict[str, int]:
    """Return checksums of the complete tensors `names`. All ranks call it, and each reads a part. Raises
    AgreedError."""
    with ranks.together():
        mine = {
            name: checksum(source.read(name, 0, numel(source.shape(name))).reshape(-1))
            for name in sorted(names)[ranks.rank :: ranks.world_size]
        }
    return {name: value for share in ranks.gather(mine) for name, value in share.items()}


def base_of(engine: Engine, spec: ModelSpec, source: ParameterSource) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes a context in which the model computes without its adapter, and with the initial
    values (from `source`) of the modules that train in full. All ranks enter it together."""
    values: dict[tuple[str, Region, bool], Tensor] = {}

    def first(copy: ForwardCopy) -> Tensor:
        key = (copy.name, copy.region, copy.partition)
        if key not in values:  # rounded as in the forward pass: the first log-ratio is exactly 0
            values[key] = source.read_region(copy.name, copy.region).to(copy.values.device, copy.values.dtype)
        return values[key]

    @contextlib.contextmanager
    def base() -> Iterator[None]:
        from llmtrain.models.adapter import without_adapter

        first_values = engine.reading_instead(spec.saved, first) if spec.saved else contextlib.nullcontext()
        with without_adapter(engine.module), first_values:
            yield

    return base


def prove_loss(engine: Engine, row: Tensor, mix: Mix, ranks: Ranks, *, shared_by: int, isolate_documents: bool) -> None:
    """Prove on the first tokens of `row` [T] that our loss equals the loss of the model's own logits and, if asked,
    that documents are isolated. `shared_by`: ranks that share a sequence. Raises AgreedError."""

    def few(unit: int) -> Tensor:
        return row[: min(len(row), _PROVED_TOKENS) // unit * unit].unsqueeze(0)

    # If a pipeline stage fails, the others wait for its activations and cannot hear of the error: it ends as a fault.
    failures = contextlib.nullcontext() if engine.is_pipeline else _failures_in_transformers()
    with ranks.together(), failures, compiler.uncompiled():
        check_head(engine, few(shared_by), autocast=mix.autocast)
        if isolate_documents:
            from llmtrain.models.fp8 import without_fp8

            with without_fp8(engine.module):  # the scale of fp8 depends on all tokens, so on both documents
                check_isolation(engine, few(math.lcm(2, shared_by)))


@contextlib.contextmanager
def _failures_in_transformers() -> Iterator[None]:
    """Report an exception inside transformers as a ModelError: its cause are the fields of model.config."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):  # memory runs out on one rank, and the others would wait for it
        raise
    except Exception as error:
        innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        if not innermost.f_globals.get("__name__", "").startswith("transformers."):
            raise
        raise ModelError(
            f"model: its forward pass fails in transformers ({innermost.f_globals['__name__']}, "
            f"{innermost.f_code.co_name}): {type(error).__name__}: {error}. Correct model.config: a field "
            "is missing, or has a value that this family cannot use."
        ) from error


class _LastScore:
    """The score of the last token in rows [1, T], for a proof."""

    figures: tuple[str, ...] = ("loss",)

    def __init__(self, *, given: bool = False) -> None:
        """`given`: `sums` gets the model's own scores instead of the hidden state."""
        self._given = given

    def weight(self, micro: MicroBatch) -> int:
        return len(micro.inputs)

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the sum of the last token's scores, [1]."""
        last = torch.full((1,), micro.labels.numel() - 1, device=hidden.device)
        scores = hidden.float() if self._given else head.scores_at(hidden, last)
        return head.once(scores.sum().unsqueeze(0))


class _OfLogits(NextTokenLoss):
    """The next-token loss as torch computes it, from logits instead of the hidden state."""

    def sums(self, head: Head, hidden: Tensor, micro: MicroBatch) -> Tensor:
        logits, labels = (head.own(each).flatten(0, 1) for each in (hidden.float(), micro.labels))
        return F.cross_entropy(logits, labels, reduction="sum").unsqueeze(0)


def check_head(engine: Engine, inputs: Tensor, *, autocast: bool = False) -> None:
    """Prove on `inputs` [1, T] that the loss equals the loss of transformers' logits: a layout, a precision or a head
    may silently train on a wrong one. All ranks call it. Raises ModelError."""
    module = engine.module
    micro = MicroBatch(inputs=inputs, labels=inputs.roll(-1, dims=1), sequences=[])
    scores = gives_scores(module.config)
    loss, _ = engine.evaluate([micro], _LastScore() if scores else NEXT_TOKEN)
    module.wants_logits = True
    try:
        loss_of_logits, _ = engine.evaluate([micro], _LastScore(given=True) if scores else _OfLogits())
    finally:
        module.wants_logits = False
    compare_losses(module.hf, loss["loss"], loss_of_logits["loss"], autocast=autocast)


def check_isolation(engine: Engine, inputs: Tensor) -> None:
    """Prove on `inputs` [1, T], taken as two documents, that the first one does not change the loss of the second. All
    ranks call it. Raises ModelError."""
    half = inputs.shape[1] // 2
    positions = torch.arange(inputs.shape[1]).remainder(half).unsqueeze(0)
    labels = inputs.roll(-1, dims=1)
    labels[:, :half] = IGNORE
    other = inputs.clone()
    other[:, :half] = inputs[:, :half].flip(1).roll(1, dims=1)
    last: LossFunction = _LastScore() if gives_scores(engine.module.config) else NEXT_TOKEN
    losses = []
    for tokens in (inputs, other):
        micro = MicroBatch(inputs=tokens, labels=labels, sequences=[], positions=positions)
        losses.append(engine.evaluate([micro], last)[0]["loss"])
    if not abs(losses[0] - losses[1]) <= 1e-5 * max(1.0, abs(losses[0])):
        raise ModelError(
            "data.isolate_documents: other tokens in the first document of a sequence change the loss of the second "
            f"document from {losses[0]:.6f} to {losses[1]:.6f}. This model makes its attention mask without positions; "
            "set data.isolate_documents to false."
        )
