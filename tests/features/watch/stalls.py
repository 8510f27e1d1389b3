"""Faults that one rank of a run meets in its sixth step, for the watch to explain. The product knows nothing of them.

Each is given to `forked.Launch(before=...)` and acts in the ranks; with LOCAL_SIZE set, as DeepSpeed's launcher does,
the ranks are watched.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.helpers.gpu_texts import ILLEGAL, trace, watchdog_ended

STEP = 6


def watched(rank: int) -> None:
    """No fault."""
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]


def _at_step(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """At its sixth call, `owner.name(self, ...)` becomes `instead(plain, self, ...)`."""
    plain, calls = getattr(owner, name), 0

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return instead(plain, self, *args, **kwargs) if calls == STEP else plain(self, *args, **kwargs)

    setattr(owner, name, method)


def _in_step(instead: Callable[..., Any]) -> Callable[[int], None]:
    """A fault that rank 1 meets in place of its sixth training step: `instead(plain, self, batch, ...)`."""

    @functools.wraps(instead)
    def before(rank: int) -> None:
        watched(rank)
        if rank == 1:
            from llmtrain.training.step import Session

            _at_step(Session, "step", instead)

    return before


@_in_step
def raises(*_: Any, **__: Any) -> None:
    raise ValueError("token 600 of a vocabulary of 512")


def fails_in_transformers(rank: int) -> None:
    """On the first stage of a pipeline, in the forward pass that proves the loss."""
    watched(rank)
    if rank == 0:
        from transformers.models.llama import modeling_llama

        from llmtrain.training import setup

        check = setup.check_head

        def check_head(*given: Any, **named: Any) -> None:
            modeling_llama.apply_rotary_pos_emb = None
            check(*given, **named)

        setup.check_head = check_head


@_in_step
def crashes(*_: Any, **__: Any) -> None:
    ctypes.string_at(0)


def file_server_is_silent(rank: int, fifo: Path) -> None:
    """The next batch lies behind a read that never ends."""
    watched(rank)
    if rank == 1:
        from llmtrain.data.stream.loader import TrainLoader

        _at_step(TrainLoader, "__next__", lambda *_, **__: fifo.read_bytes())


@_in_step
def one_micro_batch_less(plain: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    from llmtrain.engine.deepspeed.engine import ZeroEngine

    ZeroEngine._accumulate = lambda *_: None  # type: ignore[method-assign]  # DeepSpeed's count stays that of the others
    return plain(self, replace(batch, micro_batches=batch.micro_batches[:-1]), *args, **kwargs)


@_in_step
def loops_for_ever(*_: Any, **__: Any) -> None:
    from llmtrain.base.rank.heartbeat import heart

    heart.phase("forward")
    while True:
        pass


def spins_in_evaluate(rank: int) -> None:
    """Once training is over: a rank whose device does not end a collective spins there, and never beats."""
    watched(rank)
    if rank == 1:
        from llmtrain.base.rank.heartbeat import heart
        from llmtrain.training import reporting

        plain = reporting.evaluation_batches

        def batches(*words: Any) -> Any:
            while heart.in_phase() == "evaluate":
                pass
            return plain(*words)

        reporting.evaluation_batches = batches


def _as_on_gpus(act: Callable[[], None]) -> None:
    """The ranks compute on devices, as far as the watch knows, and `act` is called when they have met."""
    from llmtrain.base.rank import watched as under_watch
    from llmtrain.base.rank.heartbeat import heart
    from llmtrain.training import run

    plain = run.introduce

    def introduce(*args: Any) -> None:
        plain(*args)
        heart.on_device()
        act()

    run.introduce, under_watch.on_gpu = introduce, lambda: True


def never_begins_a_collective(rank: int) -> None:
    """In its first step a rank spins, as in a wait for a device, while the other's device is in a collective."""
    watched(rank)
    from llmtrain.base.rank import watch
    from llmtrain.base.rank.heartbeat import heart

    def tend() -> None:
        while True:
            time.sleep(0.25)
            watch.tend(lambda: trace(begun=119 if rank else 120, done=119, ranks=2))

    _as_on_gpus(threading.Thread(target=tend, daemon=True).start)
    if rank == 1:
        from llmtrain.training.step import Session

        def step(*_: Any, **__: Any) -> None:
            heart.phase("backward")
            while True:
                pass

        Session.step = step  # type: ignore[method-assign, assignment]


def aborted_by_nccl(rank: int) -> None:
    """NCCL's watchdog has met an error of CUDA: it says so on standard error, and ends the process."""
    watched(rank)
    _as_on_gpus(lambda: None)
    if rank == 1:
        from llmtrain.training.step import Session

        def step(*_: Any, **__: Any) -> None:
            os.write(2, watchdog_ended(ILLEGAL).encode())
            os.abort()

        _at_step(Session, "step", step)


def fails_before_training(rank: int) -> None:
    """In the proof of the loss, which is no agreed refusal; and leaving the process group waits for the others."""
    watched(rank)
    import torch.distributed as dist

    from llmtrain.training.setup import Setup

    dist.destroy_process_group = lambda: time.sleep(600)
    if rank == 1:

        def prove(_: Any) -> None:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")

        Setup.prove = prove  # type: ignore[method-assign]


def waits_for_a_lock(rank: int) -> None:
    watched(rank)
    if rank == 1:
        from llmtrain.models.language import LanguageModel

        lock = threading.Lock()
        lock.acquire()
        _at_step(LanguageModel, "forward", lambda *_, **__: lock.acquire())


def rank_0_saves_alone(rank: int) -> None:
    watched(rank)
    if rank == 0:
        from llmtrain.training.parts import Done
        from llmtrain.training.saving import Saving

        def after_step(plain: Any, self: Any, done: Done) -> None:
            plain(self, replace(done, agreed=replace(done.agreed, save=True)))

        _at_step(Saving, "after_step", after_step)


@_in_step
def another_collective(plain: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """One rank takes another way through the code."""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(4), src=0)
    return plain(self, *args, **kwargs)


def unhurried(rank: int) -> None:
    """No fault, and a processor for others: a run without an end is as busy as its test is long."""
    watched(rank)
    from llmtrain.training.step import Session

    plain = Session.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return plain(self, *args, **kwargs)

    Session.step = step  # type: ignore[method-assign]


def busy_export(rank: int) -> None:
    """The end of the run takes rank 0 longer than fault.stall_timeout_s, at work all the time."""
    watched(rank)
    if rank == 0:
        from llmtrain.training import run as end

        plain = end.finish

        def finish(*args: Any) -> Any:
            deadline = time.monotonic() + 8.0
            while time.monotonic() < deadline:
                pass
            return plain(*args)

        end.finish = finish


def leaves_slowly(rank: int) -> None:
    """After the end of the run every rank waits for ten seconds, idle, before it goes."""
    watched(rank)
    from llmtrain.training import run

    plain = run._leave

    def leave(*ended: Any) -> None:
        time.sleep(10.0)
        plain(*ended)

    run._leave = leave
