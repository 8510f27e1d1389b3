"""The run's YAML as frozen dataclasses. A field's docstring is its help text and carries its unit.

A field whose default is None and whose docstring says "or from the JSON" has one more place where it may
stand: the DeepSpeed JSON. `config/deepspeed/join.py` joins the two; a `ResolvedRun` has the result, without None.
Nothing here imports torch, and no field can name code (no callables, no class paths).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
from llmtrain.config.stages import Batch, Stages, data_of
from llmtrain.config.stages import DataConfig as DataConfig
from llmtrain.config.topology import Degrees, Mix
from llmtrain.objectives.by_token import NextToken
from llmtrain.objectives.objective import Objective
from llmtrain.optim.optimizers import AdamW, Optimizer
from llmtrain.optim.outer_methods import DiLoCo, SitesConfig
from llmtrain.optim.schedules import Cosine, Schedule
from llmtrain.storage.hub.names import local_folder
from llmtrain.tracking import mlflow_sink, tensorboard_sink  # noqa: F401  (they bring `trackers`)
from llmtrain.tracking.sink import TrackingConfig


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation checkpointing: decoder layers keep their input and compute the rest again in the backward pass."""

    layers: int | Literal["all", "auto"] | None = bounded(None, AT_LEAST_1, "write a number, all, auto or null")
    """Number of decoder layers, from the first on; of a pipeline, those of each stage. auto = as few as the device's
    memory asks for, by a count of bytes at the start; null = none; all with activation_checkpointing in the JSON."""
    keep: Literal["attention"] | None = None
    """attention: keep what attention gave and recompute the rest of the layer (attention: sdpa or varlen). With layers:
    auto, null lets the count decide."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and how it computes. Exactly one of `pretrained` and `config` is given."""

    pretrained: HostPath | None = None
    """Whose weights training starts from: a local Hugging Face folder (config.json and safetensors), or ORG/NAME of a
    repository on the Hub, or the URL of a folder in an object store, which is fetched. A folder that is here wins."""
    revision: str | None = None
    """With ORG/NAME in `pretrained`: branch, tag or commit; null = main. A run stays with the commit that it found."""
    config: dict[str, Any] | HostPath | None = None
    """Random weights: the fields of a Hugging Face config.json, with model_type; or a folder or file that holds one."""
    vocabulary: int | None = bounded(None, AT_LEAST_1, "leave it out for the folder's own tokens")
    """Tokens that the model is to know, more than the folder of `pretrained` has: new rows of its embedding and its
    head, which have to train, each begin as the mean of the folder's. null = those of the folder."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "varlen"] = "auto"
    """Attention implementation. sdpa picks the fastest kernel of the device; varlen is for data.isolate_documents: it
    computes within documents only, and needs no mask, with which a GPU computes every pair of a row's tokens. auto =
    varlen where documents are isolated on a GPU and the model can, sdpa elsewhere."""
    loss_chunk_tokens: int = bounded(2048, AT_LEAST_1, "2048 suits most models")
    """Tokens whose logits exist at one time in the loss."""
    mlp_tile_tokens: int | None = bounded(None, AT_LEAST_1, "leave it out to compute all tokens at once")
    """Tokens that the MLP of a layer computes at one time; null = all. For long sequences: it recomputes."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    neftune_noise_alpha: float = bounded(0.0, NOT_NEGATIVE, "5 is common, 0 means none")
    """NEFTune: in training, uniform noise of at most alpha / sqrt(L d) on each of the d elements of a token's
    embedding, in a text of L tokens: a document (data.isolate_documents), or else a row. 5 is common; 0 = none."""
    compile_layers: bool | None = None
    """torch.compile each decoder layer; null = on CUDA, where a compiler works and the run may."""
    fp8: Literal["rowwise", "tensorwise"] | None = None
    """Multiply in 8-bit floats in the linear maps of the decoder layers, by torchao: pip install llmtrain[fp8]. A scale
    for each row, or one for each tensor; null = no fp8. GPUs from compute capability 8.9 on; emulated on a CPU."""
    freeze: list[str] = field(default_factory=list)
    """Patterns (`*`, `?`, `[...]`) of Hugging Face names: these have no gradient, optimizer state or fp32 master."""
    train_only: list[str] = field(default_factory=list)
    """The opposite of `freeze`: all parameters but those with such a name are frozen."""

    @property
    def folder(self) -> Path | None:
        """The folder of the files of `pretrained` on this host."""
        return None if self.pretrained is None else local_folder(self.pretrained, self.revision)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank matrices beside linear maps of the decoder layers: they train, the model's own weights stay as they are.
    Given `r`, a map's output is Wx + scale B A x. By the peft library: pip install llmtrain[adapters]."""

    r: int | None = bounded(None, AT_LEAST_1, "16 is common; null means no adapter")
    """Rank of the matrices A [r, inputs] and B [outputs, r]; null = no adapter, the model itself trains."""
    alpha: float = bounded(16.0, POSITIVE, "16 is the default")
    """The scale of B A x is alpha / r."""
    rslora: bool = False
    """The scale is alpha / sqrt(r)."""
    dora: bool = False
    """Also train the length of each row of W + scale B A, which begins as that of W."""
    dropout: float = bounded(0.0, BELOW_1, "0 is the default")
    """Share of A's inputs that are left out in training."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Patterns (`*`, `?`, `[...]`) of modules, such as `*.q_proj`; all-linear: all linear maps of decoder layers."""
    quantize: Literal["nf4"] | None = None
    """nf4: the maps beside the adapter keep their frozen weights in 4 bits (QLoRA), by bitsandbytes: pip install
    llmtrain[quantize]. ZeRO 0 to 2, without tensor parallelism and pipelines."""
    modules_to_save: list[str] = field(default_factory=list)
    """Patterns of modules that train whole beside the adapter, such as `model.embed_tokens`, `lm_head` or `*norm`."""
    start: HostPath | None = None
    """PEFT folder with the adapter to begin with; its rank, scale and targets must be those of this section."""


