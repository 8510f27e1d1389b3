"""The run's YAML as frozen dataclasses. A field's docstring is its help text and carries its unit.

A field whose default is None and whose docstring says "or from the JSON" may be in the DeepSpeed JSON instead.
`config/deepspeed/join.py` joins the two; a `Run` has the result; only values that are `auto` are still open.
Nothing here imports torch, and no field can name code (no callables, no class paths).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from llmtrain.base.choice import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    SECONDS,
    SEED,
    Bound,
    HostPath,
    bounded,
    mapped,
)
from llmtrain.base.trees import lookup
from llmtrain.config.stages import STAGED, Batch, Stages, data_of
from llmtrain.config.stages import DataConfig as DataConfig
from llmtrain.config.topology import Mix
from llmtrain.features import asked, names_of_sections, with_sections
from llmtrain.objectives.by_token import NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.optim.optimizers import AdamW, Optimizer
from llmtrain.optim.schedules import Cosine, Schedule
from llmtrain.storage.addresses import local_folder


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation checkpointing: decoder layers keep their input and compute the rest again in the backward pass."""

    layers: int | Literal["all", "auto"] | None = bounded(None, AT_LEAST_1, "write a number, all, auto or null")
    """Number of decoder layers, from the first on, in each stage of a pipeline. auto = the fewest with which the step
    fits into the device's memory, by the rehearsal of `llmtrain plan`; null = none, or all with
    activation_checkpointing in the JSON."""
    keep: Literal["attention"] | None = None
    """attention: keep the output of attention and recompute the rest of the layer (model.attention sdpa or varlen).
    With layers: auto, null lets the rehearsal decide."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and how it computes. Exactly one of `pretrained` and `config` is given."""

    pretrained: HostPath | None = None
    """Weights at the start: a local Hugging Face folder (config.json and safetensors), ORG/NAME of a repository on the
    Hub, or the URL of a folder in an object store, which is fetched. A local folder with the name wins."""
    revision: str | None = None
    """With ORG/NAME in `pretrained`: branch, tag or commit; null = main. A run keeps the commit of its start."""
    config: dict[str, Any] | HostPath | None = None
    """Random weights: the fields of a Hugging Face config.json, with model_type; or a folder or file that holds one."""
    vocabulary: int | None = bounded(None, AT_LEAST_1, "leave it out for the folder's own tokens")
    """Size of a larger vocabulary than in the folder of `pretrained`: new rows of embedding and head begin as the mean
    of its rows, and have to train. null = the folder's size."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "varlen"] = "auto"
    """Attention implementation. sdpa picks the fastest kernel of the device; varlen, for data.isolate_documents,
    computes within documents without a mask. auto = varlen for isolated documents on a GPU if the model can, otherwise
    sdpa."""
    loss_chunk_tokens: int = bounded(2048, AT_LEAST_1, "2048 suits most models")
    """Tokens whose logits exist at one time in the loss."""
    mlp_tile_tokens: int | None = bounded(None, AT_LEAST_1, "leave it out to compute all tokens at once")
    """Tokens that the MLP of a layer computes at one time; null = all. For long sequences: it recomputes."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    neftune_noise_alpha: float = bounded(0.0, NOT_NEGATIVE, "5 is common, 0 means none")
    """NEFTune: in training, add uniform noise of at most alpha / sqrt(L d) to a token's embedding with d elements. L:
    tokens of the row, or of the document with data.isolate_documents. 5 is common; 0 = none."""
    compile_layers: bool | None = None
    """torch.compile each decoder layer; null = on CUDA with a working compiler, if no other setting forbids it."""
    fp8: Literal["rowwise", "tensorwise"] | None = None
    """Multiply in 8-bit floats in the linear maps of the decoder layers, by torchao: pip install llmtrain[fp8]. A scale
    for each row, or one for each tensor; null = no fp8. GPUs from compute capability 8.9 on; emulated on a CPU."""
    freeze: list[str] = field(default_factory=list)
    """Patterns (`*`, `?`, `[...]`) of Hugging Face names: these have no gradient, optimizer state or fp32 master."""
    train_only: list[str] = field(default_factory=list)
    """Patterns of the parameters that train; all others are frozen. The opposite of `freeze`."""

    @property
    def folder(self) -> Path | None:
        """The folder of the files of `pretrained` on this host."""
        return None if self.pretrained is None else local_folder(self.pretrained, self.revision)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank matrices train next to linear maps of the decoder layers, and the model's own weights stay unchanged.
    Given `r`, a map's output is Wx + scale B A x. By the peft library: pip install llmtrain[adapters]."""

    r: int | None = bounded(None, AT_LEAST_1, "16 is common; null means no adapter")
    """Rank of the matrices A [r, inputs] and B [outputs, r]; null = no adapter, the model itself trains."""
    alpha: float = bounded(16.0, POSITIVE, "16 is the default")
    """The scale of B A x is alpha / r."""
    rslora: bool = False
    """The scale is alpha / sqrt(r)."""
    dora: bool = False
    """Also train the length of each row of W + scale B A. It begins as the length of W's row."""
    dropout: float = bounded(0.0, BELOW_1, "0 is the default")
    """Share of A's inputs that are left out in training."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Patterns (`*`, `?`, `[...]`) of modules, such as `*.q_proj`; all-linear: all linear maps of decoder layers."""
    quantize: Literal["nf4"] | None = None
    """nf4: the maps with an adapter keep their frozen weights in 4 bits (QLoRA), by bitsandbytes: pip install
    llmtrain[quantize]. ZeRO 0 to 2, without tensor parallelism and pipelines."""
    modules_to_save: list[str] = field(default_factory=list)
    """Patterns of modules that train completely, such as `model.embed_tokens`, `lm_head` or `*norm`."""
    start: HostPath | None = None
    """PEFT folder with the adapter at the start; its rank, scale and targets must agree with this section."""


