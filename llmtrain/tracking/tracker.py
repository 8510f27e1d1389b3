"""The object that passes a run's metrics and events to its trackers, and the terminal's tracker."""

from __future__ import annotations

import importlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from llmtrain.base import log, units, untrusted
from llmtrain.base.log import LiveLine
from llmtrain.base.redact import redact, redact_text
from llmtrain.objectives.objective import accuracies
from llmtrain.tracking.local import LocalFiles
from llmtrain.tracking.metrics import loss_unit, metric_of
from llmtrain.tracking.sink import Sink

_RATE_WINDOW = 5  # newest log points, over which the time per step is averaged for the ETA


def _number(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _right(row: dict[str, Any], prefix: str = "") -> float | None:
    return next((number for name in accuracies() if (number := _number(row, f"{prefix}{name}")) is not None), None)


class Console(Sink):
    """Prints rows of metrics.

    Args:
        total_steps: length of the run in steps, if known.
        epochs: length of the run, if set in epochs; lines then show the epoch.
        norm: name of the vector whose norm is `grad_norm`.
        show: called with the progress text ("": no more) and the completed share, if another process owns the terminal.
            None: a terminal at standard output gets a live line.
    """

    def __init__(
        self,
        *,
        total_steps: int | None,
        epochs: float | None = None,
        norm: str = "gradient",
        show: Callable[[str, float | None], None] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._epochs = epochs
        self._norm = norm
        self._points: deque[tuple[float, float]] = deque(maxlen=_RATE_WINDOW)
        self._line = ""
        self._show = LiveLine().show if show is None and stream is None and sys.stdout.isatty() else show

    def log(self, row: dict[str, Any], *, more: bool = False) -> None:
        """Show a row of metrics. Evaluations stay on the screen; on a terminal, each progress line replaces the
        last."""
        step = _number(row, "step")
        if step is None:
            return
        for prefix in (key.removesuffix("loss") for key in row if key.startswith("eval/") and key.endswith("/loss")):
            self._print(self._evaluation(step, row, prefix))
        for prefix in (key.removesuffix("accuracy_norm") for key in row if key.endswith("/accuracy_norm")):
            self._print(self._choices(step, row, prefix))
        if "loss" in row:
            self._points.append((step, time.monotonic()))
            self._line = self._progress(step, row)
            if self._show is None:
                self._print(self._line)
            else:
                self._show(
                    self._progress(step, row, short=True),
                    None if self._total_steps is None else step / self._total_steps,
                )

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Show nothing of the event."""

    def close(self, *, exit_code: int = 0) -> None:
        self.end_steps()

    def end_steps(self) -> None:
        """Leave the last progress line on the screen. A second call does nothing."""
        if self._show is not None and self._line:
            self._show("", None)
            self._print(self._line)
        self._show = None

    def _print(self, text: str) -> None:
        if self._stream is None:
            log.put(text)
        else:
            print(untrusted.shown(text, lines=True), file=self._stream, flush=True)

    def _step(self, step: float) -> str:
        if self._total_steps is None:
            return f"step {step:.0f}"
        return f"step {step:{len(str(self._total_steps))}.0f}/{self._total_steps}"

    def _evaluation(self, step: float, row: dict[str, Any], prefix: str) -> str:
        """Return the line of an evaluation. `prefix`: eval/, or eval/NAME/ of a set."""
        name = prefix.removeprefix("eval/").rstrip("/") or "validation"
        text = f"{self._step(step)}  {name} loss {row[f'{prefix}loss']:.4f} {loss_unit(row)}"
        if (right := _right(row, prefix)) is not None:
            text += f"  preferred {right:.1%}"
        for key, form in (("perplexity", "perplexity {:.2f}"), ("bits_per_byte", "{:.4f} bits/byte")):
            if (value := _number(row, f"{prefix}{key}")) is not None:
                text += f"  {form.format(value)}"
        return text

    def _choices(self, step: float, row: dict[str, Any], prefix: str) -> str:
        """Return the line of a set of multiple-choice questions. `prefix`: eval/NAME/."""
        plain, norm = (f"{row[prefix + key]:.1%}" for key in ("accuracy", "accuracy_norm"))
        bits = f"{row[f'{prefix}bits_per_byte']:.4f} bits/byte"
        return f"{self._step(step)}  {prefix.split('/')[1]} accuracy {plain}, normalised {norm}  {bits}"

    def _progress(self, step: float, row: dict[str, Any], *, short: bool = False) -> str:
        """Return the progress line. `short`: it fits next to the bar into 120 columns."""
        # The most important parts come first: a narrow terminal cuts the end off.
        parts = [self._step(step), f"loss {row['loss']:.4f}" + ("" if short else f" {loss_unit(row)}")]
        if self._epochs is not None and (epoch := _number(row, "epoch")) is not None:
            parts.append(f"epoch {epoch:.2f}/{self._epochs:g}")
        if (right := _right(row)) is not None:
            parts.append(f"preferred {right:.1%}")
        if (speed := _number(row, "tokens_per_s")) is not None:
            parts.append(f"{units.count(speed)} {'tok/s' if short else 'tokens/s'}")
        first_step, first_s = self._points[0]
        if self._total_steps is not None and step > first_step:
            per_step_s = (self._points[-1][1] - first_s) / (step - first_step)
            parts.append(f"{units.duration(max(self._total_steps - step, 0) * per_step_s)} left")
        for key, form, brief in (
            ("lr", "learning rate {:.1e}", "lr {:.1e}"),
            ("grad_norm", self._norm + " norm {:.2f}", "norm {:.2f}"),
            ("max_memory_gib", "memory {:.1f} GiB", "{:.1f} GiB"),
            ("mfu_causal", "MFU {:.1%}", "MFU {:.1%}"),
            ("comm_share", "communication {:.0%}", "comm {:.0%}"),
            ("loss_scale", "loss scale {:g}", "scale {:g}"),
        ):
            if (value := _number(row, key)) is not None:
                parts.append((brief if short else form).format(value))
        if skipped := _number(row, "skipped_steps"):
            parts.append(f"skipped {units.counted(round(skipped), 'step')}")
        return "  ".join(parts)


_CLOSES_S = 20.0
Status = Literal["finished", "stopped", "failed"]


class Tracker:
    """Passes on the metrics and events of a launch.

    `config`: the run's YAML, DeepSpeed dict and environment, which are redacted here. `norm`, `show`: see `Console`.
    `start_step`: step of the resumed checkpoint (0: a new run); rows of later steps are dropped, since training writes
    them again. `trackers`: key in the YAML -> tracker; `where`: returns the place in the user's code for an exception
    of a tracker. `enabled`: False on ranks other than 0, where every call does nothing. No method raises for a full
    disk or a failing tracker.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
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
        self.run_dir, self._began_s = Path(run_dir), time.monotonic()
        run = config.get("run", {})
        self._parts = tuple(f"{name}/" for name in run.get("parts", {}))
        """Prefixes of the keys of plugins' figures."""
        self._metrics = set(run.get("metrics", {}))
        epochs = config.get("run", {}).get("train", {}).get("epochs")
        self._sinks: list[Sink] = []
        self._queued: list[Queued] = []
        if not enabled:
            return
        files = LocalFiles(self.run_dir, start_step=start_step)
        self._sinks = [
            Console(total_steps=total_steps, epochs=epochs, norm=norm, show=show),
            files,
        ]
        self._queued = [Queued(key, sink, where) for key, sink in (trackers or {}).items()]
        self._hand_over("open", self.run_dir, run_id, redact(config), start_step)
        if files.dropped_rows:
            self.event("rewind", step=start_step, dropped_rows=files.dropped_rows)

    def log(self, row: dict[str, Any], *, more: bool = False) -> None:
        """Write a row with `step` and keys of tracking/metrics.py; adds the two times."""
        if not self._sinks:
            return
        if unknown := sorted(key for key in row if metric_of(key) is None and not self._of_plugin(key)):
            log.warn_once(f"metrics without a documented meaning: {', '.join(unknown)}")
        row = {**row, "time_unix_s": time.time(), "elapsed_s": time.monotonic() - self._began_s}
        for sink in self._sinks:
            sink.log(row, more=more)
        self._hand_over("log", row, more=more)

    def _of_plugin(self, key: str) -> bool:
        data, _, name = key.rpartition("/")
        return key.startswith(self._parts) or (name in self._metrics and data.partition("/")[0] in ("", "eval"))

    def event(self, kind: str, **fields: Any) -> None:
        """Write an event: start, resume, save, skip, stop, fault, baselines, ... Secrets are redacted."""
        for sink in self._sinks:
            sink.event(kind, redact(fields))
        self._hand_over("event", kind, redact(fields))

    def alert(self, title: str, text: str) -> None:
        """Ask the trackers to notify people at once, if they can."""
        self._hand_over("alert", redact_text(title), redact_text(text))

    def end_progress(self) -> None:
        """Leave the last step's line on the screen, above further output."""
        for sink in self._sinks:
            sink.end_steps()
        self._hand_over("end_steps")

    def close(self, status: Status = "finished") -> None:
        """Write everything out, in at most 20 s. A second call does nothing."""
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


_MOST_WAITING = 4096
"""Largest number of waiting calls; further ones are dropped."""


class Queued:
    """Passes calls on to a tracker's thread, in order. No method waits or raises, except `join`, which waits."""

    def __init__(self, name: str, sink: Sink, where: Callable[[BaseException], str]) -> None:
        """`name`: the tracker's key in the YAML. `where`: returns the place in the user's code for an exception."""
        self._name, self._sink, self._where = name, sink, where
        self._calls: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._dropped, self._failed, self._abandoned = 0, False, False
        self._thread = threading.Thread(target=self._run_calls, name=name, daemon=True)
        self._call_tracker(lambda: [importlib.import_module(module) for module in sink.MODULES])
        self._thread.start()

    def call(self, method: str, *words: Any, **options: Any) -> None:
        if self._failed:
            return
        if self._calls.qsize() >= _MOST_WAITING:
            self._dropped += 1
            return
        self._calls.put_nowait(lambda: getattr(self._sink, method)(*words, **options))

    def end(self, exit_code: int) -> None:
        """Queue the last call, for which `join` waits."""
        self._calls.put_nowait(lambda: self._sink.close(exit_code=exit_code))
        self._calls.put_nowait(None)

    def join(self, deadline_s: float) -> None:
        """Wait for the tracker, at most until `deadline_s` on the clock time.monotonic()."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            log.warn(f"{self._name} did not finish in time; metrics.jsonl holds everything")
        if self._thread.is_alive() or self._failed:
            self._abandoned = True
            try:
                self._sink.abandon()
            except Exception as error:
                log.warn(f"{self._name} cannot be ended ({self._reason(error)}); it may hold up the end of the process")
        if self._dropped:
            log.warn(f"{self._name} was too slow: {self._dropped} calls were dropped; metrics.jsonl has them all")

    def _run_calls(self) -> None:
        while not self._failed and (call := self._calls.get()) is not None:
            self._call_tracker(call)

    def _call_tracker(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._failed = True
            if self._abandoned:
                return
            log.warn(
                f"{self._name} is given up ({self._reason(error)}); training continues, metrics.jsonl holds everything"
            )

    def _reason(self, error: Exception) -> str:
        return self._where(error) + redact_text(f"{type(error).__name__}: {error}".splitlines()[0])
