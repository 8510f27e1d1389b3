"""What the ranks of checkpoint.py do: one engine, and one save of its state after another, by every contestant."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import write

from llmtrain.checkpoint.load import load_checkpoint
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.checkpoint.rundir import find_folder
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.trainer_state import TrainerState
from llmtrain.config.resolve import resolve
from llmtrain.config.run import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    Run,
    RunConfig,
    TrainConfig,
)
from llmtrain.data.batches import MicroBatch
from llmtrain.engine.deepspeed.build import build_engine, join_process_group
from llmtrain.engine.deepspeed.engine import ZeroEngine
from llmtrain.engine.ranks.ranks import Ranks
from llmtrain.models.parallel.mesh import mesh_of
from llmtrain.models.run.build_for_rank import build_model
from llmtrain.models.spec import ModelSpec
from llmtrain.optim.optimizers import AdamW
from llmtrain.optim.schedules import Constant

_BLOCK = 16 << 20
RESUMED = 2
"""ZeRO stage of the resumed run. Not 3: DeepSpeed 0.19.8 does not load there what it converted from stage 1 or 2."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The training whose state is saved; plain values, as it travels to the ranks."""

    folder: str
    model: dict[str, Any]
    """Fields of a Hugging Face config."""
    sequence: int
    micro_batch: int
    """Sequences of each rank in a micro-batch."""
    accumulation: int
    """Micro-batches of a step."""
    stage: int
    """ZeRO stage."""
    rounds: int
    parameters: int
    savers: tuple[str, ...]
    """Those that take part, of CONTESTANTS."""
    source: bool
    """Leave DeepSpeed's checkpoint in FOLDER/source, for the conversions."""
    figures: str = ""
    """Rank 0 adds the saves so far to this JSON file after each one: the benchmark may be cut off."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save beside the training."""

    blocked_s: float
    """Inside the calls of the save, and waits before the optimizer."""
    lost_s: float
    """`blocked_s`, and what the steps took longer while the save was under way."""
    seconds: float
    """Until its files were there."""
    bytes: int


def make_engine(task: Task, stage: int, *, universal: bool = False) -> tuple[ZeroEngine, Ranks, Run]:
    """A bf16 engine of our own build. Its weights are zeros: no figure depends on them."""
    ranks = _joined()
    tree = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tree, file)
        file.flush()
        config = RunConfig(
            deepspeed=file.name,
            model=ModelConfig(config=dict(task.model)),
            data=DataConfig(path="(bench)", sequence_length=task.sequence),
            optim=AdamW(lr=1e-4),
            schedule=Constant(),
            train=TrainConfig(micro_batch=task.micro_batch, accumulation=task.accumulation, max_minutes=60.0),
            checkpoint=CheckpointConfig(keep=1),
        )
        run = resolve(config, ranks.world_size, "the benchmark")
    # The resolver leaves the section out: what it says is for DeepSpeed's own loading, the other contestant's.
    run = replace(run, deepspeed={**run.deepspeed, "checkpoint": {"load_universal": universal}})
    mesh = mesh_of(run.mix.degrees)
    model = build_model(run, ModelSpec.of(run.config.model), ranks.device, mesh)
    if stage < 3:
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
    return build_engine(model, run, {}, ranks, mesh), ranks, run


@cache
def _joined() -> Ranks:
    return join_process_group(600.0)


class Trainer:
    """Steps on random tokens, each timed between two synchronisations."""

    def __init__(self, task: Task, engine: ZeroEngine, ranks: Ranks) -> None:
        self._engine, self._task, self._ranks = engine, task, ranks
        self.step_number = 0

    def step(self, before_update: Callable[[], None] = lambda: None) -> float:
        """Seconds of one step."""
        began_s = self._now()
        torch.manual_seed(self.step_number * 1000 + self._ranks.rank)
        shape = (self._task.micro_batch, self._task.sequence)
        inputs = torch.randint(0, self._task.model["vocab_size"], shape).to(self._ranks.device)
        micro = MicroBatch(inputs=inputs, labels=inputs, sequences=list(range(shape[0])))
        counted = inputs.numel() * self._ranks.world_size * self._task.accumulation
        self._engine.forward_backward([micro] * self._task.accumulation, lambda: counted)
        before_update()
        self._engine.update(1.0)
        self.step_number += 1
        return self._now() - began_s

    def _now(self) -> float:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()


