"""One object that takes the run's metrics and events: local files, console and W&B behind it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from llmtrain.base import log
from llmtrain.base.redact import redact
from llmtrain.config.run import TrackingConfig
from llmtrain.tracking.console import Console
from llmtrain.tracking.local import HeldFile, JsonLines, truncate_after
from llmtrain.tracking.metrics import METRICS

RUN_FILES = ("config.yaml", "deepspeed.json", "environment.json")
"""Written once, at the start."""

Status = Literal["finished", "stopped", "failed"]


class Tracker:
    """Metrics and events of one launch.

    `config` is what W&B shows as the configuration (YAML, DeepSpeed dict, environment); secrets in it are
    redacted. `norm` and `show` are those of `Console`. `start_step` is the step of the checkpoint that training goes
    on from (0: a new run): rows of later steps, from before a crash, are dropped, because training writes them again.
    With `enabled=False` (ranks other than 0) every call is a no-op. No method raises for a full disk or a failing W&B.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        tracking: TrackingConfig,
        run_id: str,
        config: dict[str, Any],
        total_steps: int | None,
        enabled: bool,
        start_step: int = 0,
        norm: str = "gradient",
        show: Callable[[str, float | None], None] | None = None,
    ) -> None:
        self._open = enabled
        if not enabled:
            return
        from llmtrain.tracking.wandb_sink import WandbSink  # rank 0 alone has one

        run_dir = Path(run_dir)
        self._began_s = time.monotonic()
        metrics = run_dir / "metrics.jsonl"
        dropped = 0
        try:
            # A run that starts again from nothing repeats its step 0 as well.
            dropped = truncate_after(metrics, start_step if start_step > 0 else -1)
        except OSError as error:
            log.warn(f"{metrics} keeps rows after step {start_step} that this launch repeats ({error.strerror}).")
        self._metrics = JsonLines(metrics)
        self._events = JsonLines(run_dir / "events.jsonl")
        self._held = [HeldFile(run_dir / name) for name in RUN_FILES if (run_dir / name).exists()]
        self._console = Console(total_steps=total_steps, norm=norm, show=show)
        self._wandb = WandbSink(run_dir, tracking=tracking, run_id=run_id, config=config, start_step=start_step)
        if dropped:
            self.event("rewind", step=start_step, dropped_rows=dropped)

    def log(self, metrics: dict[str, Any], *, more: bool = False) -> None:
        """Write one row; its keys are those of METRICS and `step` is among them. Adds the two times.

        `more`: another row of the same step follows.
        """
        if not self._open:
            return
        if unknown := sorted(metrics.keys() - METRICS.keys()):
            log.warn_once(f"metrics without a documented meaning: {', '.join(unknown)}")
        row = {**metrics, "time_unix_s": time.time(), "elapsed_s": time.monotonic() - self._began_s}
        self._put_back(row.get("step"))
        self._metrics.write(row)
        self._console.update(row)
        self._wandb.log(row, more=more)

    def _put_back(self, step: Any) -> None:
        """Write the files again that something outside the run has removed from its folder."""
        with contextlib.suppress(OSError):  # metrics.jsonl says it
            if gone := [held.path.name for held in self._held if held.put_back()]:
                log.warn(
                    f"{self._held[0].path.parent}: something outside the run has removed {', '.join(gone)}, which are "
                    "written again; checkpoints that were removed with them are gone until the next save"
                )
                self.event("removed", step=step, files=gone)

    def event(self, kind: str, **fields: Any) -> None:
        """Write one event: start, resume, save, skip, stop, fault, baselines, ... Secrets are redacted."""
        if self._open:
            self._events.write({"time_unix_s": time.time(), "kind": kind, **redact(fields)})

    def end_progress(self) -> None:
        """The last step is done: its line stays on the screen, and what comes now stands below it."""
        if self._open:
            self._console.close()

    def close(self, status: Status = "finished") -> None:
        """Write everything out. Takes at most 20 s, whatever W&B does. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._console.close()
        self._put_back(None)
        for held in self._held:
            os.close(held.fd)
        self._metrics.close()
        self._events.close()
        self._wandb.close(exit_code=1 if status == "failed" else 0)