Mode = Literal["min", "max"]
"""Direction in which a figure is better."""


@dataclass(frozen=True, kw_only=True)
class StopEarly:
    """An end of the run before its last step, complete and not stopped: when evaluations no longer get better."""

    metric: str | None = None
    """Figure of the evaluations, such as eval/loss or eval/code/loss; null = the run has all of its steps."""
    patience: int = bounded(3, AT_LEAST_1, "3 is the default")
    """Evaluations in a row that are not better than the best before them; after so many the run ends."""
    min_delta: float = bounded(0.0, NOT_NEGATIVE, "0 is the default")
    """An evaluation counts as better from more than this on."""
    mode: Mode | None = None
    """min: less is better; null = by the metric: min of losses, perplexities and bits, max of accuracies."""


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """Checkpoints that stay beside the newest ones: those of the best evaluations."""

    metric: str | None = None
    """Figure of the evaluations, such as eval/loss or eval/code/loss; null = the newest ones alone stay. An evaluation
    with a new best is followed by a checkpoint."""
    keep: int = bounded(1, AT_LEAST_1, "1 is the default")
    """Number of checkpoints that stay by it."""
    mode: Mode | None = None
    """min: less is better; null = by the metric: min of losses, perplexities and bits, max of accuracies."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batch, length, evaluation. Two of (global_batch, micro_batch, accumulation) give the third."""

    run_dir: HostPath | None = None
    """The run's folder. Default: runs/NAME, where NAME is the YAML's file name."""
    seed: int = bounded(0, SEED, "write 0")
    """Seed of the initial weights and of dropout."""
    deterministic: bool = False
    """On a GPU, use only kernels that add in a fixed order: two runs are then equal to the last digit, also across a
    resume. Attention's backward pass becomes slower. On the CPU nothing changes: it always does."""
    global_batch: int | None = bounded(None, AT_LEAST_1, "count sequences over all ranks")
    """Sequences per optimizer step over all ranks. Or from the JSON (train_batch_size)."""
    micro_batch: int | None = bounded(None, AT_LEAST_1, "count sequences of one forward pass of one rank")
    """Sequences per forward pass of one rank. Or from the JSON (train_micro_batch_size_per_gpu)."""
    accumulation: int | None = bounded(None, AT_LEAST_1, "1 means no accumulation")
    """Micro-batches per optimizer step. Or from the JSON (gradient_accumulation_steps)."""
    balance: Literal["equal", "measured"] = "equal"
    """measured: slow ranks take fewer sequences of a step, fast ones up to twice micro_batch at a time."""
    max_steps: int | None = bounded(None, AT_LEAST_1, "count optimizer steps")
    """Stop after this many optimizer steps."""
    max_tokens: int | None = bounded(None, AT_LEAST_1, "count tokens of the whole run")
    """Stop after this many training tokens."""
    epochs: float | None = bounded(None, Bound(above=0, at_most=1e6), "1 reads the data once")
    """Stop after this many epochs of the training data; one of a mixture ends when the first of its sets has been read
    once."""
    max_minutes: float | None = bounded(None, SECONDS, "count minutes of this launch")
    """Stop after this many minutes of training in this launch."""
    log_every: int = bounded(10, AT_LEAST_1, "10 is the default")
    """Optimizer steps between log points."""
    eval: bool = True
    """Measure the validation loss of `data`; off: train without its validation split. Named sets (eval.sets) stay."""
    eval_every: int | None = bounded(None, AT_LEAST_1, "leave it out to evaluate at the end only")
    """Optimizer steps between evaluations; null evaluates at the end only."""
    eval_sequences: int = bounded(256, AT_LEAST_1, "256 is the default")
    """Validation sequences of one evaluation (all of them if there are fewer)."""
    export: bool = True
    """Write a Hugging Face folder at the end."""
    export_to: str | None = None
    """URL of a folder in an object store (as `checkpoint.mirror`, but another one) to which that folder is uploaded."""
    sample_prompt: str | None = None
    """Print a continuation of this prompt at the end of the run."""
    sample_prompts: list[str] | HostPath = field(default_factory=list)
    """Texts that the model continues at each evaluation, always by its likeliest token: a list, or the path of a file
    with one a line. The continuations go to the log, events.jsonl, W&B and the report."""
    sample_tokens: int = bounded(32, AT_LEAST_1, "32 is the default")
    """Tokens of such a continuation at most. Each takes a forward pass."""
    stop_early: StopEarly = field(default_factory=StopEarly)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measurements every train.eval_every steps beside the validation loss of `data`."""

    sets: dict[str, HostPath] = mapped("NAME: FOLDER")
    """NAME: FOLDER for each prepared folder to measure, with the tokenizer of `data`; its validation split, or where it
    has none, all of it. Figures: `eval/NAME/loss` and others."""
    sequences: dict[str, int] = mapped("NAME: SEQUENCES", AT_LEAST_1, "remove the line")
    """NAME: sequences of one evaluation of that set (all of them if there are fewer). Without: train.eval_sequences."""
    mean: dict[str, float] = mapped("NAME: WEIGHT", POSITIVE, "remove the line")
    """NAME: weight for some sets, which need not sum to 1: `eval/mean/loss` is the mean of their losses."""
    choices: dict[str, HostPath] = mapped("NAME: FOLDER")
    """NAME: FOLDER for each folder of multiple-choice questions (`llmtrain prepare --format choices`), with the
    tokenizer of `data`. Figures: `eval/NAME/accuracy`, `eval/NAME/accuracy_norm`, `eval/NAME/bits_per_byte`."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average of the parameters that train: evaluated beside them (`eval/ema/loss`), saved in
    checkpoints, exported by `llmtrain checkpoint to-hf --ema`. It takes 4 bytes a parameter, sharded as the masters."""

    decay: float | None = bounded(None, BELOW_1, "0.999 is common; null means no average")
    """mean = decay x mean + (1 - decay) x parameter; null = no average."""
    every: int = bounded(1, AT_LEAST_1, "1 is the default")
    """Optimizer steps between two updates of the mean."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep. A checkpoint is always written at the end and on SIGTERM, SIGINT, SIGUSR1."""

    every_steps: int | None = bounded(None, AT_LEAST_1, "leave it out to save at the end and on signals only")
    """Optimizer steps between checkpoints."""
    every_minutes: float | None = bounded(None, SECONDS, "leave it out to save at the end and on signals only")
    """Minutes between checkpoints."""
    keep: int = bounded(2, AT_LEAST_1, "2 is the default")
    """Newest checkpoints that stay; older ones are deleted after a newer one is complete."""
    mode: Literal["async", "sync"] = "async"
    """async: training goes on while a copy of the state is written (host memory: 12 bytes a parameter, shared by the
    ranks); sync: training waits."""
    when_busy: Literal["wait", "skip"] = "wait"
    """When a checkpoint is due and the one before is still being written: wait for it, or skip this one."""
    dir: HostPath | None = None
    """Folder for the checkpoints. Default: checkpoints/ in train.run_dir. It may be on each host's own disk: then each
    host keeps the files of its ranks, and a resume needs the same hosts."""
    mirror: str | None = None
    """URL of a folder in an object store (s3://, gs://, az:// and all that fsspec opens), one for each run: each
    checkpoint is uploaded in the background once it is whole, `keep` and `keep_best` hold there, too, and a run whose
    folder has no checkpoint goes on from there."""
    keep_best: KeepBest = field(default_factory=KeepBest)


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Limits at which a run ends."""

    max_skipped: int = bounded(10, AT_LEAST_1, "10 is the default")
    """Steps skipped in a row (non-finite loss or gradient) before the run stops."""
    timeout_s: float = bounded(600.0, SECONDS, "600 is the default")
    """Seconds that a collective may wait for a rank, in every process group."""
    start_timeout_s: float = bounded(300.0, SECONDS, "300 is the default")
    """Seconds that the ranks wait for each other at the start."""
    check_every: int = bounded(250, NOT_NEGATIVE, "250 is the default, 0 = never")
    """Optimizer steps between comparisons of what must be the same on several ranks; each checkpoint is preceded by
    one. 0 = never."""
    stall_timeout_s: float = bounded(300.0, SECONDS, "300 is the default")
    """Seconds without progress on any rank before the job is explained and ended. At most 3/4 of timeout_s counts."""
    preempt_file: HostPath | None = None
    """When this file appears on any host, all ranks save and leave."""
    max_failed_saves: int = bounded(3, AT_LEAST_1, "3 is the default")
    """Checkpoints that fail in a row, on a full disk, before the run ends and tries once more to save its state."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A profile of some steps, in profile/ of the run's folder: torch's traces, memory over time, and a page."""

    steps: str | None = None
    """FIRST:LAST, such as 20:23: the optimizer steps, both included, at most 20, that are profiled; null = none."""