class Ours:
    """llmtrain's Saver, as the loop uses it."""

    def __init__(self, task: Task, engine: ZeroEngine, ranks: Ranks, run: Run, folder: Path) -> None:
        self._engine, self._ranks, self._folder = engine, ranks, folder
        self._saver = Saver(engine, find_folder(folder, ranks), run.config.checkpoint, run.mix, ranks)
        self._saver.prepare()
        self.waited_s = 0.0

    def begin(self, step: int) -> None:
        counters = self._engine.counters()
        trainer = {"optimizer_step": int(counters.optimizer_step), "loss_scale": counters.loss_scale}
        self._saver.begin(step, {"step": step, "tokens": 0, **trainer})

    def before_update(self) -> None:
        began_s = time.monotonic()
        self._saver.before_update()
        self.waited_s += time.monotonic() - began_s

    def done(self) -> bool:
        message = torch.tensor(self._saver.status(), dtype=torch.int64)
        self._ranks.sum(message)
        outcome = self._saver.advance(*message.tolist())
        assert outcome is None or outcome.error is None, outcome
        return not self._saver.busy

    def finish(self) -> None:
        outcome = self._saver.drain()
        assert outcome is None or outcome.error is None, outcome

    def close(self) -> None:
        self._saver.__exit__()


class DeepSpeed:
    """engine.save_checkpoint: the loop stands still until the files are written (not: durable)."""

    def __init__(self, task: Task, engine: ZeroEngine, ranks: Ranks, run: Run, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self.waited_s = 0.0

    def begin(self, step: int) -> None:
        state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
        self._engine.deepspeed.save_checkpoint(str(self._folder), tag=f"step-{step}", client_state=state)

    def before_update(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class Dcp:
    """torch.distributed.checkpoint.async_save of the same slices, each under a name of its own: no plan to agree on."""

    kind = "thread"

    def __init__(self, task: Task, engine: ZeroEngine, ranks: Ranks, run: Run, folder: Path) -> None:
        self._engine, self._ranks, self._folder = engine, ranks, folder
        self._group = _gloo()
        self._future: Any = None
        self.waited_s = 0.0

    def begin(self, step: int) -> None:
        from torch.distributed.checkpoint import async_save
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        state = {}
        for piece in self._engine.state():
            with piece.open() as values:
                if piece.own_region.numel:
                    state[f"{self._ranks.rank}/{piece.kind}/{piece.name}"] = values[piece.own].detach()
        kind = AsyncCheckpointerType.THREAD if self.kind == "thread" else AsyncCheckpointerType.PROCESS
        path = self._folder / f"step-{step}"
        self._future = async_save(state, checkpoint_id=path, process_group=self._group, async_checkpointer_type=kind)

    def before_update(self) -> None:
        pass  # async_save returns when its copy is made

    def done(self) -> bool:
        return all(self._ranks.gather(self._future.done()))

    def finish(self) -> None:
        self._future.result()

    def close(self) -> None:
        pass


class DcpProcess(Dcp):
    """The same, written by a process of torch's."""

    kind = "process"

    def begin(self, step: int) -> None:
        # The ranks are daemons, so that none outlives the benchmark; multiprocessing gives such a process no child.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        super().begin(step)

    def close(self) -> None:
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()


@cache
def _gloo() -> Any:
    return dist.new_group(backend="gloo")


CONTESTANTS: dict[str, Any] = {"llmtrain": Ours, "deepspeed": DeepSpeed, "dcp thread": Dcp, "dcp process": DcpProcess}


def saves(task: Task) -> tuple[dict[str, list[Save]], list[float]]:
    """Rounds of saves beside training, the contestants by turns; and the seconds of undisturbed steps."""
    engine, ranks, run = make_engine(task, task.stage)
    trainer = Trainer(task, engine, ranks)
    results: dict[str, list[Save]] = {name: [] for name in task.savers}
    plain = [trainer.step() for _ in range(3)][1:]
    folder = Path(task.folder) / "saves"
    made = {name: CONTESTANTS[name](task, engine, ranks, run, folder / name) for name in task.savers}
    for _ in range(task.rounds + 1):  # the first one warms up: memory is got, processes are started
        for name, contestant in made.items():
            plain.append(trainer.step())
            results[name].append(_one_save(task, trainer, contestant, plain, folder / name, ranks))
            everywhere = ranks.gather(({key: done[1:] for key, done in results.items() if done[1:]}, plain))
            if task.figures and ranks.rank == 0:
                path = Path(task.figures)
                write(path, json.loads(path.read_text()) | figures(everywhere))
    for contestant in made.values():
        contestant.close()
    if task.source:
        DeepSpeed(task, engine, ranks, run, Path(task.folder) / "source").begin(trainer.step_number)
    engine.close()
    return {name: found[1:] for name, found in results.items()}, plain


def figures(everywhere: Sequence[tuple[dict[str, list[Save]], list[float]]]) -> dict[str, Any]:
    """Medians of each contestant's rounds, by what `saves` has on all ranks; the slowest rank counts."""
    return {
        "saves": {
            name: {
                key: statistics.median(max(getattr(each, key) for each in turn) for turn in zip(*turns, strict=True))
                for key in ("blocked_s", "lost_s", "seconds", "bytes")
            }
            for name in everywhere[0][0]
            for turns in [[rank[0][name] for rank in everywhere]]
        },
        "step_s": statistics.median(max(steps) for steps in zip(*(rank[1] for rank in everywhere), strict=True)),
    }


def _one_save(task: Task, trainer: Trainer, contestant: Any, plain: list[float], folder: Path, ranks: Ranks) -> Save:
    contestant.waited_s = 0.0
    ranks.meet()
    began_s = time.monotonic()
    contestant.begin(trainer.step_number)
    inside_s = time.monotonic() - began_s
    usual_s = sorted(plain[-8:])[len(plain[-8:]) // 2]
    longer_s = 0.0
    for _ in range(2):  # at least one step is taken beside every save
        longer_s += trainer.step(contestant.before_update) - usual_s
        if contestant.done():
            break
    while not contestant.done():
        longer_s += trainer.step(contestant.before_update) - usual_s
    contestant.finish()
    seconds = time.monotonic() - began_s
    ranks.meet()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    ranks.meet()
    if ranks.rank == 0:
        shutil.rmtree(folder)
    ranks.meet()
    blocked_s = inside_s + contestant.waited_s
    return Save(blocked_s=blocked_s, lost_s=inside_s + max(longer_s, contestant.waited_s), seconds=seconds, bytes=size)


def writes(task: Task) -> list[tuple[float, float]]:
    """Seconds of (our save with nothing beside it, a plain O_DIRECT write and fsync of as many bytes), by turns."""
    engine, ranks, run = make_engine(task, task.stage)
    Trainer(task, engine, ranks).step()
    folder = Path(task.folder) / "writes"
    ours = Ours(task, engine, ranks, run, folder)
    found = []
    for step in range(1, task.rounds + 2):
        ranks.meet()
        began_s = time.monotonic()
        ours.begin(step)
        ours.finish()
        ranks.meet()
        ours_s = time.monotonic() - began_s
        mine = sum(p.stat().st_size for p in folder.glob(f"step-*/rank-{ranks.rank:05d}.safetensors"))
        ranks.meet()
        if ranks.rank == 0:
            shutil.rmtree(folder)
        ranks.meet()
        began_s = time.monotonic()
        _plain_write(Path(task.folder) / f"plain-{ranks.rank}", mine)
        ranks.meet()
        found.append((ours_s, time.monotonic() - began_s))
        (Path(task.folder) / f"plain-{ranks.rank}").unlink()
    ours.close()
    engine.close()
    return found[1:]


def _plain_write(path: Path, size: int) -> None:
    """As fast as the disk takes it: no checksum, no page cache, one writer a rank."""
    block = mmap.mmap(-1, _BLOCK)
    block.write(os.urandom(_BLOCK))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    try:
        for at in range(0, size, _BLOCK):
            os.pwrite(handle, memoryview(block)[: min(_BLOCK, -(-(size - at) // 4096) * 4096)], at)
        os.fsync(handle)
    finally:
        os.close(handle)


def read_bytes() -> int:
    """Bytes that this process, and those that it has waited for, have read from files, cached or not."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def resume_ours(task: Task, path: str) -> tuple[float, int]:
    """(seconds, bytes read) of loading our checkpoint into an engine of ZeRO 2."""
    engine, ranks, _ = make_engine(task, RESUMED)
    began_s, read = time.monotonic(), read_bytes()
    load_checkpoint(engine, CheckpointReader(Path(path)), TrainerState.read(Path(path)), ranks)
    result = time.monotonic() - began_s, read_bytes() - read
    engine.close()
    return result


def resume_universal(task: Task, path: str) -> tuple[float, int]:
    """The same for DeepSpeed's load of a universal checkpoint."""
    engine, _, _ = make_engine(task, RESUMED, universal=True)
    began_s, read = time.monotonic(), read_bytes()
    assert engine.deepspeed.load_checkpoint(path)[0] is not None
    result = time.monotonic() - began_s, read_bytes() - read
    engine.close()
    return result
