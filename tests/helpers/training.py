"""The same small training with the engine under test and with plain PyTorch in one process."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from llmtrain.checkpoint.format import NOWHERE, FrozenSource
from llmtrain.checkpoint.load import Resumed, resume
from llmtrain.checkpoint.rundir import RunDirectory, find_folder
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.reader import read_saved
from llmtrain.config.resolve import resolve
from llmtrain.config.run import AdapterConfig, DataConfig, ModelConfig, RecomputeConfig, Run, RunConfig, TrainConfig
from llmtrain.config.stages import StageConfig
from llmtrain.config.topology import Degrees
from llmtrain.data.batches import AnswerBatch
from llmtrain.data.stream.loader import StepBatch
from llmtrain.data.stream.train_data import RunData, TrainData
from llmtrain.engine.api import StateTensor, Update
from llmtrain.engine.deepspeed.build import join_process_group
from llmtrain.engine.deepspeed.engine import ZeroEngine
from llmtrain.engine.losses.function import NEXT_TOKEN, LossFunction
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.models.spec import ModelSpec
from llmtrain.objectives.objective import Objective
from llmtrain.optim.optimizers import PARAM, Optimizer
from llmtrain.optim.schedules import Cosine
from llmtrain.storage.pieces import put
from llmtrain.training.examine import Examined, stage_data
from llmtrain.training.setup import Setup
from llmtrain.training.start import agreed_candidates
from llmtrain.training.step import Session
from tests.helpers.loaders import loader_of
from tests.helpers.plain import PlainTraining, mean_cross_entropy

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GLOBAL_BATCH = 12
LENGTH = 32


@dataclass(frozen=True)
class Case:
    """A form of training, and what it trains. helpers/parity.py trains it as `llmtrain parity` does."""

    data: str = "(none)"
    ranks: int = 2
    """Of a parity check; run_case is called on the ranks that there are."""
    stage: int = 0
    accumulation: int = 1
    precision: str = "fp32"
    """Or bf16, fp16, autocast."""
    optimizer: str = "adamw"
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    offload: str = ""
    """"optimizer" or "all" (parameters, too)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More keys of the DeepSpeed dict."""
    model: dict[str, Any] = field(default_factory=lambda: dict(LLAMA))
    pretrained: str = ""
    """The folder of the model and its weights, in place of `model`."""
    vocabulary: int | None = None
    """More tokens than that folder's."""
    attention: str = "sdpa"
    partition: str | tuple[int, ...] = "parameters"
    """Of layers over pipeline stages."""
    compile_layers: bool | None = False
    fp8: str | None = None
    mlp_tile_tokens: int | None = None
    recompute: dict[str, Any] = field(default_factory=dict)
    """The section model.recompute."""
    isolate_documents: bool = False
    length: int = LENGTH
    """Tokens of a sequence."""
    steps: int = 5
    clip: float = 1.0
    lr: float = 3e-4
    decay: str = "matrices"
    own: dict[str, Any] = field(default_factory=dict)
    """Fields of `optim` for single parameters, in a parity check."""
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    """In a parity check, as the following three."""
    global_batch: int | None = None
    """None: micro-batches of two sequences."""
    device_fp16: bool = False
    """Whether the device is taken for one that has fp16: Muon's iteration is then in it, but for runs in fp32."""
    noise: float = 0.0
    """model.neftune_noise_alpha, which the command leaves out: for what `known_noise` replaces."""
    ema: bool = False
    """It keeps an average of its parameters."""
    adapter: dict[str, Any] = field(default_factory=dict)
    """The section of that name."""
    objective: dict[str, Any] = field(default_factory=dict)
    """The section of that name."""
    stages: tuple[StageConfig, ...] = ()
    """data.stages."""

    @property
    def name(self) -> str:
        """For the name of a test."""
        words = {"pipeline": "pp", "tensor": "tp", "sequence": "sp", "expert": "ep"}
        degrees = [f"{word}{getattr(self, key)}" for key, word in words.items() if getattr(self, key) > 1]
        tied = {None: [], True: ["tied"], False: ["untied"]}[self.model.get("tie_word_embeddings")]
        what = [self.optimizer, self.objective.get("name", ""), self.fp8 or ""]
        what = [word for word in what if word not in ("", "adamw", "next_token")]
        what += ["column"] if "top_k" in self.objective else []
        form = [f"zero{self.stage}", f"x{self.ranks}", self.precision]
        return "-".join([self.model["model_type"], *tied, *what, *degrees, *form])


