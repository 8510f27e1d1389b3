"""The list of a run's trackers, and one object that hands metrics and events to each of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from llmtrain.base import log
from llmtrain.base.redact import redact
from llmtrain.config.run import TrackingConfig
from llmtrain.tracking.console import Console
from llmtrain.tracking.local import LocalFiles
from llmtrain.tracking.metrics import METRICS
from llmtrain.tracking.queued import Queued
from llmtrain.tracking.sink import Sink

_CLOSES_S = 20.0
Status = Literal["finished", "stopped", "failed"]


class Tracker:
    """Metrics and events of one launch.

    `config` is what W&B shows as the configuration (YAML, DeepSpeed dict, environment); secrets in it are
    redacted. `norm` and `show` are those of `Console`. `start_step` is the step of the checkpoint that training goes
    on from (0: a new run): rows of later steps, from before a crash, are dropped, because training writes them again.
    `trackers`: those of `trackers` in the run, by name; `where`: from an exception of theirs to the place in the
    user's code.
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
        trackers: Mapping[str, Sink] | None = None,
        where: Callable[[BaseException], str] = lambda _: "",
        norm: str = "gradient",
        show: Callable[[str, float | None], None] | None = None,
    ) -> None:
        self._began_s = time.monotonic()
        self._plugins = tuple(f"{name}/" for name in config.get("run", {}).get("parts", {}))
        """Beginnings of the keys of plugins' figures."""
        self._sinks: list[Sink] = []
        self._queued: list[Queued] = []
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
        self._queued = [Queued(name, copy.copy(sink), where) for name, sink in (trackers or {}).items()]
        self._hand_over("open", run_dir, run_id, redact(config), start_step)
        if files.dropped_rows:
            self.event("rewind", step=start_step, dropped_rows=files.dropped_rows)

    def log(self, metrics: dict[str, Any], *, more: bool = False) -> None:
        """Write one row; its keys are those of METRICS and `step` is among them. Adds the two times.

        `more`: another row of the same step follows.
        """
        if not self._sinks:
            return
        if unknown := sorted(key for key in metrics.keys() - METRICS.keys() if not key.startswith(self._plugins)):
            log.warn_once(f"metrics without a documented meaning: {', '.join(unknown)}")
        row = {**metrics, "time_unix_s": time.time(), "elapsed_s": time.monotonic() - self._began_s}
        for sink in self._sinks:
            sink.log(row, more=more)
        self._hand_over("log", row, more=more)

    def event(self, kind: str, **fields: Any) -> None:
        """Write one event: start, resume, save, skip, stop, fault, baselines, ... Secrets are redacted."""
        for sink in self._sinks:
            sink.event(kind, redact(fields))
        self._hand_over("event", kind, redact(fields))

    def end_progress(self) -> None:
        """The last step is done: its line stays on the screen, and what comes now stands below it."""
        for sink in self._sinks:
            sink.end_steps()
        self._hand_over("end_steps")

    def close(self, status: Status = "finished") -> None:
        """Write everything out. Takes at most 20 s, whatever W&B does. A second call does nothing."""
        sinks, queued, exit_code = self._sinks, self._queued, 1 if status == "failed" else 0
        self._sinks, self._queued = [], []
        for tracker in queued:
            tracker.end(exit_code)
        until_s = time.monotonic() + _CLOSES_S
        for sink in sinks:
            sink.close(exit_code=exit_code)
        for tracker in queued:
            tracker.join(until_s)

    def _hand_over(self, method: str, *words: Any, **options: Any) -> None:
        for tracker in self._queued:
            tracker.call(method, *words, **options)
