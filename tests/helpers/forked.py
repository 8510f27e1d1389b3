"""Runs whose ranks are forked from a process that has imported everything: a launch takes about 2 s instead of 10.

For tests that kill many launches. The ranks run `llmtrain train`'s own main; only DeepSpeed's launcher is missing.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.launching import free_port
from tests.helpers.ranks import OPTIONAL, PRELOAD, become_rank

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*PRELOAD, *OPTIONAL, "tests.helpers.forked"])


LAUNCHED: list[Launch] = []
"""For the fixture that ends what a failed test leaves (tests/runs/conftest.py)."""


class Launch:
    """`world_size` ranks that train; the output of all of them goes to one file."""

    def __init__(
        self,
        recipe: Path,
        *overrides: str,
        world_size: int = 2,
        before: Callable[[int], None] | None = None,
        log_folder: Path | None = None,
    ) -> None:
        """`before`: called in each rank with its number, before it trains; a function of a module."""
        folder = log_folder or recipe.parent
        self.log = folder / f"launch-{len(list(folder.glob('launch-*.log')))}.log"
        port = free_port()
        arguments = ["--config", str(recipe), *overrides]
        self.ranks: list[Any] = [
            _CONTEXT.Process(
                target=_rank, args=(rank, world_size, port, arguments, str(self.log), dict(os.environ), before)
            )
            for rank in range(world_size)
        ]
        for rank in self.ranks:
            rank.start()
        LAUNCHED.append(self)

    def alive(self) -> bool:
        return any(rank.is_alive() for rank in self.ranks)

    def writer(self, rank: int) -> psutil.Process | None:
        """The checkpoint writer of a rank, if it has one."""
        for _ in range(100):  # a process that ends while the children are listed spoils the list
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self.ranks[rank].pid).children():
                    if "llmtrain.checkpoint.writer" in child.cmdline():
                        return child
            time.sleep(0.005)
        return None

    def kill(self) -> None:
        """SIGKILL for every rank at once; returns when they and their writers are gone."""
        writers = [self.writer(index) for index in range(len(self.ranks)) if self.ranks[index].is_alive()]
        for rank in self.ranks:
            rank.kill()
        self.wait(20)
        _, alive = psutil.wait_procs([w for w in writers if w is not None], timeout=10)
        assert not alive, "a writer outlived its rank"

    def wait(self, timeout_s: float) -> list[int | None]:
        """Exit codes; None for a rank that did not end in time."""
        deadline = time.monotonic() + timeout_s
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        return [rank.exitcode for rank in self.ranks]

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def cpu_s(self) -> float:
        """CPU-seconds of the ranks that have ended by themselves."""
        told = self.log.with_suffix(".cpu")
        return sum(map(float, told.read_text().split())) if told.exists() else 0.0


def finish(
    recipe: Path,
    *overrides: str,
    world_size: int = 2,
    timeout_s: float = 120,
    before: Callable[[int], None] | None = None,
) -> tuple[int, str]:
    """(exit code of rank 0, output of all ranks) of a launch. All must end in time."""
    launch = Launch(recipe, *overrides, world_size=world_size, before=before)
    codes = launch.wait(timeout_s)
    if None in codes:
        launch.kill()
    assert codes[0] is not None and None not in codes, (codes, launch.output()[-3000:])
    return codes[0], launch.output()


def train(recipe: Path, *overrides: str, world_size: int = 2, before: Callable[[int], None] | None = None) -> str:
    """A run that must end well; its output."""
    code, output = finish(recipe, *overrides, world_size=world_size, before=before)
    assert code == 0, output
    return output


def _rank(
    rank: int,
    world_size: int,
    port: int,
    arguments: list[str],
    log: str,
    environment: dict[str, str],
    before: Callable[[int], None] | None,
) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(environment)  # the fork server has that of its start, in an earlier test
    become_rank(rank, world_size, port)
    os.environ["DS_ACCELERATOR"] = "cpu"
    from llmtrain.cli import main

    if before is not None:
        before(rank)
    try:
        code = main(["train", *arguments])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    with Path(log).with_suffix(".cpu").open("a") as file:
        file.write(f"{time.process_time()}\n")
    os._exit(code)
