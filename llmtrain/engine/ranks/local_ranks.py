"""Ranks that a command starts on this machine: they end with the command, which reports the first failure."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmtrain.base.child import ending_with_parent
from llmtrain.base.errors import UserError


class RankError(Exception):
    """A rank ended with an exception other than a user's mistake, was killed, or did not end in time."""


class Ranks:
    """`world_size` processes of `python -m module FOLDER`, with a launcher's variables. Leaving the context kills
    them."""

    def __init__(
        self,
        folder: Path,
        world_size: int,
        *,
        cpu: bool,
        module: str,
        shows: bool = False,
        timeout_s: float | None = None,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`shows`: rank 0 prints to the command's output; all other output goes to files, for `wait`'s messages.
        `timeout_s`: time in which all ranks must end; None: no limit. `variables`: added to this process's
        environment."""
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._folder = folder
        self._world_size = world_size
        self._processes: list[subprocess.Popen[bytes]] = []
        end_with_parent = ending_with_parent()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        of_ranks = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **of_ranks, **(variables or {})}
        environment.pop("LOCAL_SIZE", None)
        if cpu:
            environment.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        if Path("/sys/class/net/lo").exists():
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo uses the address of the hostname
        try:
            for rank in range(world_size):
                environment.update(RANK=str(rank), LOCAL_RANK=str(rank))
                with self._log(rank).open("wb") as log:
                    self._processes.append(
                        subprocess.Popen(
                            [python, "-m", module, str(folder)],
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=None if shows and not rank else log,
                            stderr=None if shows and not rank else subprocess.STDOUT,
                            start_new_session=True,  # only the command gets Ctrl-C, and ends the ranks
                            preexec_fn=end_with_parent,
                        )
                    )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Wait until all ranks have ended. Raises the first failed rank's UserError, or RankError with its
        traceback."""
        deadline = time.monotonic() + self._timeout_s
        while any(code is None for code in self._codes()):
            if any(self._codes()):
                time.sleep(1.0)  # the first rank to fail may still be writing its error
                break
            if time.monotonic() > deadline:
                waiting = [rank for rank, code in enumerate(self._codes()) if code is None]
                self.close()
                raise RankError(f"ranks {waiting} did not end within {self._timeout_s:.0f} s\n{self._tail(waiting[0])}")
            time.sleep(0.05)
        if not any(self._codes()):
            return
        failed = [rank for rank, code in enumerate(self._codes()) if code]
        self.close()
        reports = sorted(map(_report, self._folder.glob("error-*.json")), key=lambda report: report["time"])
        if not reports:
            code = self._processes[failed[0]].returncode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise RankError(f"rank {failed[0]} of {self._world_size}: {how}\n{self._tail(failed[0])}")
        first = reports[0]
        if first["user"] is not None:
            raise UserError(first["user"])
        raise RankError(f"rank {first['rank']} of {self._world_size}:\n{first['text']}")

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def _tail(self, rank: int) -> str:
        return "\n".join(self._log(rank).read_text(errors="replace").splitlines()[-15:])


@contextlib.contextmanager
def failure_reported(folder: Path) -> Iterator[None]:
    """A context around a rank's work: it writes an exception into the folder, for the command, and ends the process."""
    try:
        yield
    except BaseException as error:
        rank = int(os.environ["RANK"])
        report = {"time": time.time(), "rank": rank, "text": traceback.format_exc(), "user": None}
        if isinstance(error, UserError):
            report["user"] = str(error)
        (folder / f"error-{rank}.json").write_text(json.dumps(report))
        os._exit(1)  # other ranks wait in a collective, so destructors could hang


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that contexts inside are closed and no process is left over."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError:  # killed while it wrote
        return {"time": float("inf"), "rank": path.stem, "text": path.read_text(), "user": None}
