"""The list of a run's trackers, and one object that hands metrics and events to each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from llmtrain.base import log
from llmtrain.base.redact import redact
from llmtrain.config.run import TrackingConfig
from llmtrain.tracking.console import Console
from llmtrain.tracking.local import LocalFiles
from llmtrain.tracking.metrics import METRICS

Status = Literal["finished", "stopped", "failed"]


class Sink(Protocol):
    """A tracker of a run, on rank 0. No method raises or waits for a network: training goes on without it."""

    def log(self, row: dict[str, Any], *, more: bool) -> None:
        """Take a row of metrics, keyed as in METRICS. `more`: another row of the same step follows."""
        ...

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Take an event; secrets in its fields are redacted."""
        ...

    def end_steps(self) -> None:
        """The last step is done; what follows is the end of the run."""
        ...

    def close(self, *, exit_code: int) -> None:
        """Write everything out, in at most 20 s. `exit_code`: 1 if the run has failed, else 0."""
        ...


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
        self._began_s = time.monotonic()
        self._sinks: list[Sink] = []
        if not enabled:
            return
        from llmtrain.tracking.wandb_sink import WandbSink  # rank 0 alone has one

        run_dir = Path(run_dir)
        files = LocalFiles(run_dir, start_step=start_step)
        self._sinks = [
            Console(total_steps=total_steps, norm=norm, show=show),
            files,
            WandbSink(run_dir, tracking=tracking, run_id=run_id, config=config, start_step=start_step),
        ]
        if files.dropped_rows:
            self.event("rewind", step=start_step, dropped_rows=files.dropped_rows)

    def log(self, metrics: dict[str, Any], *, more: bool = False) -> None:
        """Write one row; its keys are those of METRICS and `step` is among them. Adds the two times.

        `more`: another row of the same step follows.
        """
        if not self._sinks:
            return
        if unknown := sorted(metrics.keys() - METRICS.keys()):
            log.warn_once(f"metrics without a documented meaning: {', '.join(unknown)}")
        row = {**metrics, "time_unix_s": time.time(), "elapsed_s": time.monotonic() - self._began_s}
        for sink in self._sinks:
            sink.log(row, more=more)

    def event(self, kind: str, **fields: Any) -> None:
        """Write one event: start, resume, save, skip, stop, fault, baselines, ... Secrets are redacted."""
        for sink in self._sinks:
            sink.event(kind, redact(fields))

    def end_progress(self) -> None:
        """The last step is done: its line stays on the screen, and what comes now stands below it."""
        for sink in self._sinks:
            sink.end_steps()

    def close(self, status: Status = "finished") -> None:
        """Write everything out. Takes at most 20 s, whatever W&B does. A second call does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close(exit_code=1 if status == "failed" else 0)
