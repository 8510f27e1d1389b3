"""A few gloo ranks that stay alive for many cases: importing torch, DeepSpeed and transformers costs 5-10 s each."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import multiprocessing as mp
import os
import pickle
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

THREADS = int(os.environ.get("TEST_THREADS", "1"))
"""Threads of torch in each process of the tests. Several spin while they wait; `make test-processors` takes two."""
_THREADS = 150
"""Ranks with more start anew: each engine leaves process groups behind, and gloo's threads keep waking."""
PRELOAD = [
    "llmtrain.training.run",
    "llmtrain.commands.train",
    "llmtrain.config.load",
    "transformers.models.llama.modeling_llama",
    "tests.helpers.training",
    # What an engine imports when it is built: each rank would do so anew.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory",
    "llmtrain.engine.deepspeed.pipeline_engine",
    "llmtrain.models.parallel.expert_parallel",
    "setuptools",
    "distutils.ccompiler",
]
OPTIONAL = ("peft", "pytest")
"""Imported before the fork as well, where they are installed: by adapters, and by the modules of tests."""


_PR_SET_PDEATHSIG = 1


class RankFailed(AssertionError):
    """A rank raised (its traceback is the message) or did not answer in time."""


class RankPool:
    """`world_size` processes in one process group; `run` calls a function on all of them.

    Between two calls they are stopped: two idle ranks with 740 threads of gloo took a whole core.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
        """[result of function(*args) on rank 0, 1, ...]. The first traceback wins; then the ranks start anew."""
        if self._processes and psutil.Process(self._processes[0].pid).num_threads() > _THREADS:
            self.close()
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            for pipe in wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    failed, value = True, "the process died"
                if failed:
                    self.close()
                    raise RankFailed(f"rank {rank} of {self.world_size}:\n{value}")
                results[rank] = value
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.world_size)) - results.keys())
                self.close()
                raise RankFailed(f"no answer from ranks {missing} within {timeout_s} s")
        self._signal(signal.SIGSTOP)
        return [results[rank] for rank in range(self.world_size)]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # its pipe tells that it has died
                os.kill(process.pid, number)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = _context()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _context() -> Any:
    """Forked from a process that has imported everything; spawned where there is CUDA, which survives no fork."""
    if os.environ.get("DS_ACCELERATOR") != "cpu" and Path("/dev/nvidiactl").exists():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *OPTIONAL])
    return context


def become_rank(rank: int, world_size: int, port: int) -> None:
    """The environment that a launcher gives a rank, in a process that has imported torch."""
    import cpuinfo
    import torch

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS=str(THREADS),
    )
    os.environ.pop("LOCAL_SIZE", None)
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # 1.2 s, asked for by each optimizer in host memory
    gc.freeze()  # DeepSpeed collects when an engine begins: 0.4 s each time, with all that was imported
    torch.set_num_threads(THREADS)  # the variable comes too late for that


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped rank would outlive a test that is killed
    become_rank(rank, world_size, port)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames collectives that DeepSpeed calls
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = pickle.dumps((False, function(*args)))
        except BaseException:
            answer = pickle.dumps((True, traceback.format_exc()))
        # Not pipe.send: it would share tensors through sockets in /tmp, which a killed rank leaves behind.
        pipe.send_bytes(answer)