def save_checkpoint(
    engine: Any,
    checkpoints: Path,
    step: int,
    trainer: dict[str, Any],
    run: Run,
    ranks: Ranks,
    frozen: FrozenSource = NOWHERE,
    more: Callable[[], list[StateTensor]] = list,
) -> Path:
    """Save and wait until it is durable. `frozen`, `more`: as of Saver."""
    folder = find_folder(checkpoints, ranks)
    with Saver(engine, folder, run.config.checkpoint, run.mix, ranks, frozen, more) as saver:
        saver.begin(step, {"step": step, "tokens": 0, **trainer})
        outcome = saver.drain()
    assert outcome is not None and outcome.path is not None, outcome
    return outcome.path


def resume_from(engine: Any, config: RunConfig, folder: str, now: dict[str, Any], ranks: Ranks) -> Resumed | None:
    """As a launch with this run folder does it."""
    where = RunDirectory(folder, config.checkpoint.dir)
    found = find_folder(where.checkpoints, ranks, own=config.checkpoint.dir is not None)
    chosen = agreed_candidates(config, where, found, ranks)
    state = TrainerState.from_json(json.loads(json.dumps({"step": 0, "tokens": 0, **now})), Path("now"))
    return resume(engine, config, chosen, found, state, ranks) if chosen else None


def case_data(case: Case) -> DataConfig:
    """What the case trains on."""
    return DataConfig(
        path=case.data, sequence_length=case.length, isolate_documents=case.isolate_documents, stages=list(case.stages)
    )