Mode = Literal["min", "max"]
"""Direction in which a figure is better."""


@dataclass(frozen=True, kw_only=True)
class StopEarly:
    """Complete the run before its last step when evaluations no longer get better."""

    metric: str | None = None
    """Figure of the evaluations, such as eval/loss or eval/code/loss; null = the run trains all its steps."""
    patience: int = bounded(3, AT_LEAST_1, "3 is the default")
    """Number of evaluations in a row without a new best after which the run ends."""
    min_delta: float = bounded(0.0, NOT_NEGATIVE, "0 is the default")
    """Difference that an evaluation must exceed to count as better."""
    mode: Mode | None = None
    """min: less is better; null = by the metric: min for losses, perplexities and bits, max for accuracies."""


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """Keep the checkpoints of the best evaluations next to the newest ones."""

    metric: str | None = None
    """Figure of the evaluations, such as eval/loss or eval/code/loss; null = keep the newest ones alone. A checkpoint
    follows each evaluation with a new best."""
    keep: int = bounded(1, AT_LEAST_1, "1 is the default")
    """Number of the best checkpoints to keep."""
    mode: Mode | None = None
    """min: less is better; null = by the metric: min for losses, perplexities and bits, max for accuracies."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batch, length, evaluation. Two of (global_batch, micro_batch, accumulation) give the third."""

    run_dir: HostPath | None = None
    """The run's folder. Default: runs/NAME, where NAME is the YAML's file name."""
    seed: int = bounded(0, SEED, "write 0")
    """Seed of the initial weights and of dropout."""
    deterministic: bool = False
    """On a GPU, use only kernels that add in a fixed order: two runs agree to the last digit, also across a resume.
    Attention's backward pass becomes slower. Kernels of the CPU always add in a fixed order."""
    global_batch: int | None = bounded(None, AT_LEAST_1, "count sequences over all ranks")
    """Sequences per optimizer step over all ranks. Or from the JSON (train_batch_size)."""
    micro_batch: int | Literal["auto"] | None = bounded(None, AT_LEAST_1, "write auto, or a number of sequences")
    """Sequences per forward pass of one rank. auto = the most that fit into the device's memory and make up
    global_batch, by the rehearsal of `llmtrain plan`. Or from the JSON (train_micro_batch_size_per_gpu)."""
    accumulation: int | None = bounded(None, AT_LEAST_1, "1 means no accumulation")
    """Micro-batches per optimizer step. Or from the JSON (gradient_accumulation_steps)."""
    max_steps: int | None = bounded(None, AT_LEAST_1, "count optimizer steps")
    """Stop after this many optimizer steps."""
    max_tokens: int | None = bounded(None, AT_LEAST_1, "count tokens of the whole run")
    """Stop after this many training tokens."""
    epochs: float | None = bounded(None, Bound(above=0, at_most=1e6), "1 reads the data once")
    """Stop after this many epochs of the training data. An epoch of a mixture ends when one of its sets has been read
    completely."""
    max_minutes: float | None = bounded(None, SECONDS, "count minutes of this launch")
    """Stop after this many minutes of training in this launch."""
    log_every: int = bounded(10, AT_LEAST_1, "10 is the default")
    """Optimizer steps between log points."""
    eval: bool = True
    """Measure the validation loss of `data`; off: train without its validation split, but with eval.sets."""
    eval_every: int | None = bounded(None, AT_LEAST_1, "leave it out to evaluate at the end only")
    """Optimizer steps between evaluations; null evaluates at the end only."""
    eval_sequences: int = bounded(256, AT_LEAST_1, "256 is the default")
    """Validation sequences of one evaluation (all of them if there are fewer)."""
    export: bool = True
    """Write a Hugging Face folder at the end."""
    export_to: str | None = None
    """URL of a folder in an object store, not of one with checkpoints, to which the export is uploaded."""
    sample_prompt: str | None = None
    """Print a continuation of this prompt at the end of the run."""
    stop_early: StopEarly = field(default_factory=StopEarly)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measurements every train.eval_every steps in addition to the validation loss of `data`."""

    sets: dict[str, HostPath] = mapped("NAME: FOLDER")
    """NAME: FOLDER for each prepared folder to measure, with the tokenizer of `data`: its validation split, or all of
    it if it has none. Figures: `eval/NAME/loss` and others."""
    sequences: dict[str, int] = mapped("NAME: SEQUENCES", AT_LEAST_1, "remove the line")
    """NAME: most sequences in one evaluation of the set. Default for each set: train.eval_sequences."""
    mean: dict[str, float] = mapped("NAME: WEIGHT", POSITIVE, "remove the line")
    """NAME: weight for some sets: `eval/mean/loss` is their weighted mean. The weights need not sum to 1."""
    choices: dict[str, HostPath] = mapped("NAME: FOLDER")
    """NAME: FOLDER for each folder of multiple-choice questions (`llmtrain prepare --format choices`), with the
    tokenizer of `data`. Figures: `eval/NAME/accuracy`, `eval/NAME/accuracy_norm`, `eval/NAME/bits_per_byte`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Times to save and checkpoints to keep. One is always written at the end and on SIGTERM, SIGINT, SIGUSR1."""

    every_steps: int | None = bounded(None, AT_LEAST_1, "leave it out to save at the end and on signals only")
    """Optimizer steps between checkpoints."""
    every_minutes: float | None = bounded(None, SECONDS, "leave it out to save at the end and on signals only")
    """Minutes between checkpoints."""
    keep: int = bounded(2, AT_LEAST_1, "2 is the default")
    """Number of the newest checkpoints to keep; older ones are deleted after a newer one is complete."""
    mode: Literal["async", "sync"] = "async"
    """async: training continues while a copy of the state is written (host memory: 12 bytes a parameter, shared by the
    ranks); sync: training waits."""
    when_busy: Literal["wait", "skip"] = "wait"
    """While the last checkpoint is still being written: wait for its end, or skip the one that is due."""
    dir: HostPath | None = None
    """Folder for the checkpoints. Default: checkpoints/ in train.run_dir. On a disk of each host's own, each host keeps
    the files of its ranks, and a resume needs the same hosts."""
    keep_best: KeepBest = field(default_factory=KeepBest)


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Limits at which a run ends."""

    max_skipped: int = bounded(10, AT_LEAST_1, "10 is the default")
    """Steps skipped in a row (non-finite loss or gradient) before the run stops."""
    timeout_s: float = bounded(600.0, SECONDS, "600 is the default")
    """Seconds that a collective may wait for a rank, in every process group."""
    start_timeout_s: float = bounded(300.0, SECONDS, "300 is the default")
    """Seconds that ranks wait for other ranks at the start."""
    check_every: int = bounded(250, NOT_NEGATIVE, "250 is the default, 0 = never")
    """Optimizer steps between comparisons of values that must be equal on several ranks. Each checkpoint begins with
    a comparison, too. 0 = never."""
    stall_timeout_s: float = bounded(300.0, SECONDS, "300 is the default")
    """Seconds without progress on any rank before the job is explained and ended. At most 3/4 of timeout_s counts."""
    preempt_file: HostPath | None = None
    """File: all ranks save and leave when it appears on any host."""
    max_failed_saves: int = bounded(3, AT_LEAST_1, "3 is the default")
    """Failed checkpoints in a row, on a full disk, after which the run tries a last save and ends."""

    @property
    def longest_s(self) -> float:
        """Seconds without progress that count as a stall. Fewer than the collectives' timeout, after which ranks have
        ended and can no longer say where they waited."""
        return min(self.stall_timeout_s, 0.75 * self.timeout_s)


Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
@with_sections
class RunConfig:
    """One training run. Features (llmtrain/features) add their sections."""

    deepspeed: HostPath
    """The DeepSpeed JSON (`llmtrain init DIR` writes some)."""
    resume: HostPath = "auto"
    """auto: continue from the newest intact checkpoint of the run folder; none: the folder must be new; or the path or
    URL of a checkpoint, or of another run's folder with checkpoints, for its newest."""
    resume_weights_only: bool = False
    """With a path in `resume`: take its parameters alone; moments, schedule, data and step count start again."""
    resume_data: Literal["same", "new"] = "same"
    """With a path in `resume`: new continues with other data, from its first sequence or from the position of the
    checkpoint's run in it; parameters, moments, step count and schedule stay."""
    resume_model: Literal["same", "new"] = "same"
    """With a path in `resume`: new takes its parameters even if this run's model configuration (RoPE, activation, eps)
    gives them another meaning, or with resume_weights_only the tokenizer does."""
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: Objective = field(default_factory=NextToken)
    optim: Optimizer = field(default_factory=AdamW)
    schedule: Schedule = field(default_factory=Cosine)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    parts: dict[str, Any] = field(default_factory=dict)
    """Parts of plugins in the run: NAME: {FIELD: VALUE} for each; `NAME:` alone takes the defaults."""
    trackers: dict[str, Any] = field(default_factory=dict)
    """Trackers in addition to the local files, in the form of `parts`: those below, and those of plugins."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Figures of plugins in addition to the loss, in the form of `parts`."""

    def section(self, kind: type[Section]) -> Section:
        """Return the section of a feature. `kind`: the class of the section."""
        section: Section = getattr(self, names_of_sections()[kind])
        return section

    @property
    def evaluates(self) -> bool:
        """True if the run has evaluations."""
        measures = any(feature.measures for feature in asked(self))
        return measures or bool(self.train.eval or self.eval.sets or self.eval.choices)