def profiled_steps(text: str | None) -> tuple[int, int]:
    """(first, last) of `profile.steps`. Raises ValueError: it is none."""
    first, colon, last = (text or "").partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) < int(first) + 20):
        raise ValueError(text)
    return int(first), int(last)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    deepspeed: HostPath
    """The DeepSpeed JSON (`llmtrain init DIR` writes some)."""
    resume: HostPath = "auto"
    """auto: go on from the newest intact checkpoint of the run folder; none: the folder must be new; or the path or URL
    of a checkpoint, or of another run's folder, of which the newest is taken."""
    resume_weights_only: bool = False
    """With a path in `resume`: take its parameters alone; moments, schedule, data and step count begin anew."""
    resume_data: Literal["same", "new"] = "same"
    """With a path in `resume`: new goes on with other data from its first sequence, or from where the checkpoint's run
    left it; parameters, moments, step count and schedule stay."""
    resume_model: Literal["same", "new"] = "same"
    """With a path in `resume`: new takes its parameters although this run's configuration of the model, or with
    resume_weights_only the tokenizer, gives them another meaning (RoPE, activation, eps and the like)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: Objective = field(default_factory=NextToken)
    optim: Optimizer = field(default_factory=AdamW)
    schedule: Schedule = field(default_factory=Cosine)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sites: SitesConfig = field(default_factory=DiLoCo)
    parts: dict[str, Any] = field(default_factory=dict)
    """Parts of plugins that take part in the run: NAME: {FIELD: VALUE} for each; `NAME:` alone takes the defaults."""
    trackers: dict[str, Any] = field(default_factory=dict)
    """Trackers beside W&B and the local files, in the same form: tensorboard, mlflow, and those of plugins."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Figures of plugins beside the loss, in the same form."""