def case_degrees(case: Case, world_size: int) -> Degrees:
    """The data-parallel degree is what is left of the ranks."""
    asked = Degrees(pipeline=case.pipeline, tensor=case.tensor, sequence=case.sequence, expert=case.expert)
    assert world_size % asked.world_size == 0, (case, world_size)
    return replace(asked, data=world_size // asked.world_size)


def deepspeed_tree(degrees: Degrees, stage: int, offload: str, precision: str, more: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed JSON of a form. `more`: other keys, and other values of its sections."""
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    tree: dict[str, Any] = {"zero_optimization": zero, **more}
    if degrees.pipeline > 1:
        tree["pipeline"] = {**more.get("pipeline", {}), "stages": degrees.pipeline}
    if degrees.tensor > 1:
        tree["tensor_parallel"] = {**more.get("tensor_parallel", {}), "autotp_size": degrees.tensor}
    if degrees.sequence > 1:
        tree["sequence_parallel_size"] = degrees.sequence
    if degrees.expert > 1:
        tree["expert_parallel"] = {"enabled": True, "autoep_size": degrees.expert, **more.get("expert_parallel", {})}
    if precision != "fp32" and "bfloat16" not in tree:  # bf16's old name
        section = "torch_autocast" if precision == "autocast" else precision
        tree[section] = {**more.get(section, {}), "enabled": True}
    return tree


def resolved_run(case: Case, world_size: int) -> Run:
    """As a launch resolves the case's YAML and JSON."""
    degrees = case_degrees(case, world_size)
    more = dict(case.extra)
    if case.pipeline > 1:
        partition = list(case.partition) if isinstance(case.partition, tuple) else case.partition
        more["pipeline"] = {"partition": partition, **more.get("pipeline", {})}
    tree = deepspeed_tree(degrees, case.stage, case.offload, case.precision, more)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds.json"
        path.write_text(json.dumps(tree))
        config = RunConfig(
            deepspeed=str(path),
            model=ModelConfig(
                config=None if case.pretrained else dict(case.model),
                pretrained=case.pretrained or None,
                vocabulary=case.vocabulary,
                attention=case.attention,  # type: ignore[arg-type]
                loss_chunk_tokens=40,
                compile_layers=case.compile_layers,
                fp8=case.fp8,  # type: ignore[arg-type]
                mlp_tile_tokens=case.mlp_tile_tokens,
                recompute=RecomputeConfig(**case.recompute),
                freeze=list(case.freeze),
            ),
            adapter=AdapterConfig(**case.adapter),
            objective=read_saved(Objective, case.objective or {"name": "next_token"}),
            data=case_data(case),
            optim=Optimizer.of(
                case.optimizer,
                lr=case.lr,
                betas=(0.9, 0.95),
                weight_decay=0.1,
                decay=case.decay,
                clip_norm=0.0 if case.optimizer == "muon" else case.clip,
            ),
            schedule=Cosine(warmup_steps=min(3, case.steps - 1)),
            train=TrainConfig(
                global_batch=GLOBAL_BATCH,
                micro_batch=GLOBAL_BATCH // degrees.data // case.accumulation,
                accumulation=case.accumulation,
                max_steps=case.steps,
            ),
        )
        run = resolve(config, world_size)
    assert run.mix.degrees == degrees, (run.mix.degrees, degrees)
    return replace(run, config=replace(run.config, deepspeed="(test)"))  # the same on all ranks


def uneven(batch: StepBatch) -> StepBatch:
    """The batch with sample i counted up to a length that depends on i: nothing is left equal between ranks."""
    micros = []
    for micro in batch.micro_batches:
        labels = micro.labels.clone()
        for row, index in enumerate(micro.sequences):
            labels[row, 1 + (index * 7) % (labels.shape[1] - 1) :] = -100
        micros.append(replace(micro, labels=labels))
    return replace(batch, micro_batches=micros)


def batches(
    case: Case, ranks: tuple[int, int], accumulation: int, start: int = 0, data: TrainData | None = None
) -> Iterator[StepBatch]:
    """Batches of (rank, ranks). `data`: in place of the case's."""
    rank, world = ranks
    with loader_of(
        data or TrainData(case_data(case)),
        global_batch=GLOBAL_BATCH,
        micro_batch=GLOBAL_BATCH // world // accumulation,
        accumulation=accumulation,
        rank=rank,
        data_parallel=world,
        start_index=start * GLOBAL_BATCH,
    ) as loader:
        for batch in loader:
            yield batch if isinstance(batch.micro_batches[0], AnswerBatch) else uneven(batch)


@functools.cache
def joined() -> Ranks:
    """The process group of this rank, made once."""
    return join_process_group(120.0)


def make_setup(case: Case, proves: bool = True) -> Setup:
    """A run with its initial weights, after all proofs of its engine."""
    ranks = joined()
    setup = Setup(*examined(resolved_run(case, ranks.world_size)), ranks)
    setup.write()
    if proves:
        setup.prove()
    return setup


def make_engine(case: Case, proves: bool = False) -> tuple[ZeroEngine, Ranks]:
    """The engine of `make_setup`, and this rank; without proofs of LLAMA, which pass in each form of test_cells.py."""
    setup = make_setup(case, proves or case.model != LLAMA)
    assert isinstance(setup.engine, ZeroEngine)
    return setup.engine, setup.ranks


def examined(run: Run) -> Examined:
    """The run as `examine` gives it, without its checks and the columns of its data."""
    config = run.config
    spec = ModelSpec.of(config.model, config.adapter, scores=config.objective.scores)
    return run, spec, RunData(stages=tuple(stage_data(run.stages)))


@dataclass
class Trace:
    """Result of a training: loss and gradient norm per step, parameters at the end."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Step -> parameters before it, for the steps that the caller named (plain PyTorch only)."""
    figures: list[dict[str, float]] = field(default_factory=list)
    """All that a step of the engine says of itself."""


def one_step(
    engine: ZeroEngine, batch: StepBatch, weight: int, before_update: Callable[[], None] = lambda: None
) -> tuple[list[torch.Tensor], Update]:
    """A step at the peak learning rates, as if all ranks had agreed on that weight."""
    sums = engine.forward_backward(batch.micro_batches, lambda: weight)
    before_update()
    return sums, engine.update(1.0)


def train_steps(
    case: Case,
    engine: ZeroEngine,
    ranks: Ranks,
    first: int,
    last: int,
    before_update: Callable[[], None] = lambda: None,
    objective: LossFunction = NEXT_TOKEN,
    data: TrainData | None = None,
    before: Callable[[int], object] = lambda step: None,
) -> Trace:
    """Steps [first, last) with the engine. `data`: in place of the case's. `before`: called with a step's number before
    the step."""
    trace = Trace([], [])
    run = resolved_run(case, ranks.world_size)
    place = run.mix.degrees.place(ranks.rank)
    source = batches(case, (place.data, run.mix.degrees.data), case.accumulation, first, data)
    rate = functools.partial(run.config.schedule.factor, max_steps=run.max_steps)
    seed = run.config.train.seed
    session = Session(engine, ranks, run.mix.degrees, rate, seed=seed, objective=objective)
    session.step_number = first
    for step in range(first, last):
        before(step)
        done = session.step(next(source), before_update=before_update)
        assert not done.update.skipped
        norm = done.update.grad_norm
        trace.figures.append(session.figures(done))
        trace.losses.append(trace.figures[-1]["loss"])
        trace.norms.append(float("nan") if norm is None else float(norm))
    source.close()  # type: ignore[attr-defined]
    return trace


def counted(engine: ZeroEngine) -> dict[str, Any]:
    """The optimizer's entries of trainer.json."""
    counters = engine.counters()
    return {"optimizer_step": int(counters.optimizer_step), "loss_scale": counters.loss_scale}


def view_of(piece: StateTensor) -> torch.Tensor:
    """The live values of what lies in memory."""
    with piece.open() as view:
        return view


def assembled(engine: ZeroEngine, ranks: Ranks, kind: str = PARAM) -> dict[str, torch.Tensor]:
    """All fp32 tensors of a kind, put together from every rank's own slices (the same result on all ranks)."""
    mine = [(f.name, f.own_region, view_of(f)[f.own].clone()) for f in engine.state() if f.kind == kind]
    parts = ranks.gather(mine)
    whole = {name: torch.full(shape, float("nan")) for name, shape in engine.shapes().items()}
    for name, region, values in (piece for part in parts for piece in part):
        put(whole[name].view(-1), region, values)
    return whole


def run_case(case: Case) -> Trace:
    """All steps of a case on this rank; parameters on rank 0 only."""
    engine, ranks = make_engine(case)
    trace = train_steps(case, engine, ranks, 0, case.steps)
    parameters = assembled(engine, ranks)
    trace.parameters = parameters if ranks.rank == 0 else {}
    engine.close()
    return trace


def poisoned(case: Case, step: int, rank: int) -> tuple[list[bool], bool, bool]:
    """Train with NaN in what a layer of one rank gives at one step: (skipped, parameters finite, unchanged by it)."""
    engine, ranks = make_engine(case)
    place = engine.mesh.place
    source = batches(case, (place.data, engine.mesh.degrees.data), case.accumulation)
    skipped, unchanged = [], True
    for index in range(4):
        batch = next(source)
        before = assembled(engine, ranks)
        norm = engine.module.hf.model.layers[0 if place.pipeline == 0 else -1]
        hook = None
        if index == step and ranks.rank == rank:
            hook = norm.register_forward_hook(lambda module, args, out: out * float("nan"))
        losses, result = one_step(engine, batch, 100)
        assert len(losses) == case.accumulation
        if hook is not None:
            hook.remove()
        skipped.append(result.skipped)
        if result.skipped:
            after = assembled(engine, ranks)
            unchanged = all(torch.equal(before[name], after[name]) for name in before)
    source.close()  # type: ignore[attr-defined]
    finite = all(bool(torch.isfinite(value).all()) for value in assembled(engine, ranks).values())
    engine.close()
    return skipped, finite, unchanged


def plain_pytorch(
    case: Case,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mean_cross_entropy,
    model: Any = None,
    keep_before: tuple[int, ...] = (),
    build: Callable[[list[dict[str, Any]], float], torch.optim.Optimizer] | None = None,
) -> Trace:
    """The case by PlainTraining, with transformers' logits. `model`: in place of the case's. `keep_before`: steps, for
    `Trace.kept`. `build`: another optimizer, of groups and lr."""
    model = plain_model(case) if model is None else model
    training = plain_training(case, model, build)
    trace = Trace(training.losses, training.norms)
    for step, batch in zip(range(case.steps), batches(case, (0, 1), 1), strict=False):
        (micro,) = batch.micro_batches
        if step in keep_before:
            trace.kept[step] = training.parameters()
        output = model(input_ids=micro.inputs, position_ids=micro.positions, use_cache=False)
        training.step(loss_of(output.logits, micro.labels), plain_balance(model.config, output, case.accumulation))
    trace.parameters = training.parameters()
    return trace


def plain_training(case: Case, model: Any, build: Any = None) -> PlainTraining:
    """With the case's rates."""
    rate = functools.partial(Cosine(warmup_steps=min(3, case.steps - 1)).factor, max_steps=case.steps)
    return PlainTraining(model, lr=case.lr, rate=rate, clip=case.clip, build=build)


def plain_model(case: Case) -> Any:
    """transformers' model with the case's initial weights, some of them frozen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(case.model)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields), attn_implementation=case.attention
    )
    give_first_values(model.named_parameters(), case)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in case.freeze))
    return model


@torch.no_grad()
def give_first_values(named: Iterator[tuple[str, torch.nn.Parameter]], case: Case) -> None:
    """Those of the case's run, by Hugging Face name."""
    spec = ModelSpec.of(ModelConfig(config=dict(case.model), attention=case.attention))  # type: ignore[arg-type]
    source = spec.initial_weights(0, torch.device("cpu"))
    for name, parameter in named:
        parameter.copy_(source.read(name, 0, parameter.numel()).view_as(parameter))


def plain_balance(config: Any, output: Any, accumulation: int) -> torch.Tensor | float:
    """transformers' load-balancing loss times its coefficient: the mean over the micro-batches of one process."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if not getattr(output, "router_logits", None):
        return 0.0
    count = output.router_logits[0].shape[-1]
    micros = zip(*(logits.chunk(accumulation) for logits in output.router_logits), strict=True)
    losses = [load_balancing_loss_func(micro, count, config.num_experts_per_tok) for micro in micros]
    return config.router_aux_loss_coef * torch.stack(losses).mean()


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Over all parameters; the names must be the same."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def assert_agrees(
    got: Trace, want: Trace, *, loss: float, norm: float | None = None, parameters: float | None = None
) -> None:
    """Each step's loss (nats) and gradient norm (relative), and each parameter, within these tolerances."""
    apart = [abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)]
    assert all(each < loss for each in apart), f"losses differ by {apart}"
    if norm is not None:
        apart = [abs(a / b - 1) for a, b in zip(got.norms, want.norms, strict=True)]
        assert all(each < norm for each in apart), f"gradient norms differ by {apart}"
    if parameters is not None:
        worst = largest_difference(got.parameters, want.parameters)
        assert worst < parameters, f"parameters differ by {worst}"


def prepared_data(folder: Path, documents: int = 160, *, like: str | None = None) -> str:
    """A prepared folder of short synthetic documents, vocabulary 512. `like`: another one, whose tokenizer it has, and
    whose text it has not."""
    import random

    from llmtrain.commands.prepare import main

    rng = random.Random(0 if like is None else 1)
    words = ["".join(rng.choice("abcdefghij") for _ in range(rng.randint(1, 7))) for _ in range(300)]
    source = folder / "text"
    source.mkdir(parents=True)
    for index in range(documents):
        text = " ".join(rng.choice(words) for _ in range(rng.randint(20, 300)))
        (source / f"{index:04d}.txt").write_text(text)
    out = folder / "prepared"
    tokenizer = ["--vocab-size", "512"] if like is None else ["--tokenizer", f"{like}/tokenizer"]
    code = main(["--source", str(source), "--out", str(out), *tokenizer, "--processes", "1"])
    assert code == 0
    return str(out)
