"""The three training loops of train_speed.py, each in a process of its own: ours, plain PyTorch, transformers.Trainer.

All start from the same weights, read the same sequences in the same order, use AdamW with the same groups,
and clip to the same norm; each calls `Clock.step_done` once per optimizer step.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor, nn

if TYPE_CHECKING:
    from llmtrain.engine.api import Engine

PEAK_LR = 3e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
LOG_EVERY = 10
FP8 = ("rowwise", "tensorwise")
"""Contestants that are our loop with that `model.fp8`."""
SKIPPED = 3
"""Exit code of a benchmark whose own part does not fit the GPU."""
PROCESS_GIB = 2.0
"""GPU memory beside a contestant's tensors: CUDA's context, the libraries' workspaces, what the allocator loses."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """GiB of a contestant on a GPU, counted on tensors without memory (tests/unit/models/test_fake_steps.py)."""

    held: float
    """Between its rounds: weights, masters, moments, gradients."""
    made: float
    """Beside that by a micro-batch, with DeepSpeed's buckets."""

    @property
    def alone(self) -> float:
        return self.held + self.made + PROCESS_GIB

    def of(self, share: float) -> Need:
        """With so much of the micro-batch's tokens."""
        return Need(held=self.held, made=self.made * share)


def fit_together(needs: Collection[Need], total_gib: float | None) -> bool:
    """Return True if contestants may take turns, round by round: all stay on the GPU, and one computes at a time."""
    if total_gib is None or not needs:
        return True
    held, made = sum(need.held for need in needs), max(need.made for need in needs)
    return held + made + PROCESS_GIB * len(needs) <= total_gib


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every contestant trains; plain values, as it travels to a subprocess."""

    folder: str
    """Temporary folder with the prepared data (data/) and the DeepSpeed JSON (deepspeed.json)."""
    model: dict[str, Any]
    """Fields of a Hugging Face config."""
    sequence: int
    micro_batch: int
    accumulation: int
    bf16: bool
    eager: bool
    """Our loop without compiled layers; else as a run on this device has them."""
    contestants: tuple[str, ...]
    """Who takes part: llmtrain, plain, trainer, those of FP8."""
    threads: int
    steps_per_round: int
    """Optimizer steps that are timed; one more before them is not (it refills the allocator's cache)."""
    rounds: int
    """The first one warms up and is not counted."""
    warm_steps: int = 0
    """Steps of the first round after its first one; 0: as of the others."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def total_steps(self) -> int:
        return (self.rounds - 1) * (self.steps_per_round + 1) + (self.warm_steps or self.steps_per_round) + 1


@dataclass(frozen=True, kw_only=True)
class Round:
    """One contestant's figures of one round."""

    losses: list[float]
    """Nats per token of every step, the untimed one included."""
    wall_s: float
    cpu_s: float
    """CPU time of the whole process, all threads."""
    peak_bytes: int
    """Since the process began: VmHWM on CPU, torch.cuda.max_memory_allocated on CUDA."""
    attention: str = ""
    """The operators that computed it in a step of the warm-up."""
    compiled: bool = False
    """Layers went through torch.compile."""


class Clock:
    """Cuts a training loop into rounds: waits for leave, times the round, reports it."""

    def __init__(self, pipe: Connection, task: Any) -> None:
        self._pipe, self._task = pipe, task
        self._losses: list[Tensor] = []
        self._began: tuple[float, float] = (0.0, 0.0)
        self._steps = getattr(task, "warm_steps", 0) or task.steps_per_round
        self._watch: Any = None
        self._seen: str | None = None
        self.compiled = False
        """Layers go through torch.compile."""

    def ready(self) -> None:
        """Everything is built: say so and wait for the first round."""
        self._wait(None)

    def step_done(self, loss: Tensor) -> None:
        """After each optimizer step; `loss` stays on the device until the round is over."""
        self._losses.append(loss.detach())
        if len(self._losses) == 1:
            if self._seen is None:  # the second step of all: the first one compiles
                self._watch = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                self._watch.start()
            self._began = self._now()
            return
        if self._watch is not None:
            self._watch.stop()
            self._seen, self._watch = _kernels(event.name for event in self._watch.events()), None
        if len(self._losses) == 1 + self._steps:
            wall_s, cpu_s = self._now()
            assert self._seen is not None
            done = Round(
                losses=[float(loss) for loss in self._losses],
                wall_s=wall_s - self._began[0],
                cpu_s=cpu_s - self._began[1],
                peak_bytes=_peak_bytes(),
                attention=self._seen,
                compiled=self.compiled,
            )
            self._losses, self._steps = [], self._task.steps_per_round
            self._wait(done)

    def _wait(self, done: Round | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the others need the room
        self._pipe.send(done)
        self._pipe.recv()

    @staticmethod
    def _now() -> tuple[float, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()


_ATTENTION = re.compile(r"::(_scaled_dot_product_\w+|_varlen_attn|within_documents)$")


def _kernels(events: Iterable[str]) -> str:
    """Operators of attention by the names of a profile."""
    names = set(events)
    return ", ".join(sorted({found[1] for n in names if (found := _ATTENTION.search(n)) and "backward" not in n}))


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def serve(name: str, pipe: Connection, task: Task) -> None:
    """Entry of a contestant's process."""
    enter(task.threads)
    clock = Clock(pipe, task)
    if name in FP8:
        timed_run(clock, _write_yaml(task, name))
    else:
        {"llmtrain": run_llmtrain, "plain": run_plain, "trainer": run_trainer, "nanogpt": run_nanogpt}[name](
            clock, task
        )
    pipe.send("end")


def enter(threads: int) -> None:
    """The first lines of a contestant's process."""
    sys.stdout = sys.stderr  # stdout is the parent's, for its table
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if not torch.cuda.is_available():
        torch.set_num_threads(threads)
    logging.disable(logging.WARNING)


def run_llmtrain(clock: Clock, task: Task) -> None:
    """The loop that `llmtrain train` runs, from the YAML on, without checkpoints and trackers."""
    timed_run(clock, _write_yaml(task))


def timed_run(clock: Clock, path: Path, after: Callable[[Engine], None] | None = None) -> None:
    """That of a YAML; `after` gets the engine when all steps are done."""
    from llmtrain.checkpoint.rundir import RunDirectory, find_folder
    from llmtrain.config.load import load
    from llmtrain.engine.deepspeed.build import join_process_group
    from llmtrain.engine.process_memory import collected_by_hand
    from llmtrain.engine.ranks.stop_requests import StopRequests
    from llmtrain.tracking.tracker import Tracker
    from llmtrain.training.examine import examine
    from llmtrain.training.guards import SkippedSteps
    from llmtrain.training.parts import Launch
    from llmtrain.training.reporting import Evaluation, Logging, throughput_of
    from llmtrain.training.run import train_steps
    from llmtrain.training.setup import Setup
    from llmtrain.training.start import resume_or_start
    from llmtrain.training.step import Session, Step

    run = load(["--config", str(path)], 1, "the benchmark")
    config = run.config
    ranks = join_process_group(config.fault.timeout_s)
    with RunDirectory(str(config.train.run_dir)) as folder:
        checkpoints = find_folder(folder.checkpoints, ranks)
        setup = Setup(*examine(run), ranks)
        start = resume_or_start(setup, folder, checkpoints)
        setup.prove()  # as a run: what it leaves behind in compiled layers is in the figures
        tracker = Tracker(
            folder.path,
            run_id=start.run_id,
            config={"run": asdict(config)},
            total_steps=run.max_steps,
            enabled=True,
        )
        step = Session.step

        def timed_step(session: Session, *arguments: Any) -> Step:
            done = step(session, *arguments)
            clock.step_done(torch.stack(done.sums).sum(0)[0] / done.agreed.weight)
            return done

        Session.step = timed_step  # type: ignore[method-assign, assignment]
        # Without saving: no checkpoint is due, and 12 bytes a parameter of memory and disk are not asked for.
        session = setup.session()
        launch = Launch(
            setup=setup,
            start=start,
            folder=folder,
            checkpoints=checkpoints,
            requests=StopRequests(),
            tracker=tracker,
            session=session,
            loader=setup.loader(),
            parts=[],
            speed=throughput_of(setup),
            began_s=0.0,
        )
        launch.parts.extend([SkippedSteps(launch), Logging(launch), Evaluation(launch)])
        clock.compiled = is_compiled(session.engine.module)
        clock.ready()
        with collected_by_hand():  # else each of the loop's collections looks at all objects of the imports
            train_steps(launch)
        tracker.close()
        if after is not None:
            after(session.engine)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether layers are compiled, by their forward methods (models/parallel/layers.py)."""
    return any(hasattr(each.forward, "_torchdynamo_orig_callable") for each in model.modules())


def _write_yaml(task: Task, fp8: str | None = None) -> Path:
    folder = Path(task.folder)
    path = folder / f"{fp8 or 'llmtrain'}.yaml"
    batch = task.micro_batch * task.accumulation
    fields = {
        "deepspeed": str(folder / "deepspeed.json"),
        "model": {"config": task.model, "fp8": fp8, **({"compile_layers": False} if task.eager else {})},
        "data": {"path": str(folder / "data"), "sequence_length": task.sequence},
        "optim": {
            "lr": PEAK_LR,
            "betas": list(BETAS),
            "eps": EPS,
            "weight_decay": WEIGHT_DECAY,
            "clip_norm": CLIP_NORM,
        },
        "schedule": {"name": "constant"},
        "train": {
            "run_dir": str(folder / f"run-{path.stem}"),
            "global_batch": batch,
            "micro_batch": task.micro_batch,
            "max_steps": task.total_steps,
            "log_every": max(LOG_EVERY, task.steps_per_round),
            "eval": False,
        },
    }
    path.write_text(yaml.safe_dump(fields))
    return path


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The training sequences in the order of a run, as transformers' models take them."""

    def __init__(self, task: Task) -> None:
        from llmtrain.config.run import DataConfig
        from llmtrain.data.stream.train_data import TrainData

        self._data = TrainData(DataConfig(path=str(Path(task.folder) / "data"), sequence_length=task.sequence))
        self._count = task.total_steps * task.micro_batch * task.accumulation

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = (torch.from_numpy(array) for array in self._data.sequence(index))
        return {"input_ids": inputs, "labels": labels, "shift_labels": labels}  # already shifted


def _peer_model(task: Task, dtype: torch.dtype, experts: str | None = None) -> nn.Module:
    """transformers' model with its own loss and the initial weights of our run with seed 0. `experts`: the name of
    transformers' way through them; None: its default."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from llmtrain.config.run import ModelConfig
    from llmtrain.models.spec import ModelSpec

    fields = dict(task.model)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with task.device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=experts)
    source = ModelSpec.of(ModelConfig(config=task.model)).initial_weights(0, task.device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in source.order():
            parameters[name].copy_(source.read(name, 0, parameters[name].numel()).view_as(parameters[name]))
    model.config.use_cache = False
    return model.train()


def run_plain(clock: Clock, task: Task, experts: str | None = None) -> None:
    """A loop as the PyTorch tutorials write it: fp32 weights, autocast for bf16, fused AdamW. `experts`: as for
    `_peer_model`."""
    model = _peer_model(task, torch.float32, experts)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=BETAS, eps=EPS, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    on_gpu = task.device.type == "cuda"
    loader = torch.utils.data.DataLoader(Sequences(task), batch_size=task.micro_batch, pin_memory=on_gpu)
    clock.ready()
    batches: Iterator[dict[str, Tensor]] = iter(loader)
    for _ in range(task.total_steps):
        micros = [next(batches) for _ in range(task.accumulation)]
        counted = sum(int((micro["labels"] >= 0).sum()) for micro in micros)
        total = torch.zeros((), device=task.device)
        for micro in micros:
            micro = {key: value.to(task.device, non_blocking=True) for key, value in micro.items()}
            with torch.autocast(task.device.type, torch.bfloat16, enabled=task.bf16):
                loss = model(**micro, num_items_in_batch=counted).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.step_done(total)


class NanoBlock(nn.Module):
    """A layer of nanoGPT: without biases, GELU by its definition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.before_attention(hidden_BTH)).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden_BTH = hidden_BTH + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden_BTH + self.mlp(self.before_mlp(hidden_BTH))


class Nano(nn.Module):
    """nanoGPT's model, written from its description, with the sizes of a GPT-2's fields."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        width = fields["n_embd"]
        self.positions = nn.Embedding(fields["n_positions"], width)
        self.blocks = nn.Sequential(*(NanoBlock(width, fields["n_head"]) for _ in range(fields["n_layer"])))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, fields["vocab_size"], bias=False)
        self.words = nn.Embedding(fields["vocab_size"], width)
        self.words.weight = self.head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs_BT: Tensor, labels_BT: Tensor) -> Tensor:
        hidden_BTH = self.words(inputs_BT) + self.positions(torch.arange(inputs_BT.shape[1], device=inputs_BT.device))
        logits_BTV = self.head(self.norm(self.blocks(hidden_BTH)))
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=-100)


def run_nanogpt(clock: Clock, task: Task) -> None:
    """nanoGPT's loop, but for its draw of the sequences: those of a run; fused AdamW. It starts from other weights."""
    torch.manual_seed(0)
    model, data = Nano(task.model).to(task.device), Sequences(task)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=BETAS, eps=EPS, fused=True)
    clock.ready()
    for first in range(0, len(data), task.micro_batch * task.accumulation):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR
        total = torch.zeros((), device=task.device)
        for low in range(first, first + task.micro_batch * task.accumulation, task.micro_batch):
            rows = [data[index] for index in range(low, low + task.micro_batch)]
            inputs, labels = (
                torch.stack([row[name] for row in rows]).to(task.device) for name in ("input_ids", "labels")
            )
            loss = model(inputs, labels) / task.accumulation
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done(total)


def run_trainer(clock: Clock, task: Task) -> None:
    """transformers.Trainer with the same DeepSpeed JSON and otherwise its own defaults."""
    import deepspeed
    from transformers import Trainer, TrainingArguments

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if task.device.type == "cpu":  # as our loop does: DeepSpeed's shared-memory op would compile for a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    folder = Path(task.folder)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        deepspeed=json.loads((folder / "deepspeed.json").read_text()),
        per_device_train_batch_size=task.micro_batch,
        gradient_accumulation_steps=task.accumulation,
        max_steps=task.total_steps,
        learning_rate=PEAK_LR,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP_NORM,
        bf16=task.bf16,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,  # it would take shift_labels away, which the model does use
        logging_steps=max(LOG_EVERY, task.steps_per_round),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=task.device.type == "cpu",
    )
    model = _peer_model(task, torch.bfloat16 if task.bf16 else torch.float32)

    class TimedTrainer(Trainer):
        """Tells the clock of each optimizer step; changes nothing that is computed."""

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            micro_losses.append(loss.detach())
            return loss

    micro_losses: list[Tensor] = []
    trainer = TimedTrainer(model=model, args=arguments, train_dataset=Sequences(task))
    trainer.add_callback(after_each_step(clock, micro_losses))
    trainer.train()


def after_each_step(clock: Clock, micro_losses: list[Tensor]) -> Any:
    """A callback of transformers.Trainer: the clock gets the sum of the losses since the last step."""
    from transformers import TrainerCallback

    class AfterEachStep(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.ready()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            loss = torch.stack(micro_losses).sum()
            micro_losses.clear()
            clock.step_done(loss)

    return AfterEachStep()