def stage_views(run: RunConfig) -> Iterator[tuple[RunConfig, Callable[[str], str]]]:
    """Yield each stage as a run with its data, and the function from a key of that run to the user's key."""
    given: dict[str, int] = {}  # field of data -> the last stage that changed it
    for number, data in enumerate(data_of(run.data)):
        yield replace(run, data=data), partial(_written, given)
        if number < len(run.data.stages):
            own = run.data.stages[number]
            changed = [name for name in ("path", "mixture", "sequence_length") if getattr(own, name) is not None]
            given = given | dict.fromkeys(changed, number)


def _written(given: dict[str, int], key: str) -> str:
    section, _, name = key.partition(".")
    stage = given.get(name.partition(".")[0]) if section == "data" else None
    return key if stage is None else f"data.stages[{stage}].{name}"


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run whose YAML, JSON and command line have been joined for a number of ranks. `config.resolve` makes it.

    What may stand in two files is in `stages` and `optim`, where no value is missing.
    """

    run: RunConfig
    """As the user wrote it, every shared field filled in: for dumps, checkpoints, and what only the YAML says."""
    stages: Stages
    """By the step: data, batch, schedule. The run has one stage unless data.stages names more."""
    mix: Mix
    """The mix that it runs as; its degrees include the data-parallel one."""
    deepspeed: dict[str, Any]
    """The exact dict that the engine is built from: no "auto", batch keys solved."""
    pipeline_partition: str | tuple[int, ...]
    """The split of decoder layers over pipeline stages: parameters, uniform, or the layers of each stage."""
    expert_parallel: dict[str, Any]
    """The JSON's section of that name: what DeepSpeed's expert parallelism reads beside the degree."""
    max_steps: int | None
    """Optimizer steps of the whole run (from max_steps, max_tokens, epochs); None when only max_minutes limits it."""
    places: dict[str, str]
    """Dotted key -> where the user wrote it, for messages."""
    notes: tuple[str, ...]
    """Notes for the user on values that were filled in or adapted."""

    @property
    def optim(self) -> Optimizer:
        """The optimizer, no value missing."""
        return self.run.optim

    @property
    def batch(self) -> Batch:
        """The batch of the first stage."""
        return self.stages[0].batch

    @property
    def degrees(self) -> Degrees:
        """Parallelism degrees."""
        return self.mix.degrees

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """Precision of the model's arithmetic."""
        return self.mix.precision

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        return self.mix.zero_stage

    @property
    def run_dir(self) -> str:
        """The run's folder. The command line's parser has set it: a run made without it has none."""
        assert self.run.train.run_dir is not None
        return self.run.train.run_dir