def same_command(config: RunConfig, *more: str) -> str:
    """Return words for a message that tell the user to repeat the run's command. `more`: options to add to it."""
    added = (
        *(("--resume", "auto") if config.resume == "none" else ()),
        *more,
    )  # none refuses a folder with checkpoints
    return f"the same command with {' '.join(added)}" if added else "the same command"


def stage_views(config: RunConfig) -> Iterator[tuple[RunConfig, Callable[[str], str]]]:
    """Yield for each stage the run with its data, and a function from a key of that run to the user's key."""
    given: dict[str, int] = {}  # field of data -> the last stage that changed it
    for number, data in enumerate(data_of(config.data)):
        yield replace(config, data=data), partial(_written, given)
        if number < len(config.data.stages):
            own = config.data.stages[number]
            changed = [name for name in STAGED if getattr(own, name) is not None]
            given = given | dict.fromkeys(changed, number)


def _written(given: dict[str, int], key: str) -> str:
    section, _, name = key.partition(".")
    stage = given.get(name.partition(".")[0]) if section == "data" else None
    return key if stage is None else f"data.stages[{stage}].{name}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose YAML, JSON and command line `config/resolve.py` has joined for a number of ranks.

    Read numbers of a batch from `stages`, not from `config.train`, where some are None. A run is made in three steps:
    `join.read_run`, `resolve.with_stages`, `join.with_exact_dict`. Each kind of rules runs after the step whose values
    it needs.
    """

    config: RunConfig
    """The user's run with every shared field filled in: for dumps, checkpoints, and values of the YAML alone."""
    stages: Stages = field(default_factory=partial(Stages, ()))
    """Data, batch and schedule of each step. The run has one stage unless data.stages names more."""
    mix: Mix
    """The run's way of computing, with its data-parallel degree: the place of its degrees, precision and ZeRO stage."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """The exact dict that the engine is built from: no "auto", batch keys solved."""
    pipeline_partition: str | tuple[int, ...] = "parameters"
    """The split of decoder layers over pipeline stages: parameters, uniform, or the layers of each stage."""
    expert_parallel: dict[str, Any] = field(default_factory=dict)
    """The JSON's section of the same name: settings of DeepSpeed's expert parallelism next to the degree."""
    max_steps: int | None = None
    """Optimizer steps of the run (from max_steps, max_tokens, epochs); None: max_minutes alone limits it."""
    places: dict[str, str] = field(default_factory=dict)
    """Dotted key -> where the user wrote it, for messages."""
    notes: tuple[str, ...] = ()
    """Notes for the user on values that were filled in or adapted."""

    @property
    def batch(self) -> Batch:
        """The batch of the first stage."""
        return self.stages[0].batch

    @property
    def finds_loss_scale(self) -> bool:
        """True in fp16 with a dynamic loss scale, whose first steps overflow until a scale is found."""
        return self.mix.precision == "fp16" and not lookup(self.deepspeed, "fp16.loss_scale")

    @property
    def run_dir(self) -> str:
        """Path of the run's folder; `load.parse` fills in the default."""
        assert self.config.train.run_dir is not None
        return self.config.train.run_dir
